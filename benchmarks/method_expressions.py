"""Methods on a benchmark's command line: `tf_redsync/expressions.py`, and variants.

Expressions may also name the classes of `benchmarks/accuracy/variants.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tf_redsync.expressions import Expression


def exchanged(text: str) -> Expression:
    """Returns the exchange that an expression describes.

    Besides arguments of `DistributedOptimizer` there may be `flush`, for `callbacks.Flush` in
    `fit`. Simulated workers also accept `rate_first`: gradients are multiplied by the learning rate
    before the exchange, so residuals contain updates; and `last_statistics`: those of
    BatchNormalization are recomputed at the end with the final weights.

    Raises:
        ValueError: names the error in the expression.
    """
    from benchmarks.accuracy.variants import SelectionVariant
    from tf_redsync import expressions

    return expressions.evaluate(text, {"SelectionVariant": SelectionVariant})
