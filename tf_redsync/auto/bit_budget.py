"""`BitBudget`: chooses each variable's method under a budget of bits, by measured errors."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.auto.auto import say
from tf_redsync.cluster import agreement
from tf_redsync.config import register
from tf_redsync.exchange import loopback
from tf_redsync.exchange.driver import Network
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Method
from tf_redsync.methods.coded_topk import CodedTopK
from tf_redsync.methods.dense import Dense
from tf_redsync.network import strategies
from tf_redsync.ops.wire import each_finite
from tf_redsync.policy import Assignment, Policy, Resolved, or_dense
from tf_redsync.tables import aligned

_logger = logging.getLogger("tf_redsync")
_NO_GRADIENTS = (
    "BitBudget has no `gradients`: all variables are exchanged by %s, unless a saved "
    "choice is loaded"
)

# Values of the field in which the default method is varied, by the field's name.
LADDERS: dict[str, tuple[float, ...]] = {
    "bits": (2, 4, 8),
    "rank": (1, 2, 4, 8, 16),
    "density": (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2),
}
UNITS = 20_000  # parts of the budget, to which costs are rounded up
_WORKERS = 2  # number of workers in the measurement
Gradients = Callable[[], Iterable[Sequence[Any]]]


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class BitBudget(Policy):
    """A policy that minimizes the compression error under a budget of bits per element.

    Some layers' gradients compress better than others. With the gradients g_1 .. g_T of a few
    steps and the totals d_t that the exchange delivers for them, with error feedback, for variable
    l and candidate c:

        error(l, c) = | sum over t of (g_t - d_t) |^2           the residual after T steps
        cost(l, c)  = bits that one of two workers sends per step

        minimise    sum over l of error(l, c_l)
        subject to  sum over l of cost(l, c_l) <= bits * elements

    With `relative` the errors of a variable are divided by the mean square of its gradients, as an
    adaptive optimizer divides its updates.

    Dynamic programming over 20,000 parts of the budget finds the minimum. The errors are means over
    the workers, so all workers make the same choice. `explain()` prints the table. A run that loads
    the exchange's state keeps the saved choice.

    Ilia Markov, Kaveh Alimohammadi, Elias Frantar, Dan Alistarh (2024), "L-GreCo:
    Layerwise-Adaptive Gradient Compression for Efficient Data-parallel Deep Learning", MLSys, arXiv
    2210.17357.

    Differences from the paper

    * The paper minimises the bits under a bound of the error, and repeats the choice during
      training. Here the user sets the bits, and the choice is made once.

    Args:
        default: The method whose `density`, `rank` or `bits` is chosen, from `LADDERS`.
        bits: Maximum mean bits per element that a worker sends per step, with two workers.
        gradients: Called when the optimizer is built. Yields the gradients of a few steps, each a
            list in the order of the trainable variables, with `None` for variables without one.
            With several workers compute them within `strategy.run`; see docs/policy.md. A process
            uses the mean of its replicas' gradients. Without `gradients` all variables have
            `default`, until a saved choice is loaded.
        candidates: Methods to choose from, instead of `default` with other settings. They must have
            the momentum of `default`, so pass that as well.
        relative: Whether errors are relative to the variable's gradients, for optimizers such as
            Adam.
        rules: Rules for variables with a fixed method. Their bits count towards the budget.
        output_layer: See `Policy`.

    Raises:
        ValueError: an argument is out of range; the message names it. When the optimizer is built:
            `gradients` yields no step or an invalid one, or even the smallest settings take more
            than `bits`.
        DistributedError: when the optimizer is built: `gradients` fails on another worker.

    Example:
        >>> import tf_redsync as rs
        >>> policy = rs.BitBudget(default=rs.CodedGMC(momentum=0.9), bits=0.3)
        >>> len(policy.options)
        8
    """

    default: Method = dataclasses.field(default_factory=lambda: CodedTopK(density=0.03))
    bits: float = 0.3
    gradients: Gradients | None = dataclasses.field(default=None, compare=False, repr=False)
    candidates: tuple[Method, ...] | None = None
    relative: bool = False

    @override
    def __post_init__(self) -> None:
        if self.candidates is not None:
            checks.make_tuple(self, "candidates")
            if not self.candidates:
                raise ValueError("`candidates` must have a method. Received: candidates=()")
        for method in self.candidates or ():
            if not isinstance(method, Method):
                raise ValueError(
                    "`candidates` must be tf_redsync methods. Received: "
                    f"{method!r} in candidates{checks.class_hint(method)}"
                )
        checks.real("bits", self.bits, low=0.0, high=64.0, low_open=True)
        checks.boolean("relative", self.relative)
        if self.gradients is not None and not callable(self.gradients):
            raise ValueError(
                "`gradients` must be a function without arguments that yields a list of gradients "
                f"for each of a few steps. Received: {type(self.gradients).__name__}"
            )
        super().__post_init__()
        for method in self.methods:
            if method.sync_schedule.per_worker_weights or method.traits.needs_sgd:
                raise ValueError(
                    "the methods of a BitBudget must exchange gradients in every step. Received: "
                    f"{method!r}"
                )

    @property
    def options(self) -> tuple[Method, ...]:
        """The methods that a variable without a rule may get."""
        if self.candidates is not None:
            return self.candidates
        fields = {f.name for f in dataclasses.fields(self.default)}
        for name, values in LADDERS.items():
            if name in fields:
                return tuple(dataclasses.replace(self.default, **{name: v}) for v in values)
        raise ValueError(
            f"`default` must have one of {', '.join(LADDERS)}, or `candidates` must be given. "
            f"Received: default={self.default!r}"
        )

    @property
    @override
    def methods(self) -> tuple[Method, ...]:
        return (*super().methods, *self.options)

    @override
    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor except `gradients`."""
        config = super().get_config()
        del config["gradients"]
        return config

    @override
    def resolve(
        self,
        specs: Sequence[TensorSpec],
        strategy: Any,
        network: Network,
        bucket_bytes: int | None,
        sparse_totals: Callable[[Method], bool],
    ) -> Resolved:
        """Measure the errors and choose; see `tf_redsync.policy.Undecided`."""
        if self.gradients is None:
            agreement.agree(strategy, "exchange by BitBudget without `gradients`")
            _logger.warning(_NO_GRADIENTS, self.default)
            return self
        fixed = {a.spec.position: a.method for a in self.assign(specs) if self.rule_of(a.spec)}
        marked = self.mark_output_layer(specs)
        by_variable = [
            (fixed[s.position],) if s.position in fixed else self.options for s in marked
        ]
        steps = agreement.together(
            strategy,
            "exchange by BitBudget with `gradients`",
            functools.partial(_steps, self.gradients, specs, strategy),
        )
        measured = [
            _measure(spec, methods, [step[i] for step in steps])
            for i, (spec, methods) in enumerate(zip(marked, by_variable, strict=True))
        ]
        errors = [[error for error, _ in row] for row in measured]
        if self.relative:
            errors = _relative(errors, steps)
        errors = _mean(errors, strategy, network)
        costs = [[cost for _, cost in row] for row in measured]
        chosen = allocate(errors, costs, self.bits * sum(s.size for s in marked))
        rows = zip(marked, by_variable, errors, costs, chosen, strict=True)
        allocation = Allocation(
            tuple(Row(s, m[c], b[c], e[c]) for s, m, e, b, c in rows), self.bits
        )
        agreement.agree(strategy, f"exchange as in {allocation}")
        if strategies.process_rank(strategy) == 0:
            say(str(allocation))
        return allocation


@dataclasses.dataclass(frozen=True)
class Row:
    """A variable, its method, the bits that it takes per step, and its squared error."""

    spec: TensorSpec
    method: Method
    bits: float
    error: float


@dataclasses.dataclass(frozen=True)
class Allocation:
    """The choice of a `BitBudget`; `str` returns its table.

    Attributes:
        rows: One for each variable, in the model's order.
        budget: `BitBudget.bits`.
    """

    rows: tuple[Row, ...]
    budget: float

    @property
    def trial_steps(self) -> int:
        """0, because the choice needs no trial in training."""
        return 0

    @property
    def bits(self) -> float:
        """Mean bits per element."""
        return sum(r.bits for r in self.rows) / max(1, sum(r.spec.size for r in self.rows))

    def assign(self, specs: Sequence[TensorSpec]) -> list[Assignment]:
        """Return the method of each of `specs`; see `Policy.assign`."""
        by_position = {r.spec.position: r for r in self.rows}
        rows = [by_position[s.position] for s in specs]
        return [or_dense(r.spec, r.method, f"a budget of {self.budget} bits") for r in rows]

    @override
    def __str__(self) -> str:
        head = ["variable", "elements", "method", "bits", "error"]
        cells = [
            [
                r.spec.name,
                f"{r.spec.size:,}",
                or_dense(r.spec, r.method, "").method.describe(r.spec),
                f"{r.bits / max(1, r.spec.size):.3f}",
                f"{r.error:.3g}",
            ]
            for r in self.rows
        ]
        title = f"tf_redsync.BitBudget: {self.bits:.3f} of {self.budget} bits per element"
        return "\n".join([title, *aligned([head, *cells], (1, 3, 4))])


def allocate(
    errors: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], budget: float
) -> list[int]:
    """Return the option of each row that minimizes the sum of errors within the budget.

    Args:
        errors: For each row the errors of its options. Options with a non-finite error, whose
            exchange overflows, are never chosen.
        costs: The costs of these options, at least 0; rounded up to multiples of `budget / UNITS`.
        budget: Maximum sum of costs.

    Returns:
        For each row the index of its option.

    Raises:
        ValueError: even the cheapest options cost more than `budget`.
    """
    least = sum(
        min((c for e, c in zip(*row, strict=True) if np.isfinite(e)), default=np.inf)
        for row in zip(errors, costs, strict=True)
    )
    best = np.zeros(UNITS + 1)  # minimum error of the rows so far, by the units that they may use
    taken = np.zeros((len(errors), UNITS + 1), np.int16)
    units = [[int(np.ceil(UNITS * c / budget - 1e-9)) for c in row] for row in costs]
    for i, (error, cost) in enumerate(zip(errors, units, strict=True)):
        options = np.full((len(error), UNITS + 1), np.inf)
        for option, (e, u) in enumerate(zip(error, cost, strict=True)):
            if u <= UNITS and np.isfinite(e):
                options[option, u:] = best[: UNITS + 1 - u] + e
        taken[i] = options.argmin(axis=0)
        best = options.min(axis=0)
    if not np.isfinite(best[-1]):
        raise ValueError(
            f"`bits` is too small: the smallest settings take {least / budget:.3g} times as much. "
            "Add smaller `candidates`, or leave biases to a method that does not send them densely"
        )
    left, chosen = UNITS, []
    for i in reversed(range(len(errors))):
        option = int(taken[i, left])
        chosen.append(option)
        left -= units[i][option]
    return chosen[::-1]


def _steps(
    function: Gradients, specs: Sequence[TensorSpec], strategy: tf.distribute.Strategy
) -> list[list[tf.Tensor]]:
    """Return the steps of `BitBudget.gradients`.

    Raises:
        ValueError: this worker's gradients are missing or invalid.
    """
    steps = [_dense(gradients, specs, strategy) for gradients in function()]
    if not steps:
        raise ValueError("`gradients` must yield the gradients of a step at least")
    return steps


def _dense(
    gradients: Sequence[Any], specs: Sequence[TensorSpec], strategy: tf.distribute.Strategy
) -> list[tf.Tensor]:
    """Return means over the replicas of this process, in float32; zeros for `None`."""

    def mean(gradient: Any) -> tf.Tensor:
        parts = [tf.convert_to_tensor(g) for g in strategy.experimental_local_results(gradient)]
        return tf.add_n([tf.cast(p, tf.float32) for p in parts]) / len(parts)

    grads = list(gradients)
    if len(grads) != len(specs):
        raise ValueError(
            f"`gradients` must yield a gradient for each of the {len(specs)} trainable variables. "
            f"Received: {len(grads)}"
        )
    dense = [tf.zeros(s.shape) if g is None else mean(g) for g, s in zip(grads, specs, strict=True)]
    for finite, spec in zip(each_finite(dense).numpy(), specs, strict=True):
        if not finite:
            raise ValueError(
                f"`gradients` must be finite. Received: a NaN or infinity in that of {spec.name!r}"
            )
    return dense


def _measure(
    spec: TensorSpec, methods: Sequence[Method], grads: Sequence[tf.Tensor]
) -> list[tuple[float, float]]:
    """Return each method's squared error after the steps of `grads`, and its bits per step."""
    served = [or_dense(spec, method, "").method for method in methods]
    exact = {m: _exchanged(spec, m, grads)[0] for m in set(map(_unrounded, served))}
    measurements = []
    for method in served:
        delivered, bits = _exchanged(spec, method, grads)
        missing = exact[_unrounded(method)] - delivered
        measurements.append((float(tf.reduce_sum(missing * missing)), bits))
    return measurements


def _unrounded(method: Method) -> Dense:
    """Return the dense exchange in float32 with the same momentum.

    The dense form of a method that rounds, such as `HalfPrecision`, rounds as well.
    """
    dense = method.dense()
    if isinstance(dense, Dense):
        return dense
    return Dense(momentum=method.traits.momentum_in_exchange)


def _relative(errors: list[list[float]], steps: Sequence[Sequence[tf.Tensor]]) -> list[list[float]]:
    """Divide the errors of each variable by its mean square over the steps."""
    squares = [_mean_square([step[i] for step in steps]) for i in range(len(errors))]
    return [[e / square for e in row] for row, square in zip(errors, squares, strict=True)]


def _mean_square(grads: Sequence[tf.Tensor]) -> float:
    """Return the mean square of a variable's gradients; 1 if all are 0, which have no error."""
    return float(sum(tf.reduce_mean(g * g) for g in grads)) / len(grads) or 1.0


def _exchanged(
    spec: TensorSpec, method: Method, grads: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, float]:
    """Return the sum of the totals of some steps, and the bits that a worker sends per step."""
    layout = BucketLayout((spec,), _WORKERS)
    states = loopback.initial_states(method, layout)
    delivered, sent = tf.zeros(spec.shape), 0.0
    for number, gradient in enumerate(grads, loopback.STEADY_STEP):
        halves = [[gradient / _WORKERS]] * _WORKERS
        step = loopback.run_step(method, layout, halves, states, number)
        states, (total,) = step.states, step.totals[0]
        delivered, sent = delivered + total, sent + float(step.bytes_sent)
    return delivered, 8.0 * sent / len(grads)


def _mean(
    rows: Sequence[Sequence[float]], strategy: tf.distribute.Strategy, network: Network
) -> list[list[float]]:
    """Return the elementwise mean of all processes' `rows`; all processes must call it."""
    flat = np.array([value for row in rows for value in row], np.float32)
    total = strategies.sum_over_processes(strategy, network, flat)
    values = iter((total / strategies.process_count(strategy)).tolist())
    return [[next(values) for _ in row] for row in rows]
