"""The AMSGrad optimizer of COMP-AMS, for Keras 3.

Private names of Keras 3 used here, on the optimizer itself: `_get_variable_index(variable)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import keras
from keras import ops

from tf_redsync import checks


@keras.saving.register_keras_serializable(package="tf_redsync", name="AMSGrad")
class AMSGrad(keras.optimizers.Optimizer):
    """AMSGrad in the form of COMP-AMS: Adam with a second moment that never decreases.

        m <- beta_1 m + (1 - beta_1) g
        v <- beta_2 v + (1 - beta_2) g^2,  h <- max(h, v)
        w <- w - learning_rate m / sqrt(h + epsilon)

    `keras.optimizers.Adam(amsgrad=True)` differs slightly: it corrects the bias of both moments and
    adds epsilon outside of the root.

    Args:
        learning_rate: A number or a Keras schedule.
        beta_1: Decay of the first moment, in [0, 1).
        beta_2: Decay of the second moment, in [0, 1).
        epsilon: Added inside the root, in units of the squared gradient; at least 0.
        name: Name of the optimizer.
        **kwargs: See `keras.optimizers.Optimizer`.

    Raises:
        ValueError: a hyper-parameter is out of range.

    Reference:
        Li, Karimi, Li (2022), "On Distributed Adaptive Optimization with Gradient Compression",
        algorithm 2.
    """

    amsgrad: ClassVar[bool] = True

    def __init__(
        self,
        learning_rate: Any = 0.0005,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        name: str = "amsgrad",
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        checks.real("beta_1", beta_1, low=0.0, high=1.0, high_open=True)
        checks.real("beta_2", beta_2, low=0.0, high=1.0, high_open=True)
        checks.real("epsilon", epsilon, low=0.0, high=float("inf"), high_open=True)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon

    def build(self, variables: Sequence[Any]) -> None:
        """Create the first, second and largest second moment of every variable."""
        if self.built:
            return
        super().build(variables)
        kinds: tuple[list[Any], list[Any], list[Any]] = [], [], []
        for v in variables:
            for slots, name in zip(kinds, ("momentum", "velocity", "velocity_max"), strict=True):
                slots.append(self.add_variable_from_reference(reference_variable=v, name=name))
        # A list for each kind, as in Keras's optimizers, where `slots.py` finds them.
        self._momentums, self._velocities, self._largest = kinds

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable by the rule in the class docstring."""
        rate, g = ops.cast(learning_rate, variable.dtype), ops.cast(gradient, variable.dtype)
        index = self._get_variable_index(variable)
        m, v, largest = self._momentums[index], self._velocities[index], self._largest[index]
        self.assign(m, self.beta_1 * m + (1.0 - self.beta_1) * g)
        self.assign(v, self.beta_2 * v + (1.0 - self.beta_2) * ops.square(g))
        self.assign(largest, ops.maximum(largest, v))
        # In float16 epsilon and the squares of small gradients are 0.
        step = ops.divide_no_nan(rate * m, ops.sqrt(largest + self.epsilon))
        self.assign_sub(variable, step)

    def get_config(self) -> dict[str, Any]:
        """Return the config."""
        config = super().get_config()
        config.update(beta_1=self.beta_1, beta_2=self.beta_2, epsilon=self.epsilon)
        return config
