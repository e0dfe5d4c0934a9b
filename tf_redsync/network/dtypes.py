"""Sums and gathers of dtypes that TensorFlow's collectives do not support.

`CollectiveReduceV2` and `CollectiveGatherV2` support float16, float32, float64, int32 and int64;
the former also supports bfloat16. Other dtypes are cast: to a wider integer for sums, and to a
dtype that represents all their values for gathers. Complex values are gathered in two parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

_NATIVE = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
_WIDER = {
    tf.uint8: tf.int64,
    tf.int8: tf.int64,
    tf.int16: tf.int64,
    tf.uint16: tf.int64,
    tf.uint32: tf.int64,
    tf.uint64: tf.int64,  # modulo 2^64, like sums of int64
}
CARRIED = {
    **dict.fromkeys((tf.bool, tf.uint8, tf.int8, tf.int16, tf.uint16), tf.int32),
    tf.uint32: tf.int64,
    tf.uint64: tf.int64,
    tf.bfloat16: tf.float32,
}
_COMPOSITE = (tf.RaggedTensor, tf.SparseTensor)

Map = Callable[[Callable[[Any], Any], Any], Any]  # calls a function on every replica


def summed(reduce_one: Callable[[Any], Any], on_replicas: Map, value: Any, part: Any) -> Any:
    """Return `reduce_one(value)`, computed in another dtype if necessary.

    Args:
        reduce_one: Sums or averages over the replicas.
        on_replicas: Calls a function with each replica's part of a value.
        value: The value of all replicas.
        part: The value of this process's first replica.

    Raises:
        TypeError: If `value` has strings or bools, or is a ragged or sparse tensor.
        tf.errors.InvalidArgumentError: If a sum of integers overflows its dtype.
    """
    dtype = getattr(part, "dtype", None)
    composite = isinstance(part, _COMPOSITE)
    if not composite and (
        dtype in (*_NATIVE, tf.bfloat16, None) or isinstance(part, tf.IndexedSlices)
    ):
        return reduce_one(value)
    if composite or dtype not in _WIDER or not tf.is_tensor(part):
        kind = type(part).__name__ if composite else tf.as_dtype(dtype).name
        raise TypeError(
            "`strategy.reduce` needs dense numbers to sum over the workers. Received: a "
            f"value of {kind}. Cast it to int32 or float32, make it dense, or use `gather`."
        )
    wide = on_replicas(lambda v: tf.cast(v, _WIDER[dtype]), value)
    total = reduce_one(wide)
    return total if total.dtype.is_floating else _narrowed(total, dtype)


def _narrowed(total: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype != tf.uint64:
        fits = tf.reduce_all((total >= dtype.min) & (total <= dtype.max))
        message = f"the sum over the workers overflows {dtype.name}: cast to int64 before"
        with tf.control_dependencies([tf.debugging.Assert(fits, [message])]):
            total = tf.identity(total)
    return tf.cast(total, dtype)


def gathered(gather: Callable[[Any], tf.Tensor], on_replicas: Map, value: Any, part: Any) -> Any:
    """Return `gather(value)`, computed in another dtype if necessary; see `summed`."""
    dtype = getattr(part, "dtype", None)
    if dtype == tf.string and tf.is_tensor(part) and not isinstance(part, _COMPOSITE):
        return _gathered_strings(gather, on_replicas, value)
    if dtype in (tf.complex64, tf.complex128):
        return tf.complex(*(gather(on_replicas(f, value)) for f in (tf.math.real, tf.math.imag)))
    if dtype not in CARRIED:
        return gather(value)
    carried = on_replicas(lambda v: tf.cast(v, CARRIED[dtype]), value)
    return tf.cast(gather(carried), dtype)


def _gathered_strings(
    gather: Callable[[Any], tf.Tensor], on_replicas: Map, value: Any
) -> tf.Tensor:
    """Gather the lengths of strings, then their bytes, padded to the longest string."""
    lengths = gather(on_replicas(tf.strings.length, value))
    longest = tf.maximum(tf.reduce_max(lengths), 1)

    def codes(texts: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.io.decode_raw(texts, tf.uint8, fixed_length=longest), tf.int32)

    letters = tf.constant([bytes([i]) for i in range(256)])
    texts = tf.strings.reduce_join(tf.gather(letters, gather(on_replicas(codes, value))), axis=-1)
    return tf.strings.substr(texts, tf.zeros_like(lengths), lengths)
