"""What a plan predicts: bytes, times and captured energy of every layer, and of the whole model.

A bucket's exchange is predicted as `Auto` does it, and its layers share it: the network's time in
proportion to the bytes that each of them sends, what is computed in proportion to the elements. So
the layers' times add up to the prediction. A step is the computation of the model and then the
exchange, one after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tf_redsync import cost
from tf_redsync.auto import Auto
from tf_redsync.decision import Measured
from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import (
    DEFAULT_BUCKET_BYTES,
    Bucket,
    BucketLayout,
    TensorSpec,
    make_buckets,
)
from tf_redsync.methods.base import Method
from tf_redsync.methods.dense import Dense, NoExchange
from tf_redsync.planning.subject import PlanError
from tf_redsync.policy import Assignment, Policy, Settled

# A step far beyond any warm-up, and a multiple of all small numbers: methods that take turns, or
# search every so many steps, are at the beginning of a round.
STEADY_STEP = 720_720_000
ENERGY_WORKERS = 2


@dataclasses.dataclass(frozen=True)
class Share:
    """What one tensor has of an exchange: the bucket, the bytes sent, the seconds."""

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
    """The whole model: what exchanges it, bytes sent, seconds."""

    name: str
    sent: float
    seconds: float


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
    settled: Settled
    rivals: tuple[Method, ...]
    if isinstance(policy, Auto):
        settled, rivals = policy.decide(specs, measured, DEFAULT_BUCKET_BYTES), policy.methods[1:]
    else:
        settled, rivals = policy, ()
    assignments, dense = settled.assign(specs), Policy(default=Dense()).assign(specs)
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
        dense=_total("Dense", dense_shares),
        candidates=tuple(
            _total(type(m).__name__, share(Policy(default=m).assign(specs), measured))
            for m in rivals
        ),
        planned=_total(name, shares),
        doubled=(_total("Dense", share(dense, more)), _total(name, share(assignments, more))),
    )


def check(methods: Sequence[Method]) -> None:
    """Check that methods exchange gradients in every step.

    Raises:
        PlanError: for local steps, delays, dense steps in between, and no exchange at all.
    """
    for method in methods:
        every_step = not (method.local_steps or method.delay or method.dense_every)
        if not every_step or isinstance(method, NoExchange):
            raise PlanError(
                "the cost model is one of methods that exchange gradients in every step, and "
                f"{type(method).__name__} does not. Received: {method!r}. Measure it on the "
                "cluster."
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
        method, specs = bucket.method, bucket.layout.specs
        sizes = [float(s.size) for s in specs]
        work = measured.work.get(method, cost.NO_WORK)
        computed = work.seconds(int(sum(sizes)), measured.workers)
        network = measured.seconds(method, specs) - computed
        alone = [_sent(method, dataclasses.replace(bucket.layout, specs=(s,))) for s in specs]
        sent = _split(_sent(method, bucket.layout), alone)
        seconds = zip(_split(network, alone), _split(computed, sizes), strict=True)
        for spec, own, times in zip(specs, sent, seconds, strict=True):
            found[spec.position] = Share(bucket.layout.index, own, sum(times))
    return [found[a.spec.position] for a in assignments]


def captured_energy(
    assignments: Sequence[Assignment], grads: Sequence[tf.Tensor | None]
) -> list[float | None]:
    """Return the part of each gradient's energy that a first exchange delivers.

    With g the gradient and d what is delivered of it:

        <g, d>^2 / (|g|^2 |d|^2)

    Of elements that are selected, and of projections, this is |d|^2 / |g|^2, since the rest of the
    gradient is orthogonal to them. It does not depend on a factor, so it also says how well signs
    or rounded values agree with the gradient. Two workers exchange the same gradient in this
    process, without residuals of earlier steps.

    Args:
        assignments: In the model's order.
        grads: Dense float32; `None` for what has none.

    Returns:
        One for each of `assignments`; `None` where there is no gradient, or only zeros.
    """
    found: dict[int, float | None] = {}
    for bucket in _buckets(assignments, ENERGY_WORKERS):
        specs = bucket.layout.specs
        present = [grads[s.position] for s in specs]
        own = [tf.zeros(s.shape) if g is None else g for s, g in zip(specs, present, strict=True)]
        states = loopback.initial_states(bucket.method, bucket.layout)
        both = [own] * ENERGY_WORKERS
        step = loopback.run_step(bucket.method, bucket.layout, both, states, STEADY_STEP)
        for spec, grad, total in zip(specs, own, step.totals[0], strict=True):
            found[spec.position] = _agreement(grad, total)
    return [found[a.spec.position] for a in assignments]


def _agreement(grad: tf.Tensor, total: tf.Tensor) -> float | None:
    g, d = (tf.reshape(tf.cast(t, tf.float64), [-1]) for t in (grad, total))
    energy, delivered = float(tf.reduce_sum(g * g)), float(tf.reduce_sum(d * d))
    if energy == 0.0:
        return None
    # Not more than 1, whatever rounding says.
    return min(float(tf.reduce_sum(g * d)) ** 2 / (energy * delivered), 1.0) if delivered else 0.0


def _name(policy: Policy | Auto) -> str:
    alone = isinstance(policy, Policy) and not policy.rules
    return type(policy.default if alone else policy).__name__


def _buckets(assignments: Sequence[Assignment], workers: int) -> list[Bucket]:
    return make_buckets([(a.spec, a.method) for a in assignments], workers)


def _sent(method: Method, layout: BucketLayout) -> float:
    """Bytes that a worker sends in a step."""
    steps = cost.messages(method, layout)
    return sum(message.sent for step in steps for message in step) / len(steps)


def _split(total: float, weights: Sequence[float]) -> list[float]:
    """Parts of `total` in proportion to `weights`; equal ones if all are 0."""
    whole = sum(weights)
    return [total * (w / whole if whole else 1.0 / len(weights)) for w in weights]


def _total(name: str, shares: Sequence[Share]) -> Total:
    return Total(name, sum(s.sent for s in shares), sum(s.seconds for s in shares))
