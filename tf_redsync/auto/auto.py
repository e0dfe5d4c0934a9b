"""`Auto`: choose the exchange of every bucket by measurement, and never lose to the all-reduce.

When the optimizer is built, on every worker:

1. the collectives between the workers are measured (`probe.link`), and what each candidate method
   computes on this device (`probe.work`); of all workers' times the slowest count, so that all of
   them go on with equal numbers;
2. for every bucket the cost model (`cost.py`) predicts the time of the all-reduce and of every
   candidate; the cheapest one serves the bucket, a candidate only if it wins clearly;
   with a budget (`max_overhead`) the first one that fits it serves all buckets;
3. the table is logged.

In training, if anything is compressed, dense and compressed steps take turns for a while. If the
dense ones turn out faster, all later steps are dense (`step/trial.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from tf_redsync import checks
from tf_redsync.auto import budget, cost, probe, two_places
from tf_redsync.auto.candidates import check_candidate, chosen_from
from tf_redsync.auto.decision import Choice, Decision, Measured
from tf_redsync.auto.left_out import LeftOut
from tf_redsync.cluster import agreement
from tf_redsync.config import Configurable, register
from tf_redsync.exchange.driver import Network
from tf_redsync.exchange.layout import TensorSpec, make_buckets
from tf_redsync.exchange.method import Method
from tf_redsync.methods.coded_topk import CodedTopK
from tf_redsync.methods.dense import Dense
from tf_redsync.methods.gmc import CodedGMC
from tf_redsync.methods.half import HalfPrecision
from tf_redsync.methods.low_rank import PowerSGD
from tf_redsync.network import collectives
from tf_redsync.policy import Policy, check_together

# A candidate must take less than this part of the time of the all-reduce, and save this much: what
# a small bucket takes is latency, which is measured with an error of that order.
CLEARLY, WORTHWHILE_SECONDS = 0.9, 5e-4
_NO_MOMENTUM = (
    "it applies no momentum; to have it considered use Auto() with the momentum in the optimizer"
)
_logger = logging.getLogger("tf_redsync")


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Auto(Configurable):
    """Measure the network and this device, and choose the exchange of every bucket.

    A model that is saved and loaded goes on with what was chosen, if it is loaded before the first
    step, and not after one worker alone; otherwise, where the choice comes out differently, with
    empty residuals and a warning. To keep a choice for good, give its methods to
    `DistributedOptimizer` in place of `Auto`.

    Args:
        candidates: Methods that may replace the all-reduce: such as exchange gradients in every
            step and keep what they do not send in a residual. `None`: `CodedTopK`, `PowerSGD` and
            `HalfPrecision`, less what does not suit the optimizer; with `momentum`, `CodedGMC`.
            With `max_overhead`: methods from the exact to the frugal, such with local steps too;
            `None`: from `CodedTopK` and `HalfPrecision` to `SparseLoCo` every 50 steps. The table
            says which of the default ones are left out, and why.
        momentum: Momentum that the exchange applies, in [0, 1); the inner optimizer must then have
            none. A plain SGD's own moves there where that is clearly faster; see docs/auto.md.
        density: Of the default `CodedTopK` and `CodedGMC`. docs/accuracy.md has what it costs.
        trial_steps: Steps of each kind, dense and compressed, that are measured in training. 0
            trusts the prediction, as `max_overhead` does.
        max_overhead: Seconds that the exchange may take in a step on average, in units of
            `step_seconds`: of the all-reduce and the candidates the first one that is predicted to
            fit serves all variables, and the fastest one if none fits. `None`: what is fastest.
        step_seconds: Seconds of a step without an exchange, which cannot be measured before
            training; `tf-redsync bench --methods none` does it.

    Raises:
        ValueError: for a hyper-parameter out of its range, or a candidate that cannot take turns
            with dense steps.

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

    # Of what `suited` returns.
    left_out: ClassVar[tuple[LeftOut, ...]] = ()
    movable: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        checks.real("momentum", self.momentum, low=0.0, high=1.0, high_open=True)
        checks.real("density", self.density, low=0.0, high=1.0, low_open=True)
        checks.integer("trial_steps", self.trial_steps, low=0)
        budget.check(self.max_overhead, self.step_seconds, self.momentum)
        for method in self.candidates or ():
            check_candidate(method, self.max_overhead is not None)
        if self.max_overhead is None:
            check_together(self.methods)

    @property
    def default(self) -> Dense:
        """The all-reduce, which the candidates have to beat."""
        return Dense(momentum=self.momentum)

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods that may be chosen, the all-reduce first."""
        if self.candidates is not None:
            return (self.default, *self.candidates)
        if self.max_overhead is not None:
            return (self.default, *chosen_from())
        if self.momentum:
            return (self.default, CodedGMC(density=self.density, momentum=self.momentum))
        return (self.default, CodedTopK(density=self.density), PowerSGD(), HalfPrecision())

    @property
    def exchanged(self) -> Auto | None:
        """The same with the optimizer's momentum in the exchange, where it may be moved there."""
        return replace(self, candidates=None, momentum=self.movable) if self.movable else None

    @property
    def considered(self) -> tuple[Method, ...]:
        """The methods of both places of a momentum, the all-reduce first."""
        others = () if self.exchanged is None else self.exchanged.methods[1:]
        return (*self.methods, *others)

    def suited(self, unsuited: Callable[[Method], str | None], movable: float = 0.0) -> Auto:
        """Return this without the default candidates that `unsuited` gives a reason against.

        Args:
            unsuited: Returns the reason, or `None`.
            movable: Momentum of the optimizer that the exchange may apply in its place.
        """
        if self.candidates is not None:
            return self
        reasons = {m: unsuited(m) for m in self.methods[1:]}
        kept = tuple(m for m, reason in reasons.items() if reason is None)
        left_out = [LeftOut(m, reason) for m, reason in reasons.items() if reason is not None]
        if self.momentum:
            left_out += [LeftOut(m, _NO_MOMENTUM) for m in (PowerSGD(), HalfPrecision())]
        made = self if len(kept) == len(reasons) else replace(self, candidates=kept)
        movable = movable if self.max_overhead is None and not self.momentum else 0.0
        made = replace(made) if left_out or movable else made
        object.__setattr__(made, "left_out", tuple(left_out))
        object.__setattr__(made, "movable", movable)
        return made

    def resolve(
        self, specs: Sequence[TensorSpec], strategy: Any, network: Network, bucket_bytes: int
    ) -> Decision:
        """Measure and decide; see `tf_redsync.policy.Undecided`."""
        announce = collectives.worker_rank(strategy) == 0
        measured = measure(self, network, announce)
        decision = self.decide(specs, measured, bucket_bytes)
        if network.workers > 1:
            agreement.agree(strategy, f"exchange as in {decision}")
            if announce:
                say(str(decision))
        return decision

    def decide(
        self, specs: Sequence[TensorSpec], measured: Measured, bucket_bytes: int
    ) -> Decision:
        """Choose for every bucket; a function of its arguments, so equal on all workers.

        Args:
            specs: The variables, in the model's order.
            measured: What was measured, for `self.considered`.
            bucket_bytes: See `make_buckets`.
        """
        marked = Policy(default=self.default).mark_output_layer(specs)
        groups = make_buckets([(s, self.default) for s in marked], measured.workers, bucket_bytes)
        choices = tuple(self._choice(g.layout.specs, measured) for g in groups)
        decision = Decision(choices, measured, self.trial_steps)
        if self.max_overhead is not None and self.step_seconds is not None:
            decision = budget.fitting(choices, measured, self.max_overhead, self.step_seconds)
        lines = tuple(o.line(choices, measured) for o in self.left_out)
        decision, other = replace(decision, left_out=lines), self.exchanged
        if other is None:
            return decision
        exchanged = other.decide(specs, measured, bucket_bytes)
        return two_places.better(decision, exchanged, other.momentum, wins)

    def _choice(self, specs: tuple[TensorSpec, ...], measured: Measured) -> Choice:
        methods = self.methods
        seconds = tuple(measured.seconds(m, specs) for m in methods)
        best = min(range(len(methods)), key=seconds.__getitem__)
        if not wins(seconds[best], seconds[0]):
            best = 0
        return Choice(specs, methods, seconds, methods[best])


def wins(seconds: float, dense: float) -> bool:
    """Whether something takes so much less time than with the all-reduce that it is chosen."""
    return seconds <= min(CLEARLY * dense, dense - WORTHWHILE_SECONDS)


def measure(auto: Auto, network: Network, announce: bool) -> Measured:
    """Measure for `auto.decide`; all workers must call this at the same point.

    Args:
        auto: Whose candidates.
        network: The network.
        announce: Whether to log progress.
    """
    nothing = Measured(network.workers, cost.Link.of(float("inf"), 0.0), {})
    if network.workers == 1 or len(auto.considered) == 1:
        return nothing
    if not network.in_branches:
        if announce:
            say(
                "tf_redsync.Auto: the replicas of a process exchange densely, without a measurement"
            )
        return nothing
    if announce:
        say("tf_redsync.Auto measures the network and the methods")
    link = probe.link(network)
    own = {m: probe.work(m, (network.workers,)) for m in auto.considered[1:]}
    agreed = probe.slowest(network, [dataclasses.astuple(w) for w in own.values()])
    work = {m: cost.Work(*times) for m, times in zip(own, agreed, strict=True)}
    return Measured(network.workers, link, work)


def say(text: str) -> None:
    """Log a text at level INFO, or print it where that level is not enabled."""
    if _logger.isEnabledFor(logging.INFO):
        _logger.info("%s", text)
    else:
        print(text, file=sys.stderr, flush=True)
