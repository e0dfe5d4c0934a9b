"""Candidates that `Auto` does not consider: what its table says of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tf_redsync.auto.decision import Choice, Measured
from tf_redsync.exchange.method import Method


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A default candidate that does not go with the optimizer.

    Attributes:
        method: The candidate.
        reason: Why it is left out, and what to do about it.
    """

    method: Method
    reason: str

    def line(self, choices: Sequence[Choice], measured: Measured) -> str:
        """Return a line of the table, with the time on the network; computation is not measured.

        Args:
            choices: The buckets.
            measured: What predictions are made of.
        """
        seconds = sum(measured.seconds(self.method, c.specs) for c in choices)
        known = choices and math.isfinite(measured.link.all_reduce.rate)
        time = f", {1e3 * seconds:.2f} ms on the network alone" if known else ""
        return f"left out: {type(self.method).__name__}{time}: {self.reason}"
