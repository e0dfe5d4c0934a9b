"""What is exchanged, on the command line of a benchmark: `tf_redsync/expressions.py`, and variants.

The classes of `benchmarks/accuracy/variants.py` are known besides tf_redsync's.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """What is exchanged.

    Attributes:
        method: A method or a policy.
        options: The named arguments; `flush`, for `callbacks.Flush` in `fit`; and, for workers in
            one process, `rate_first`: gradients are multiplied by the learning rate before the
            exchange, which so holds updates, and `last_statistics`: those of BatchNormalization are
            gathered once more at the end, with the last weights.
    """

    method: Any
    options: dict[str, Any]


def exchanged(text: str) -> Exchanged:
    """Returns what an expression describes.

    Raises:
        ValueError: says what is wrong with it.
    """
    from benchmarks.accuracy.variants import SelectionVariant
    from tf_redsync import expressions

    found = expressions.evaluate(text, {"SelectionVariant": SelectionVariant})
    return Exchanged(found.method, found.options)
