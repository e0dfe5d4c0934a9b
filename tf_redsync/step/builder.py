"""The builder of an exchange, which holds its settings until the variables exist."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_redsync.cluster import agreement, step_errors
from tf_redsync.config import serialize
from tf_redsync.exchange.layout import TensorSpec, tensor_spec
from tf_redsync.exchange.method import Method
from tf_redsync.network import strategies
from tf_redsync.ops import native
from tf_redsync.policy import Policy, Undecided
from tf_redsync.schedules import DenseWarmUp
from tf_redsync.step import nonfinite, workers
from tf_redsync.step.fit_steps import FitSteps, TrainingLength, WarmUp
from tf_redsync.step.gradient_exchange import GradientExchange

_VARIABLES = "trainable_variables"  # the key of their descriptions
_ADVICE = {  # by a part of the difference that it is for
    f"{_VARIABLES}[": "\nCreate the same layers with the same names, in the same order on all "
    "workers. A loop over a set has another order in each process: loop over a list.",
    "versions.": "\nInstall the same packages on all workers.",
}


class NotBuilt(AttributeError, RuntimeError):
    """A member of an exchange was used before its variables exist."""


class ExchangeBuilder:
    """Builder of an optimizer's exchange, which holds the settings until `build`.

    Forwards attribute access to the built exchange.

    Args:
        policy: Chooses a method for every variable: a `Policy`, or an `Auto` that resolves to one.
        bucket_bytes: Size at which a bucket is full, in float32 bytes; see `make_buckets`.
        direct_collectives: Use single-round collectives if the strategy has them.
        two_levels: Whether a process with several replicas is one worker; see `workers.py`.
        max_skipped_steps: Number of skipped steps in a row that raises; `None` or 0: no limit.
        warm_up: A dense warm-up of all methods, or `None`.
        rate: Returns the optimizer's learning rate, a scalar.
        kind: The class of the exchange.

    Attributes:
        policy: As given.
        warm_up: The warm-up, shared with the built exchange; or `None`.
        training: The length of the training, also shared; `None` if no setting of a method is a
            fraction of it.
        expects_pruning: See `GradientExchange`.
        loaded: Snapshot of a file that was loaded before `build`; `None` without such a file.
        consensus: `None`: before `build` the weights are equal on all workers.
    """

    consensus = None

    def __init__(
        self,
        policy: Policy | Undecided,
        bucket_bytes: int | None = None,
        direct_collectives: bool = True,
        two_levels: bool | None = None,
        max_skipped_steps: int | None = nonfinite.DEFAULT_LIMIT,
        warm_up: DenseWarmUp | None = None,
        rate: Callable[[], Any] | None = None,
        kind: type[GradientExchange] = GradientExchange,
    ):
        self.policy, self.rate, self.expects_pruning = policy, rate, False
        self.loaded: dict[str, np.ndarray] | None = None
        self._kind, self._counts_elements = kind, False
        self._bucket_bytes = bucket_bytes
        self._direct = direct_collectives
        self._two_levels = two_levels
        self._max_skipped = max_skipped_steps or 0
        self.warm_up = None if warm_up is None else WarmUp(warm_up)
        parts = [
            m
            for m in policy.methods
            if m.sync_schedule.intervals and m.sync_schedule.intervals.of_training
        ]
        self.training = TrainingLength(f"method={parts[0]!r}") if parts else None
        self._exchange: GradientExchange | None = None

    @property
    def lengths(self) -> tuple[FitSteps, ...]:
        """The numbers of steps that `fit` may set when it begins."""
        return tuple(filter(None, (self.warm_up, self.training)))

    @property
    def built(self) -> bool:
        """Whether the exchange is built."""
        return self._exchange is not None

    def build(
        self,
        variables: Sequence[Any],
        sparse_totals: Callable[[Method], bool] | None = None,
        weights: Sequence[tf.Variable] | None = None,
        described: dict[str, Any] | None = None,
    ) -> GradientExchange:
        """Create and return the exchange, after a check that all workers agree.

        Call it in the scope of the strategy, outside of any replica.

        Args:
            variables: All trainable variables, in the order of the optimizer.
            sparse_totals: Returns whether the caller accepts sparse totals of a method
                (`ops/sparse.py`); `None` for never. All are dense if updates have no order on a
                worker, such as one whose GPU kernels do not run.
            weights: The same variables as `tf.Variable`s, if `variables` holds Keras ones.
            described: Further settings, JSON-serializable, that must be equal on all workers.

        Raises:
            TypeError: If a variable is not float32, bfloat16 or float16.
            ValueError: If the strategy or a setting is not supported.
            Disagreement: If the workers have different models, methods or settings.
        """
        step_errors.install()
        strategy = tf.distribute.get_strategy()
        strategies.check_supported(strategy)
        specs = tuple(tensor_spec(v, i) for i, v in enumerate(variables))
        weights = variables if weights is None else weights
        if not _agree(strategy, self._describe(strategy, specs, described), weights):
            sparse_totals = None  # as on the other workers: a dense total's update rounds otherwise
        worker = workers.this_worker(strategy, self._two_levels, self._direct)
        sparse = _allowing_sparse_totals(sparse_totals, specs)
        resolved = self.policy.resolve(specs, strategy, worker.network, self._bucket_bytes, sparse)
        # The agreement above determines which variables are created.
        with agreement.agreed(strategy, "create the state of the exchange"):
            made = self._kind(
                strategy=strategy,
                worker=worker,
                weights=weights,
                specs=specs,
                policy=self.policy,
                resolved=resolved,
                bucket_bytes=self._bucket_bytes,
                sparse_totals=sparse,
                max_skipped=self._max_skipped,
                warm_up=self.warm_up,
                training=self.training,
                rate=self.rate,
                expects_pruning=self.expects_pruning,
            )
        self._exchange = made
        if self._counts_elements:
            made.count_elements()
        return made

    def count_elements(self) -> bool:
        """Make the exchange count elements; see `GradientExchange.count_elements`."""
        if self._exchange is not None:
            return self._exchange.count_elements()
        self._counts_elements = True
        return False

    def to_consensus(self) -> None:
        """Forward to the exchange; a no-op before `build`."""
        if self._exchange is not None:
            self._exchange.to_consensus()

    def __getattr__(self, name: str) -> Any:
        made = self.__dict__.get("_exchange")
        if made is not None:
            return getattr(made, name)
        raise NotBuilt(
            f"the optimizer is not built, so its exchange has no `{name}` yet. Call "
            "`optimizer.build(variables)` or train a step first."
        )

    def _describe(
        self,
        strategy: tf.distribute.Strategy,
        specs: Sequence[TensorSpec],
        described: dict[str, Any] | None,
    ) -> str:
        return json.dumps(
            {
                "policy": serialize(self.policy),
                "bucket_bytes": self._bucket_bytes,
                "direct_collectives": self._direct,
                "two_levels": self._two_levels,
                "max_skipped_steps": self._max_skipped,
                "warm_up": None if self.warm_up is None else serialize(self.warm_up.wanted),
                "replicas": strategy.num_replicas_in_sync,
                "restores_loaded_state": self.loaded is not None,
                _VARIABLES: [[_described(s)] for s in specs],
                **(described or {}),
            }
        )


def _described(spec: TensorSpec) -> str:
    """Return the description of a variable, which workers compare.

    Equal shapes in another order would otherwise train: the workers would start with equal weights
    and sum the gradients of different variables.
    """
    return f"{agreement.without_numbers(spec.name)} {spec.dtype}{list(spec.shape)}"


def _agree(
    strategy: tf.distribute.Strategy, description: str, weights: Sequence[tf.Variable]
) -> bool:
    """Agree on `description`; return whether updates have an order on all workers."""
    unordered = "" if native.adds_in_order(weights) else "updates have no order"
    try:
        return not any(agreement.gather_texts(strategy, description, unordered))
    except agreement.Disagreement as error:
        advice = next((words for part, words in _ADVICE.items() if part in str(error)), "")
        raise agreement.Disagreement(f"{error}{advice}") from None


def _allowing_sparse_totals(
    accepted: Callable[[Method], bool] | None, specs: Sequence[TensorSpec]
) -> Callable[[Method], bool]:
    """Return whether totals of a method may be sparse, with what the caller accepts."""
    if accepted is None or any(s.dtype != "float32" for s in specs):
        return lambda method: False
    return lambda method: not method.sync_schedule.local_steps and accepted(method)
