"""What a plan predicts: bytes, times and captured energy of every layer, and of the whole model.

A bucket's exchange is predicted as `Auto` does it, and its layers share it: the network's time in
proportion to the bytes that each of them sends, what is computed in proportion to the elements. So
the layers' times add up to the prediction. A step is the computation of the model and then the
exchange, one after the other; with local steps, the part of a round that falls to a step; see
`exchanges.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tf_redsync.auto import Auto
from tf_redsync.auto.decision import Measured
from tf_redsync.exchange.layout import (
    DEFAULT_BUCKET_BYTES,
    Bucket,
    TensorSpec,
    make_buckets,
)
from tf_redsync.exchange.method import Method
from tf_redsync.methods.dense import Dense, NoExchange
from tf_redsync.planning import PlanError, exchanges
from tf_redsync.planning.energy import captured_energy
from tf_redsync.policy import Assignment, Policy, Resolved


@dataclasses.dataclass(frozen=True)
class Share:
    """One tensor's part of an exchange: the bucket, the bytes sent, the seconds."""

    bucket: int
    sent: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Layer:
    """One trainable variable.

    Attributes:
        spec: The variable.
        method: Its method.
        how: What the method does with it, in a few words.
        share: Of the exchange that is planned.
        dense: Of the all-reduce.
        energy: Captured energy, in [0, 1]; see `energy.py`. `None` without a gradient.
    """

    spec: TensorSpec
    method: Method
    how: str
    share: Share
    dense: Share
    energy: float | None


@dataclasses.dataclass(frozen=True)
class Total:
    """The whole model: what exchanges it, bytes and seconds on average, seconds at most."""

    name: str
    sent: float
    seconds: float
    longest: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is predicted.

    Attributes:
        layers: In the model's order.
        measured: What the prediction is made of.
        compute: Seconds of a step without an exchange.
        policy: What was asked for.
        dense: The all-reduce of everything.
        candidates: The whole model by each candidate of `Auto`.
        planned: By what `policy` comes to.
        doubled: The all-reduce, and what is planned, with twice as many workers.
    """

    layers: tuple[Layer, ...]
    measured: Measured
    compute: float
    policy: Policy | Auto
    dense: Total
    candidates: tuple[Total, ...]
    planned: Total
    doubled: tuple[Total, Total]

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods in use that compress, each once."""
        used = dict.fromkeys(layer.method for layer in self.layers)
        return tuple(m for m in used if not isinstance(m, Dense))

    def step(self, total: Total) -> float:
        """Return the seconds of a training step."""
        return self.compute + total.seconds


def make(
    policy: Policy | Auto,
    specs: Sequence[TensorSpec],
    grads: Sequence[tf.Tensor | None],
    measured: Measured,
    compute: float,
) -> Plan:
    """Predict.

    Args:
        policy: What is planned.
        specs: The variables, in the model's order.
        grads: Their gradients, dense float32; `None` for what has none.
        measured: Of the methods of `policy`.
        compute: Seconds of a step without an exchange.
    """
    resolved: Resolved
    rivals: tuple[Method, ...]
    if isinstance(policy, Auto):
        resolved, rivals = policy.decide(specs, measured, DEFAULT_BUCKET_BYTES), policy.methods[1:]
    else:
        resolved, rivals = policy, ()
    assignments, dense = resolved.assign(specs), Policy(default=Dense()).assign(specs)
    name = _name(policy)
    shares, dense_shares = share(assignments, measured), share(dense, measured)
    energies = captured_energy(assignments, grads)
    layers = [
        Layer(a.spec, a.method, a.method.describe(a.spec), own, of_dense, energy)
        for a, own, of_dense, energy in zip(
            assignments, shares, dense_shares, energies, strict=True
        )
    ]
    more = dataclasses.replace(measured, workers=2 * measured.workers)
    return Plan(
        layers=tuple(layers),
        measured=measured,
        compute=compute,
        policy=policy,
        dense=_total("Dense", dense, measured),
        candidates=tuple(total(m, specs, measured) for m in rivals),
        planned=_total(name, assignments, measured),
        doubled=(_total("Dense", dense, more), _total(name, assignments, more)),
    )


def total(method: Method, specs: Sequence[TensorSpec], measured: Measured) -> Total:
    """Predict the whole model by one method."""
    return _total(type(method).__name__, Policy(default=method).assign(specs), measured)


def check(methods: Sequence[Method]) -> None:
    """Check that methods do the same in every step, or in every round of local steps.

    Raises:
        PlanError: for delays of gradients, dense steps in between, and no exchange at all.
    """
    for method in methods:
        schedule = method.sync_schedule
        late = schedule.delay and not schedule.fragments
        if late or schedule.dense_every or isinstance(method, NoExchange):
            raise PlanError(
                "the cost model is one of methods that exchange in every step, or after some local "
                f"steps, and {type(method).__name__} does not. Received: {method!r}. Measure it on "
                "the cluster."
            )


def share(assignments: Sequence[Assignment], measured: Measured) -> list[Share]:
    """Predict the exchange, and share every bucket's among its tensors.

    Args:
        assignments: In the model's order.
        measured: Of the methods assigned.

    Returns:
        One for each of `assignments`, in their order.
    """
    found: dict[int, Share] = {}
    for bucket in _buckets(assignments, measured.workers):
        specs = bucket.layout.specs
        exchange = exchanges.of_bucket(bucket, measured)
        alone = [exchanges.sent(bucket.method, (spec,), measured.workers) for spec in specs]
        sent, network = _split(exchange.sent, alone), _split(exchange.network, alone)
        computed = _split(exchange.computed, [float(s.size) for s in specs])
        for spec, own, *seconds in zip(specs, sent, network, computed, strict=True):
            found[spec.position] = Share(bucket.layout.index, own, sum(seconds))
    return [found[a.spec.position] for a in assignments]


def _name(policy: Policy | Auto) -> str:
    alone = isinstance(policy, Policy) and not policy.rules
    return type(policy.default if alone else policy).__name__


def _buckets(assignments: Sequence[Assignment], workers: int) -> list[Bucket]:
    return make_buckets([(a.spec, a.method) for a in assignments], workers)


def _split(total: float, weights: Sequence[float]) -> list[float]:
    """Parts of `total` in proportion to `weights`; equal ones if all are 0."""
    whole = sum(weights)
    return [total * (w / whole if whole else 1.0 / len(weights)) for w in weights]


def _total(name: str, assignments: Sequence[Assignment], measured: Measured) -> Total:
    buckets = _buckets(assignments, measured.workers)
    found = [exchanges.of_bucket(bucket, measured) for bucket in buckets]
    seconds = sum(e.network + e.computed for e in found)
    return Total(name, sum(e.sent for e in found), seconds, exchanges.longest(found))
