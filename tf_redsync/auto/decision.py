"""What `Auto` measures, predicts and decides; see `auto.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from tf_redsync.auto import cost
from tf_redsync.config import from_config, serialize
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.method import Method
from tf_redsync.policy import Assignment, Policy, or_dense
from tf_redsync.tables import aligned


@dataclasses.dataclass(frozen=True)
class Measured:
    """What predictions are made of.

    Attributes:
        workers: Number of workers.
        link: The network.
        work: What methods compute.
    """

    workers: int
    link: cost.Link
    work: dict[Method, cost.Work]

    def seconds(self, method: Method, specs: Sequence[TensorSpec]) -> float:
        """Predict the time of the exchange of some tensors, of those that `method` refuses too.

        That of a step; with local steps, the part of a round that falls to it.
        """
        served = [s for s in specs if method.refuses(s) is None]
        refused = [s for s in specs if method.refuses(s) is not None]
        total = 0.0
        for m, part in ((method, served), (method.dense(), refused)):
            layout = BucketLayout(tuple(part), self.workers)
            total += cost.exchange_seconds(m, layout, self.link, self.work.get(m, cost.NO_WORK))
        return total / max(1, method.sync_schedule.local_steps)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A bucket: its tensors, the predicted seconds of every method, and the method chosen."""

    specs: tuple[TensorSpec, ...]
    methods: tuple[Method, ...]
    seconds: tuple[float, ...]
    method: Method


@dataclasses.dataclass(frozen=True)
class Decision:
    """What `Auto` decided; `str` prints the table.

    Attributes:
        choices: One for each bucket, last layers first.
        measured: What the predictions are made of.
        trial: `Auto.trial_steps`.
        reason: Why each bucket has its method, in words.
        budget: What it had to fit, in words.
        left_out: Lines about candidates that were not considered.
    """

    choices: tuple[Choice, ...]
    measured: Measured
    trial: int
    reason: str = "predicted to be the fastest"
    budget: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def trial_steps(self) -> int:
        """See `tf_redsync.policy.Resolved`. Where all is dense there is nothing to try."""
        return self.trial if any(c.method is not c.methods[0] for c in self.choices) else 0

    def assign(self, specs: Sequence[TensorSpec]) -> list[Assignment]:
        """Return the method of each of `specs`, in their order; see `Policy.assign`."""
        chosen = {s.position: (s, c.method) for c in self.choices for s in c.specs}
        return [or_dense(*chosen[s.position], self.reason) for s in specs]

    @override
    def __str__(self) -> str:
        link = self.measured.link
        lines = [
            f"tf_redsync.Auto, {self.measured.workers} workers: "
            + ", ".join(
                f"{kind.replace('_', '-')} {1e3 * line.latency:.2f} ms a hop and "
                f"{line.rate / 1e6:.1f} MB/s"
                for kind, line in vars(link).items()
            )
        ]
        names = [type(m).__name__ for m in self.choices[0].methods] if self.choices else []
        head = ["bucket", "tensors", "elements", *(f"{n} ms" for n in names), "chosen"]
        rows = [head]
        for i, c in enumerate(self.choices):
            times = [f"{1e3 * s:.2f}" for s in c.seconds]
            elements = sum(s.size for s in c.specs)
            row = [str(i), str(len(c.specs)), f"{elements:,}", *times, type(c.method).__name__]
            rows.append(row)
        budget = [self.budget] if self.budget else []
        return "\n".join([*lines, *aligned(rows, range(len(head))), *budget, *self.left_out])


@dataclasses.dataclass(frozen=True)
class Kept:
    """A decision of an earlier run, which this one goes on with.

    Attributes:
        methods: Of the variables, by position.
        trial_steps: See `tf_redsync.policy.Resolved`.
    """

    methods: tuple[Method, ...]
    trial_steps: int

    def assign(self, specs: Sequence[TensorSpec]) -> list[Assignment]:
        """Return the method of each of `specs`, in their order; see `Policy.assign`.

        Raises:
            ValueError: for a decision about other variables.
        """
        if len(specs) != len(self.methods):
            raise ValueError(
                f"what Auto decided in the run that was saved is for {len(self.methods)} "
                f"variables, and the model has {len(specs)}. Load it into the model that was saved."
            )
        marked = Policy(default=self.methods[0]).mark_output_layer(specs)
        why = "as in the run that was saved"
        return [or_dense(s, m, why) for s, m in zip(marked, self.methods, strict=True)]

    @override
    def __str__(self) -> str:
        return "tf_redsync.Auto: what it chose in the run that was saved"


def described(assignments: Sequence[Assignment], trial_steps: int) -> dict[str, Any]:
    """Return a decision as JSON has it, for `kept`."""
    methods = [serialize(a.method) for a in assignments]
    return {"methods": methods, "trial_steps": trial_steps}


def kept(found: dict[str, Any]) -> Kept:
    """Return the decision that `described` was asked of.

    Raises:
        ValueError: for anything else, or for a method that is not known.
    """
    try:
        methods = tuple(map(from_config, found["methods"]))
        steps = int(found["trial_steps"])
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"what Auto decided must have 'methods' and 'trial_steps'. Received: {found!r}"
        ) from error
    if not methods:
        raise ValueError(f"what Auto decided must have a method. Received: {found!r}")
    return Kept(methods, steps)
