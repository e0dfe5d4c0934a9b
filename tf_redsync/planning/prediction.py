"""Prediction of a plan: bytes, times and captured energy of every layer and of the whole model.

`Auto`'s cost model predicts the exchange of a bucket. Its layers share the network's time in
proportion to their bytes, and the computation in proportion to their elements, so that the layers'
times add up. With T the predicted time of a bucket's exchange, the schedules take

    every step exchanges       mean = T                          longest = T
    H local steps, then one    mean = T / H                      longest = T, of all buckets at once
    fragments                  the same                          longest = T, of one bucket alone

A step is the model's computation followed by the exchange, without overlap. The exception is a
fragment that is applied d steps late: the computation of d steps hides that much of its network
time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tf_redsync.auto import Auto, cost
from tf_redsync.auto.candidates import names
from tf_redsync.auto.decision import Measured
from tf_redsync.exchange import loopback, traffic
from tf_redsync.exchange.layout import (
    Bucket,
    BucketLayout,
    TensorSpec,
    make_buckets,
)
from tf_redsync.exchange.method import Method
from tf_redsync.methods.dense import Dense, NoExchange
from tf_redsync.planning import PlanError
from tf_redsync.policy import Assignment, Policy, Resolved


@dataclasses.dataclass(frozen=True)
class Share:
    """One tensor's share of an exchange: index of the bucket, bytes sent, seconds."""

    bucket: int
    sent: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Layer:
    """One trainable variable.

    Attributes:
        spec: The variable.
        method: Its method.
        how: Description of the method for this variable.
        share: Share of the planned exchange.
        dense: Share of the dense all-reduce.
        energy: Captured energy, in [0, 1]; see `captured_energy`. `None` without a gradient.
    """

    spec: TensorSpec
    method: Method
    how: str
    share: Share
    dense: Share
    energy: float | None


@dataclasses.dataclass(frozen=True)
class Total:
    """The whole model: name of the method, mean bytes and seconds per step, longest step."""

    name: str
    sent: float
    seconds: float
    longest: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """A prediction.

    Attributes:
        layers: Layers in the model's order.
        measured: Measurements that the prediction is based on.
        compute: Seconds of a step without an exchange.
        policy: The requested policy.
        dense: The dense all-reduce of the model.
        candidates: The model with each candidate of `Auto`.
        planned: The model with the methods that `policy` chooses.
        doubled: `dense` and `planned` with twice as many workers.
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
        """The compressing methods in use, without duplicates."""
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
    """Return the prediction for a policy.

    Args:
        policy: Policy to plan.
        specs: The variables, in the model's order.
        grads: Their gradients, dense float32; `None` for variables without one.
        measured: Measurements of the policy's methods.
        compute: Seconds of a step without an exchange.
    """
    resolved: Resolved
    rivals: tuple[Method, ...]
    if isinstance(policy, Auto):
        resolved, rivals = policy.decide(specs, measured), policy.methods[1:]
    else:
        resolved, rivals = policy, ()
    assignments, dense = resolved.assign(specs), Policy(default=Dense()).assign(specs)
    name = _name(policy)
    shares = [share(a, measured, compute) for a in (assignments, dense)]
    energies = captured_energy(assignments, grads)
    layers = [
        Layer(a.spec, a.method, a.method.describe(a.spec), method_share, dense_share, energy)
        for a, method_share, dense_share, energy in zip(assignments, *shares, energies, strict=True)
    ]

    def totals(at: Measured) -> tuple[Total, Total]:
        return _total("Dense", dense, at, compute), _total(name, assignments, at, compute)

    total_dense, planned = totals(measured)
    return Plan(
        layers=tuple(layers),
        measured=measured,
        compute=compute,
        policy=policy,
        dense=total_dense,
        candidates=tuple(
            dataclasses.replace(total(m, specs, measured, compute), name=n)
            for m, n in zip(rivals, names(rivals), strict=True)
        ),
        planned=planned,
        doubled=totals(dataclasses.replace(measured, workers=2 * measured.workers)),
    )


def total(method: Method, specs: Sequence[TensorSpec], measured: Measured, compute: float) -> Total:
    """Return the prediction for the whole model with one method; see `make` for the arguments."""
    return _total(type(method).__name__, Policy(default=method).assign(specs), measured, compute)


def check(methods: Sequence[Method]) -> None:
    """Check that the cost model covers methods: equal steps, or equal rounds of local steps.

    Raises:
        PlanError: a method delays gradients, exchanges densely in some steps, runs in stages, has
            growing intervals, or never exchanges.
    """
    for method in methods:
        schedule = method.sync_schedule
        late = schedule.delay and not schedule.fragments
        varies = schedule.dense_every or schedule.stages or schedule.intervals
        if late or varies or isinstance(method, NoExchange):
            raise PlanError(
                "`--method` must exchange in every step or after a constant number of local steps, "
                f"which the cost model covers. Received: {method!r}. Measure this method on the "
                "cluster with `tf-redsync bench`."
            )


def share(assignments: Sequence[Assignment], measured: Measured, compute: float) -> list[Share]:
    """Return each tensor's share of its bucket's predicted exchange.

    Args:
        assignments: Assignments in the model's order.
        measured: Measurements of the assigned methods.
        compute: Seconds of a step without an exchange.

    Returns:
        One share for each of `assignments`.
    """
    shares: dict[int, Share] = {}
    for bucket in _buckets(assignments, measured.workers):
        specs = bucket.layout.specs
        exchange = exchange_of_bucket(bucket, measured, compute)
        alone = [mean_bytes_sent(bucket.method, (spec,), measured.workers) for spec in specs]
        sent, network = _split(exchange.sent, alone), _split(exchange.network, alone)
        computed = _split(exchange.computed, [float(s.size) for s in specs])
        for spec, sent_bytes, *seconds in zip(specs, sent, network, computed, strict=True):
            shares[spec.position] = Share(bucket.layout.index, sent_bytes, sum(seconds))
    return [shares[a.spec.position] for a in assignments]


def _name(policy: Policy | Auto) -> str:
    alone = isinstance(policy, Policy) and not policy.rules
    return type(policy.default if alone else policy).__name__


def _buckets(assignments: Sequence[Assignment], workers: int) -> list[Bucket]:
    return make_buckets([(a.spec, a.method) for a in assignments], workers)


def _split(total: float, weights: Sequence[float]) -> list[float]:
    """Return parts of `total` in proportion to `weights`; equal parts if all weights are 0."""
    whole = sum(weights)
    return [total * (w / whole if whole else 1.0 / len(weights)) for w in weights]


def _total(
    name: str, assignments: Sequence[Assignment], measured: Measured, compute: float
) -> Total:
    buckets = _buckets(assignments, measured.workers)
    exchanges = [exchange_of_bucket(bucket, measured, compute) for bucket in buckets]
    seconds = sum(e.network + e.computed for e in exchanges)
    return Total(name, sum(e.sent for e in exchanges), seconds, longest_step(exchanges))


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Prediction for a bucket's exchange.

    Attributes:
        sent: Mean bytes that a worker sends per step.
        network: Mean seconds of the network per step that no computation hides.
        computed: Mean seconds of computation per step.
        longest: Seconds of both in the longest step.
        alone: Whether other buckets exchange in other steps.
    """

    sent: float
    network: float
    computed: float
    longest: float
    alone: bool


def exchange_of_bucket(bucket: Bucket, measured: Measured, compute: float) -> Exchange:
    """Return the prediction for a bucket's exchange.

    Args:
        bucket: The bucket.
        measured: Measurements of the network and of the bucket's method.
        compute: Seconds of a step without an exchange.
    """
    method, schedule, workers = bucket.method, bucket.method.sync_schedule, measured.workers
    specs, share = bucket.layout.specs, 1.0 / steps_between(method)
    layout = BucketLayout(specs, workers)
    messages = traffic.messages(method, layout)
    network = cost.network_seconds(messages, measured.link, workers)
    rare = cost.network_seconds([traffic.averages(method, layout)], measured.link, workers)
    if schedule.fragments:
        network = max(0.0, network - schedule.delay * compute)
    work = measured.work.get(method, cost.NO_WORK)
    computed = work.seconds(sum(s.size for s in specs), workers)
    return Exchange(
        mean_bytes_sent(method, specs, workers),
        network * share + rare / max(1, schedule.average_every),
        computed * share,
        network + computed + rare,
        schedule.fragments > 0,
    )


def longest_step(exchanges: Sequence[Exchange]) -> float:
    """Return the seconds of all buckets' exchanges in the longest step."""
    together = sum(e.longest for e in exchanges if not e.alone)
    return together + max((e.longest for e in exchanges if e.alone), default=0.0)


def steps_between(method: Method) -> int:
    """Return the number of steps from one exchange to the next."""
    return max(1, method.sync_schedule.local_steps)


def mean_bytes_sent(method: Method, specs: tuple[TensorSpec, ...], workers: int) -> float:
    """Return the mean bytes that a worker sends per step for some tensors."""
    layout, every = BucketLayout(specs, workers), max(1, method.sync_schedule.average_every)
    sent = traffic.bytes_sent(traffic.messages(method, layout)) / steps_between(method)
    return sent + traffic.bytes_sent([traffic.averages(method, layout)]) / every


WORKERS = 2


def captured_energy(
    assignments: Sequence[Assignment], grads: Sequence[tf.Tensor | None]
) -> list[float | None]:
    """Return the share of each gradient's energy that a first exchange delivers.

    With g the gradient and d the delivered gradient, this is

        <g, d>^2 / (|g|^2 |d|^2)

    For selected elements and projections it equals |d|^2 / |g|^2, since the rest of the gradient is
    orthogonal to d. It is invariant to a scale of d, so it also measures signs and rounded values.
    Two workers exchange the same gradient in this process, without residuals of earlier steps.

    Args:
        assignments: Assignments in the model's order.
        grads: Dense float32 gradients; `None` for variables without one.

    Returns:
        One value for each of `assignments`; `None` for a missing or zero gradient.
    """
    energies: dict[int, float | None] = {}
    pairs = [(a.spec, a.method) for a in assignments]
    for bucket in make_buckets(pairs, WORKERS):
        specs = bucket.layout.specs
        present = [grads[s.position] for s in specs]
        present_or_zero = [
            tf.zeros(s.shape) if g is None else g for s, g in zip(specs, present, strict=True)
        ]
        states = loopback.initial_states(bucket.method, bucket.layout)
        both = [[g / WORKERS for g in present_or_zero]] * WORKERS
        step = loopback.run_step(bucket.method, bucket.layout, both, states, loopback.STEADY_STEP)
        for spec, grad, total in zip(specs, present_or_zero, step.totals[0], strict=True):
            # All workers skip a non-finite step, so it delivers nothing.
            energies[spec.position] = _agreement(grad, total) if step.finite else 0.0
    return [energies[a.spec.position] for a in assignments]


def _agreement(grad: tf.Tensor, total: tf.Tensor) -> float | None:
    g, d = (tf.reshape(tf.cast(t, tf.float64), [-1]) for t in (grad, total))
    energy, delivered = float(tf.reduce_sum(g * g)), float(tf.reduce_sum(d * d))
    if energy == 0.0:
        return None
    # min: rounding may give values above 1.
    return min(float(tf.reduce_sum(g * d)) ** 2 / (energy * delivered), 1.0) if delivered else 0.0
