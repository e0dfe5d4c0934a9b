"""Groups trainable variables into buckets and orders the buckets.

The layout is static and depends only on the model's variables, their methods and the settings. All
workers therefore compute the same layout without communication.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

SMALLEST_BUCKET, LARGEST_BUCKET = 2**20, 2**24  # default limits of a bucket's float32 bytes
_BIAS_OR_NORM = re.compile(r"(^|[/_])(bias|beta|gamma|scale)(:\d+)?$")
GRADIENT_DTYPES = (tf.float32, tf.bfloat16, tf.float16)


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """The description of a trainable variable.

    Attributes:
        name: The variable's path, for messages and tables.
        shape: Static shape.
        dtype: Name of the variable's dtype, e.g. `"float32"`.
        position: Index in the optimizer's list of variables.
        output_layer: Whether this is a weight of the model's output layer.
        fragment: Index of the variable's fragment, for methods that exchange fragments in turn.
        is_bias_or_norm: Whether this is a bias, or the scale or shift of a normalization. These are
            small and sensitive to compression. True for all variables of rank 0 and 1. At a higher
            rank, as in attention or in norms over several axes, the name decides.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    position: int = 0
    output_layer: bool = False
    fragment: int = 0
    is_bias_or_norm: bool = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        is_bias_or_norm = len(self.shape) < 2 or bool(_BIAS_OR_NORM.search(self.name))
        object.__setattr__(self, "is_bias_or_norm", is_bias_or_norm)

    @functools.cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @functools.cached_property
    def bytes(self) -> int:
        """Size of the gradient in bytes of float32, the dtype of residuals."""
        return 4 * self.size


def tensor_spec(variable: Any, position: int) -> TensorSpec:
    """Return the description of a trainable variable.

    Args:
        variable: A variable of Keras or TensorFlow.
        position: Its index in the optimizer's list of variables.

    Raises:
        TypeError: If its dtype is not float32, bfloat16 or float16.
    """
    dtype = tf.as_dtype(variable.dtype)
    name = getattr(variable, "path", variable.name)
    if dtype not in GRADIENT_DTYPES:
        raise TypeError(
            f"the trainable variable {name!r} must be float32, bfloat16 or float16. "
            f"Received: dtype={dtype.name}."
        )
    return TensorSpec(name, tuple(variable.shape), dtype.name, position)


@dataclasses.dataclass(frozen=True)
class BucketLayout:
    """The tensors of one bucket: the same on all workers and in every step; see `Context`.

    Attributes:
        specs: The bucket's tensors, last layer first.
        workers: Number of workers in the exchange.
        index: Position among the buckets. Random streams depend on it, on the seed and the step.
        sparse_totals: Whether totals may be sparse (`SparseTotal`) as well as dense.
    """

    specs: tuple[TensorSpec, ...]
    workers: int
    index: int = 0
    sparse_totals: bool = False


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A bucket's layout and the method that exchanges it."""

    method: Any
    layout: BucketLayout


def make_buckets(
    assignments: Sequence[tuple[TensorSpec, Any]],
    workers: int,
    bucket_bytes: int | None = None,
    sparse_totals: bool = False,
) -> list[Bucket]:
    """Group tensors into buckets, in the order of the backward pass.

    Tensors of a bucket have the same method and fragment. Tensors are taken from the last layer to
    the first, since the last layers' gradients are ready first. A bucket is closed when it reaches
    `bucket_bytes`.

    Biases and norms have separate buckets, unless one bucket holds all tensors of the method and
    fragment. Small ops outside of the backward pass's critical path compute their gradients.
    TensorFlow may run these ops last, which would delay a large tensor in the same bucket.

    Args:
        assignments: `(spec, method)` in the order of the model's variables.
        workers: Number of workers.
        bucket_bytes: Size in float32 bytes at which a bucket is full. A larger tensor may be a
            bucket of its own. `None`: 16 MiB, but at most a quarter of the bytes of the method's
            tensors (not below 1 MiB), so that an exchange begins early in small models, too.
        sparse_totals: See `BucketLayout`.

    Returns:
        The buckets in the order in which they are closed, which is the order in which their
        gradients are complete. Buckets of biases that stay open come last.

    Raises:
        ValueError: If `bucket_bytes` is not positive.
    """
    if bucket_bytes is not None and bucket_bytes <= 0:
        raise ValueError(f"`bucket_bytes` must be positive. Received: bucket_bytes={bucket_bytes}")
    sizes: Counter[Any] = Counter()
    for spec, method in assignments:
        sizes[method, spec.fragment] += spec.bytes
    open_buckets: dict[Any, list[TensorSpec]] = {}
    closed: list[tuple[Any, list[TensorSpec]]] = []
    for spec, method in reversed(assignments):
        size = sizes[method, spec.fragment]
        full = bucket_bytes or _default_bucket_bytes(method, size)
        cut = size > full and not method.traits.whole_model
        key = (method, spec.fragment, cut and spec.is_bias_or_norm)
        specs = open_buckets.setdefault(key, [])
        specs.append(spec)
        if cut and sum(s.bytes for s in specs) >= full:
            closed.append((key, open_buckets.pop(key)))
    closed.extend(sorted(open_buckets.items(), key=lambda item: item[0][2]))  # biases last
    return [
        Bucket(method, BucketLayout(tuple(specs), workers, index, sparse_totals))
        for index, ((method, *_), specs) in enumerate(closed)
    ]


def _default_bucket_bytes(method: Any, size: int) -> int:
    """Return the bytes at which a bucket of a method with `size` bytes of tensors is full."""
    if method.sync_schedule.local_steps:  # exchanges after a step, not beside a backward pass
        return LARGEST_BUCKET
    return min(max(size // 4, SMALLEST_BUCKET), LARGEST_BUCKET)
