"""What is exchanged, on the command line of a benchmark: `tf_redsync/expressions.py`, and variants.

The classes of `benchmarks/accuracy/variants.py` are known besides tf_redsync's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tf_redsync.expressions import Expression


def exchanged(text: str) -> Expression:
    """Returns what an expression describes.

    Besides arguments of `DistributedOptimizer` there may be `flush`, for `callbacks.Flush` in
    `fit`; and, for workers in one process, `rate_first`: gradients are multiplied by the learning
    rate before the exchange, which so holds updates, and `last_statistics`: those of
    BatchNormalization are gathered once more at the end, with the last weights.

    Raises:
        ValueError: says what is wrong with it.
    """
    from benchmarks.accuracy.variants import SelectionVariant
    from tf_redsync import expressions

    return expressions.evaluate(text, {"SelectionVariant": SelectionVariant})
