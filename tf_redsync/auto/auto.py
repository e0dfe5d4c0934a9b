"""`Auto`: chooses the exchange of every bucket by measurement, at least as fast as the all-reduce.

When the optimizer is built, every worker

1. measures the collectives (`probe.link`) and each candidate's computation on its device
   (`probe.work`). The slowest worker's times count, so all workers decide on equal numbers;
2. predicts for every bucket the time of the all-reduce and of every candidate (`cost.py`). The
   fastest serves the bucket, a candidate only if it wins clearly. With a budget (`max_overhead`)
   the first method that fits it serves all buckets;
3. logs the table of predictions.

If a bucket is compressed, training alternates dense and compressed steps for a while. If the dense
ones are faster, all later steps are dense (`step/trial.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from tf_redsync import checks
from tf_redsync.auto import cost, probe
from tf_redsync.auto.candidates import (
    check_candidate,
    chosen_from,
    every_step,
    for_adaptive,
    names,
)
from tf_redsync.auto.decision import (
    Choice,
    Decision,
    LeftOut,
    Measured,
    better_place,
    check_budget,
    left_out_lines,
    within_budget,
)
from tf_redsync.cluster import agreement
from tf_redsync.config import Configurable, register
from tf_redsync.exchange.driver import Network
from tf_redsync.exchange.layout import LARGEST_BUCKET, TensorSpec, make_buckets
from tf_redsync.exchange.method import Method
from tf_redsync.methods.dense import Dense
from tf_redsync.methods.gmc import CodedGMC
from tf_redsync.network import strategies
from tf_redsync.policy import Policy, check_clip_norms, check_together

# A candidate must take at most CLEARLY of the all-reduce's time and save WORTHWHILE_SECONDS. A
# small bucket's time is latency, whose measurement has an error of that order. For each tensor it
# must also save SECONDS_PER_TENSOR, the time of its operations in the branches of a trial's step.
CLEARLY, WORTHWHILE_SECONDS, SECONDS_PER_TENSOR = 0.9, 5e-4, 3e-5
_NO_MOMENTUM = (
    "it applies no momentum; use Auto() with the momentum in the optimizer to consider it"
)
_logger = logging.getLogger("tf_redsync")


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Auto(Configurable):
    """Measures the network and this device, and chooses the exchange of every bucket.

    A loaded model continues with the saved choice, if it is loaded before the first step and was
    not saved by one worker alone. Otherwise `Auto` chooses again. If the choice differs, residuals
    start empty, with a warning. To fix a choice, pass its methods to `DistributedOptimizer` instead
    of `Auto`.

    Args:
        candidates: Methods that may replace the all-reduce. They must exchange gradients in every
            step, keep a residual, and have no `clip_norm`. `None` means those of `CodedTopK`,
            `PowerSGD`, `BlockQuantized` with 4 and 8 bits, and `HalfPrecision` that suit the
            optimizer; with `momentum` it means `CodedGMC`. With `max_overhead` candidates may have
            local steps, and are ordered from the most to the least accurate; docs/auto.md has the
            default order. The table names omitted default candidates with the reason.
        momentum: Momentum that the exchange applies, in [0, 1). The inner optimizer must then have
            none. `Auto` moves a plain SGD's momentum into the exchange if that is clearly faster;
            see docs/auto.md.
        density: Density of the default `CodedTopK` and `CodedGMC`. docs/accuracy.md has its cost.
        trial_steps: Number of dense and of compressed steps that are measured in training, unless
            the exchange is predicted to take at most 5 % of the all-reduce's time. 0 trusts the
            prediction, as `max_overhead` does.
        max_overhead: Maximum mean time of the exchange per step, as a fraction of `step_seconds`:
            0.1 is 10 %. At most 5. The first of the all-reduce and the candidates that is predicted
            to fit serves all variables, or the fastest if none fits. `None` chooses the fastest for
            each bucket.
        step_seconds: Seconds of a step without an exchange, which cannot be measured before
            training; `tf-redsync bench --methods NoExchange` measures it.

    Raises:
        ValueError: a hyper-parameter is out of range, or a candidate cannot alternate with dense
            steps.

    Example:
        >>> import keras, tf_redsync as rs
        >>> optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.Auto())
    """

    candidates: tuple[Method, ...] | None = None
    momentum: float = 0.0
    density: float = 0.03
    trial_steps: int = 5
    max_overhead: float | None = None
    step_seconds: float | None = None

    # Default candidates that do not suit the optimizer; set by `suited`.
    left_out: ClassVar[tuple[LeftOut, ...]] = ()
    movable: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        checks.real("momentum", self.momentum, low=0.0, high=1.0, high_open=True)
        checks.real("density", self.density, low=0.0, high=1.0, low_open=True)
        checks.integer("trial_steps", self.trial_steps, low=0)
        check_budget(self.max_overhead, self.step_seconds, self.momentum)
        if self.candidates is not None:
            checks.make_tuple(self, "candidates")
        for method in self.candidates or ():
            check_candidate(method, self.momentum, self.max_overhead is not None)
        if self.max_overhead is None:
            check_together(self.methods)
        else:
            check_clip_norms(self.methods)

    @property
    def default(self) -> Dense:
        """The all-reduce, which candidates must beat."""
        return Dense(momentum=self.momentum)

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods that may be chosen, without duplicates, the all-reduce first."""
        if self.candidates is not None:
            return tuple(dict.fromkeys((self.default, *self.candidates)))
        if self.max_overhead is not None:
            return (self.default, *chosen_from(self.density))
        if self.momentum:
            return (self.default, CodedGMC(density=self.density, momentum=self.momentum))
        return (self.default, *every_step(self.density))

    @property
    def exchanged(self) -> Auto | None:
        """A copy with the optimizer's momentum in the exchange; `None` if it cannot move there."""
        return replace(self, candidates=None, momentum=self.movable) if self.movable else None

    @property
    def considered(self) -> tuple[Method, ...]:
        """The methods of `self` and `exchanged`, the all-reduce first."""
        others = () if self.exchanged is None else self.exchanged.methods[1:]
        return (*self.methods, *others)

    def suited(
        self,
        unsuited: Callable[[Method], str | None],
        movable: float = 0.0,
        adaptive: bool = False,
    ) -> Auto:
        """Return a copy with the default candidates that suit the optimizer.

        Args:
            unsuited: Returns the reason against a method, or `None`.
            movable: Momentum of the optimizer that the exchange may apply instead.
            adaptive: Whether the optimizer has a `beta_2`.
        """
        if self.candidates is not None:
            return self
        methods = self.methods[1:]
        if adaptive:
            methods = tuple(for_adaptive(m) for m in methods)
        reasons = {m: unsuited(m) for m in methods}
        suitable = tuple(m for m, reason in reasons.items() if reason is None)
        if self.momentum:
            reasons |= dict.fromkeys(every_step(self.density)[1:], _NO_MOMENTUM)
        named = zip(reasons, names(tuple(reasons)), strict=True)
        left_out = [LeftOut(m, name, r) for m, name in named if (r := reasons[m]) is not None]
        made = self if suitable == self.methods[1:] else replace(self, candidates=suitable)
        movable = movable if self.max_overhead is None and not self.momentum else 0.0
        made = replace(made) if left_out or movable else made
        object.__setattr__(made, "left_out", tuple(left_out))
        object.__setattr__(made, "movable", movable)
        return made

    def resolve(
        self,
        specs: Sequence[TensorSpec],
        strategy: Any,
        network: Network,
        bucket_bytes: int | None,
        sparse_totals: Callable[[Method], bool],
    ) -> Decision:
        """Measure and decide; see `tf_redsync.policy.Undecided`."""
        announce = strategies.process_rank(strategy) == 0
        measured = measure(self, strategy, network, announce, sparse_totals)
        decision = self.decide(specs, measured, bucket_bytes)
        if network.workers > 1:
            agreement.agree(strategy, f"exchange as in {decision}")
            if announce:
                say(str(decision))
        return decision

    def decide(
        self, specs: Sequence[TensorSpec], measured: Measured, bucket_bytes: int | None = None
    ) -> Decision:
        """Return the decision for all buckets; a pure function, so it is equal on all workers.

        Args:
            specs: The variables, in the model's order.
            measured: Measurements of `self.considered`.
            bucket_bytes: Largest group of tensors with one decision, in float32 bytes; `None` for
                16 MiB.
        """
        marked = Policy(default=self.default).mark_output_layer(specs)
        pairs = [(s, self.default) for s in marked]
        groups = make_buckets(pairs, measured.workers, bucket_bytes or LARGEST_BUCKET)
        choices = tuple(self._choice(g.layout.specs, measured) for g in groups)
        decision = Decision(choices, measured, self.trial_steps)
        if self.max_overhead is not None and self.step_seconds is not None:
            decision = within_budget(choices, measured, self.max_overhead, self.step_seconds)
        lines = left_out_lines(self.left_out, choices, measured)
        decision, other = replace(decision, left_out=lines), self.exchanged
        if other is None:
            return decision
        exchanged = other.decide(specs, measured, bucket_bytes)
        return better_place(decision, exchanged, other.momentum, wins)

    def _choice(self, specs: tuple[TensorSpec, ...], measured: Measured) -> Choice:
        methods = self.methods
        seconds = tuple(measured.seconds(m, specs) for m in methods)
        best = min(range(len(methods)), key=seconds.__getitem__)
        if not wins(seconds[best], seconds[0], len(specs)):
            best = 0
        return Choice(specs, methods, seconds, methods[best])


def wins(seconds: float, dense: float, tensors: int = 0) -> bool:
    """Return whether a candidate's time is clearly shorter than the all-reduce's.

    Args:
        seconds: Time of the candidate's exchange, in seconds.
        dense: Time of the all-reduce, in seconds.
        tensors: Number of tensors that are exchanged.
    """
    saved = WORTHWHILE_SECONDS + SECONDS_PER_TENSOR * tensors
    return seconds <= min(CLEARLY * dense, dense - saved)


def measure(
    auto: Auto,
    strategy: Any,
    network: Network,
    announce: bool,
    sparse_totals: Callable[[Method], bool],
) -> Measured:
    """Return measurements for `auto.decide`; all workers must call this at the same point.

    Args:
        auto: The `Auto` with the candidates.
        strategy: The strategy.
        network: The network.
        announce: Whether to log progress.
        sparse_totals: Returns whether a method's totals may be sparse.
    """
    nothing = Measured(network.workers, cost.Link.of(float("inf"), 0.0), {})
    if network.workers == 1 or len(auto.considered) == 1:
        return nothing
    if not network.in_branches:
        if announce:
            say("tf_redsync.Auto: without direct collectives, exchanges are dense and not measured")
        return nothing
    if announce:
        say("tf_redsync.Auto: measuring the network and the methods")
    link = probe.link(network)

    def local() -> dict[Method, cost.Work]:
        return {m: probe.work(m, (network.workers,), sparse_totals(m)) for m in auto.considered[1:]}

    local_work = agreement.together(strategy, "measure the methods of Auto", local)
    agreed = probe.slowest(network, [dataclasses.astuple(w) for w in local_work.values()])
    work = {m: cost.Work(*times) for m, times in zip(local_work, agreed, strict=True)}
    return Measured(network.workers, link, work)


def say(text: str) -> None:
    """Log a text at level INFO, or print it to stderr if that level is disabled."""
    if _logger.isEnabledFor(logging.INFO):
        _logger.info("%s", text)
    else:
        print(text, file=sys.stderr, flush=True)
