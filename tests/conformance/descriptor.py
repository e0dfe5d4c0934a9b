"""A method's descriptor for the laws, and the tensors of the tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tests.deep import DEEP
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.exchange.requests import AllGather, AllReduce, PairGather

# Ranks 0 to 4, one element, no element, primes, and sizes around powers of two.
SHAPES = ((), (1,), (13,), (0, 3), (31, 5), (257, 3), (2, 3, 1, 4), (64, 33))
if DEEP:
    SHAPES = ((1, 1), (3, 4, 5), *SHAPES)
SPECS = tuple(
    TensorSpec(f"layer/{i}", shape, position=i, output_layer=i == len(SHAPES) - 1)
    for i, shape in enumerate(SHAPES)
)
WORKERS = (1, 2, 3, 4, 5, 7, 8)


def dense_payload(method, specs, step) -> list[int]:
    """Bytes of one all-reduce of all elements."""
    return [sum(s.bytes for s in specs)]


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """A method and its expected properties.

    Attributes:
        method: The instance under test.
        full: The same method when it sends everything (density 1, full rank), or None if it cannot.
            Its totals must be those of uncompressed momentum SGD.
        agrees: All workers end up with the same totals.
        requests: The types of its requests in a step, in order; or a function of the number of
            workers that returns them.
        payload: `payload(method, specs, step)` returns the bytes of a worker's request or requests,
            by the paper's formula and not by the code's. A function, as an item or as the whole
            result, is called with the number of workers.
        oracle: `oracle(method, specs, workers)` makes an object whose `step(grads)`, with
            `grads[worker][tensor]`, returns the totals of that step in numpy. Its
            `residuals[worker][tensor]` are then the new residuals (None if there are none). If it
            has `follow(states)`, it continues from the method's states after every step.
        tolerance: For comparisons with the oracle and with uncompressed SGD, relative to the
            largest element of a tensor. 0 requires equal bits.
        steps: Number of steps compared with the oracle. Fewer where eager steps are slow.
        traces: Whether a graph gives the bits of eager steps; it may add in another order.
        served_only: Leave out tensors that the method refuses.
        start: `start(method, specs)` returns the state that each worker starts from; the default is
            the method's `init`.
        patience: How many times longer an element may wait for delivery than if the largest
            residuals are sent first; see `test_delivery.py`. `None` if a worker sends no elements,
            or all.
    """

    method: Any
    full: Any = None
    agrees: bool = True
    requests: tuple[type, ...] | Callable[[int], tuple[type, ...]] = (AllReduce,)
    payload: Callable[[Any, tuple[TensorSpec, ...], int], list] = dense_payload
    oracle: Callable[[Any, tuple[TensorSpec, ...], int], Any] | None = None
    tolerance: float = 0.0
    steps: int = 50
    traces: bool = True
    served_only: bool = False
    start: Callable[[Any, tuple[TensorSpec, ...]], dict] | None = None
    patience: float | None = 2.0

    @property
    def gathers(self) -> bool:
        """Whether it sends messages with a header."""
        return bool({AllGather, PairGather} & set(self.kinds(2)))

    def kinds(self, workers: int) -> tuple[type, ...]:
        """The types of its requests with this number of workers."""
        return self.requests(workers) if callable(self.requests) else self.requests

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors of its tests."""
        if not self.served_only:
            return SPECS
        return tuple(s for s in SPECS if self.method.refuses(s) is None)
