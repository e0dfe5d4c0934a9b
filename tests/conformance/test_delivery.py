"""The law of delivery: every residual is sent within a bounded number of steps.

Gradients are equal in every step, so unsent elements grow steadily. A method that sends the largest
residuals first must deliver every element with a gradient within a number of steps that depends
only on the number of elements sent per step, not on the element's position or neighbors. `turn`
computes this number in plain numpy. A method's descriptor may allow a multiple of it (`patience`).

Elements of worker 0 have even positions and those of worker 1 odd ones, so the total shows which
worker's element has arrived.
"""

import dataclasses
import functools
import math

import numpy as np
import pytest

import tf_redsync as rs
from tests.conformance.descriptor import Descriptor
from tests.conformance.harness import initial_states, tensors
from tests.conformance.table import TABLE, in_contrib
from tests.deep import DEEP
from tf_redsync.codings.cheapest import LOSSLESS
from tf_redsync.exchange import loopback
from tf_redsync.exchange.capabilities import dense_start
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.requests import AllGather

WORKERS = 2
# Biases and norms beside large kernels and an embedding, as in a real model.
SHAPES = ((48, 64), (64,), (64,), (700, 8), (16,), (96, 40), (10,), (3, 3, 4, 8), (32,), (40, 50))
SPECS = tuple(
    TensorSpec(f"variable/{i}", shape, position=i, output_layer=i == len(SHAPES) - 1)
    for i, shape in enumerate(SHAPES)
)
# of every method with a density: a higher one would hide errors, a lower one would take more steps
DENSITY = 0.05


# ---------------------------------------------------------------------------------------- methods


def with_density(method):
    """The method with the density of these tests."""
    if isinstance(getattr(method, "method", None), rs.Method):
        return dataclasses.replace(method, method=with_density(method.method))
    changes = {"density": DENSITY} | ({} if dense_start(method) else {"warm_up": None})
    return dataclasses.replace(method, **{k: v for k, v in changes.items() if hasattr(method, k)})


def kind(method) -> tuple:
    """The properties that decide which elements are sent; one method of each kind is tested."""
    inner = getattr(method, "method", None)
    rule = [getattr(method, name, None) for name in ("selection", "quantized", "scope")]
    return type(method), type(inner), *rule


def _cases() -> dict[str, Descriptor]:
    cases, seen = {}, set()
    for name, descriptor in TABLE.items():
        method = descriptor.method
        keeps = "residual" in method.traits.state_kinds and descriptor.patience is not None
        if keeps and kind(method) not in seen and (DEEP or not in_contrib(name)):
            seen.add(kind(method))
            cases[name] = dataclasses.replace(descriptor, method=with_density(method))
    # Few tensors: most codings have no native op, and filter policies are slow. p2 takes long to
    # trace.
    policies = ("p1", "p2", "leftmost") if DEEP else ("p1", "leftmost")  # p2 takes long to trace
    for indices in (*LOSSLESS, *(rs.contrib.codings.Bloom(policy=p) for p in policies)):
        lossless = indices in LOSSLESS
        inside = rs.TopK(density=DENSITY, dense_below=3000 if lossless else 20_000)
        name = type(indices).__name__ if lossless else f"Bloom_{indices.policy}"
        coded = rs.Coded(method=inside, indices=indices)
        cases[name] = Descriptor(coded, requests=(AllGather,), served_only=True)
    return cases


CASES = _cases()


def specs_of(descriptor: Descriptor) -> tuple[TensorSpec, ...]:
    if not descriptor.served_only:
        return SPECS
    return tuple(s for s in SPECS if descriptor.method.refuses(s) is None)


# ------------------------------------------------------------------------------------- gradients


def heavy(rng, spec, last):
    """Heavy-tailed magnitudes with another scale in every tensor."""
    return 10.0 ** rng.uniform(-0.25, 0.25) * np.clip(rng.lognormal(0, 1, spec.size), 0.5, 3)


def zipf(rng, spec, last):
    """Rows by frequency, most frequent first, as in an embedding."""
    rows = (1.0 + np.arange(spec.shape[0] if spec.shape else 1)) ** -0.5
    return np.repeat(rows, spec.size // max(1, len(rows)))


def block_of_tensors(first: float, length: float):
    """Gradients in one part of every tensor only, all of equal magnitude."""

    def values(rng, spec, last):
        start, stop = int(first * spec.size), math.ceil((first + length) * spec.size)
        return ((np.arange(spec.size) >= start) & (np.arange(spec.size) < stop)).astype(float)

    return values


def only_last(rng, spec, last):
    """Gradients only in a block at the end of the bucket."""
    return block_of_tensors(0.7, 0.3)(rng, spec, last) if last else np.zeros(spec.size)


LENGTH = 4 * DENSITY  # of a part: twice the elements that a step sends of each worker
PATTERNS = {
    "heavy": heavy,
    "zipf": zipf,
    "beginnings": block_of_tensors(0.0, LENGTH),
    "ends": block_of_tensors(1.0 - LENGTH, LENGTH),
    "only_last": only_last,
}


def patterns_of(name: str) -> tuple[str, ...]:
    """Returns the patterns to test: fewer if the wrapped method is tested with all.

    The rarest elements of "zipf" take a thousand steps to reach a fixed threshold.
    """
    method = CASES[name].method
    if DEEP or not isinstance(getattr(method, "method", None), rs.Method):
        constant = isinstance(getattr(method, "threshold", None), float) and not DEEP
        return tuple(p for p in PATTERNS if not (constant and p == "zipf"))
    return ("heavy",) if name.startswith("Bloom") else ("heavy", "only_last")


@functools.cache
def gradients(pattern: str, specs: tuple[TensorSpec, ...]) -> list[list[np.ndarray]]:
    """`[worker][tensor]`: each worker has the elements of its own positions, with either sign."""
    rng = np.random.default_rng(len(pattern))
    grads: list[list[np.ndarray]] = [[] for _ in range(WORKERS)]
    for spec in specs:
        values = PATTERNS[pattern](rng, spec, spec is specs[-1])
        signed = np.float32(values * rng.choice([-1.0, 1.0], spec.size))
        for worker, own in enumerate(grads):
            owned = np.arange(spec.size) % WORKERS == worker
            own.append(np.where(owned, signed, np.float32(0)).reshape(spec.shape))
    return grads


# ----------------------------------------------------------------------------------------- bounds


def largest_first(magnitudes: list[np.ndarray], density: float) -> int:
    """Steps until every element was sent once, if each group sends its largest elements first."""
    longest = 1
    for rates in magnitudes:
        k = max(1, int(density * len(rates) + 0.5))
        residual, waiting, steps = np.zeros(len(rates)), rates > 0, 0
        while waiting.any():
            residual, steps = residual + rates, steps + 1
            sent = np.argpartition(-residual, k - 1)[:k]
            residual[sent], waiting[sent] = 0.0, False
        longest = max(longest, steps)
    return longest


@functools.cache
def turn(pattern: str, specs: tuple[TensorSpec, ...]) -> int:
    """Number of steps if the largest are sent first: of each tensor, or of the whole bucket."""
    steps = 1
    for own in gradients(pattern, specs):
        flat = [np.abs(np.float64(g)).reshape(-1) for g in own]
        of_bucket = largest_first([np.concatenate(flat)], DENSITY)
        steps = max(steps, largest_first(flat, DENSITY), of_bucket)
    return steps


def undelivered(method, step, start, grads, limit) -> tuple[list[int], int]:
    """Number of undelivered elements of each tensor after the limit; the steps taken."""
    sums = [sum(own[i] for own in grads) for i in range(len(grads[0]))]
    arrived = [np.zeros(w.shape) for w in sums]
    waiting, number, states = [w != 0 for w in sums], 0, start
    inputs = tensors(grads)
    while number < limit and any(w.any() for w in waiting):
        outcome = step(inputs, states, number)
        states, number = outcome.states, number + 1
        for i, total in enumerate(outcome.totals[0]):
            arrived[i] += total.numpy()
            waiting[i] &= arrived[i] * np.sign(sums[i]) <= 0
    return [int(w.sum()) for w in waiting], number


@pytest.mark.parametrize("name", CASES)
def test_every_element_is_delivered_in_time(name):
    descriptor = CASES[name]
    method, specs = descriptor.method, specs_of(descriptor)
    layout = BucketLayout(specs, WORKERS)
    step = loopback.traced_step(method, layout)
    threshold = getattr(method, "threshold", None)
    late = {}
    for pattern in patterns_of(name):
        grads, steps = gradients(pattern, specs), turn(pattern, specs)
        # fixed thresholds take many steps; random places have no bound
        if isinstance(threshold, float):
            grads = [[np.float32(0.5 * DENSITY * threshold) * g for g in own] for own in grads]
            least = min(np.abs(g[g != 0]).min() for own in grads for g in own if g.any())
            steps += math.ceil(threshold / least)
        limit = int(descriptor.patience * steps) + 4
        start = initial_states(method, layout, descriptor.start)
        waiting, taken = undelivered(method, step, start, grads, limit)
        print(f"{name:30s} {pattern:10s} {taken} of {limit} steps, waiting: {sum(waiting)}")
        if any(waiting):
            late[pattern] = (waiting, limit)
    assert not late, f"elements of {[s.size for s in specs]} undelivered after the limit"
