"""The Muon optimizer for Keras 3, which treats attention kernels as matrices.

Private names of Keras 3 used here, on the optimizer itself: `_get_variable_index(variable)`,
`_should_use_adamw(variable)` and `_muon_update_step(gradient, variable, learning_rate, momentum)`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tf_redsync import checks

# Kernels of `MultiHeadAttention` and `GroupedQueryAttention`, and the number of leading axes that
# are inputs. Shapes: [width, heads, size] of the projections, [heads, size, width] of the output.
_INPUT_AXES = {"query": 1, "key": 1, "value": 1, "attention_output": 2}
_OF_ATTENTION = re.compile(rf"(?:^|/)({'|'.join(_INPUT_AXES)})/(kernel|bias)$")


@keras.saving.register_keras_serializable(package="tf_redsync", name="Muon")
class Muon(keras.optimizers.Muon):
    """`keras.optimizers.Muon` that updates the kernels of attention by Muon as well.

    Keras's Muon leaves variables without exactly two axes to AdamW. Kernels of attention layers
    have three axes, their biases two. This class reshapes the kernels into matrices [inputs,
    outputs] for Muon, and AdamW updates the biases.

    The arguments are those of `keras.optimizers.Muon`. Pass the output layer's name in
    `exclude_layers`.

    Raises:
        ImportError: Keras is older than 3.13. The Muon of those versions fails on TensorFlow.
        ValueError: `momentum`, `adam_beta_1`, `adam_beta_2` or `ns_steps` is out of range.

    Example:
        >>> import tf_redsync as rs
        >>> inner = rs.Muon(3e-3, exclude_layers=["logits"])
        >>> optimizer = rs.DistributedOptimizer(inner, rs.DiLoCo(steps=30))

    Reference:
        Jordan et al. (2024), "Muon: An optimizer for hidden layers in neural networks"; Liu et al.
        (2025), "Muon is Scalable for LLM Training", arXiv 2502.16982.
    """

    @functools.wraps(keras.optimizers.Muon.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not hasattr(self, "lr_adjust"):  # a method of Keras's Muon since 3.13
            raise ImportError(
                f"rs.Muon needs Keras 3.13 or later. Received: Keras {keras.__version__}. Run "
                "pip install 'keras>=3.13'."
            )
        super().__init__(*args, **kwargs)
        for name in ("momentum", "adam_beta_1", "adam_beta_2"):
            checks.real(name, getattr(self, name), low=0.0, high=1.0, high_open=True)
        checks.integer("ns_steps", self.ns_steps, low=1)

    def build(self, variables: Sequence[Any]) -> None:
        """Create the slots of every variable."""
        if self.built:
            return
        super().build(variables)
        self._shapes = [_matrix(v) for v in variables]  # steps get variables without a path

    def _should_use_adamw(self, variable: Any) -> bool:
        match = _OF_ATTENTION.search(variable.path)
        if match is None or (match[2] == "kernel" and _matrix(variable) is None):
            return bool(super()._should_use_adamw(variable))
        return match[2] == "bias" or any(
            re.search(keyword, variable.path) for keyword in self.exclude_layers
        )

    def _muon_update_step(self, gradient: Any, variable: Any, lr: Any, m: Any) -> None:
        shape = self._shapes[self._get_variable_index(variable)]
        if shape is None:
            super()._muon_update_step(gradient, variable, lr, m)
            return
        self.assign_add(m, ops.add(gradient, m * (self.momentum - 1)))
        ahead = ops.add(gradient, self.momentum * m) if self.nesterov else m
        step = self.zeropower_via_newtonschulz5(ops.reshape(ahead, shape), self.ns_steps)
        self.assign_sub(variable, ops.reshape(self.lr_adjust(lr * step), variable.shape))


def _matrix(variable: Any) -> tuple[int, int] | None:
    """Return the matrix shape of an attention kernel; `None` for any other variable."""
    match = _OF_ATTENTION.search(variable.path)
    if match is None or match[2] != "kernel" or len(variable.shape) != 3:
        return None
    a, b, c = variable.shape
    return (a, b * c) if _INPUT_AXES[match[1]] == 1 else (a * b, c)
