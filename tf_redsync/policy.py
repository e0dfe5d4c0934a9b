"""Which variable is exchanged by which method, and the table that shows it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from tf_redsync.exchange.layout import Bucket, TensorSpec
from tf_redsync.methods.base import Configurable, Method, register


@dataclasses.dataclass(frozen=True)
class Assignment:
    """A variable, its method, and the reason."""

    spec: TensorSpec
    method: Method
    reason: str


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule(Configurable):
    """Variables whose name matches go to a method.

    Args:
        pattern: Regular expression, searched in the variable's path.
        method: The method for what matches.
    """

    pattern: str
    method: Method

    def __post_init__(self) -> None:
        _check_pattern("pattern", self.pattern)
        if not isinstance(self.method, Method):
            raise ValueError(
                f"`method` must be a tf_redsync method. Received: method={self.method!r}"
            )


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy(Configurable):
    """Choose a method for every variable.

    The first rule whose pattern is found in the variable's name decides; without one `default`
    does, unless it refuses the tensor (size, rank): then its dense method.

    Args:
        default: Method for variables that no rule names.
        rules: Tried in order.
        output_layer: Regular expression for the names of the output layer's weights, which are
            never quantised. `None`: the last variable of rank 2 or more.

    Example:
        >>> import tf_redsync as rs
        >>> policy = rs.Policy(
        ...     default=rs.RedSync(density=0.001),
        ...     rules=(rs.Rule(pattern="embedding", method=rs.Dense()),))
    """

    default: Method
    rules: tuple[Rule, ...] = ()
    output_layer: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.default, Method):
            raise ValueError(
                f"`default` must be a tf_redsync method. Received: default={self.default!r}"
            )
        if self.output_layer is not None:
            _check_pattern("output_layer", self.output_layer)
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise ValueError(
                    "`rules` must be a tuple of tf_redsync.Rule(pattern=..., method=...). "
                    f"Received: {rule!r} in rules"
                )
            clip = getattr(rule.method, "clip_norm", None)
            if clip is not None:
                raise ValueError(
                    "`clip_norm` clips the whole gradient; give it to the policy's `default` "
                    f"method. Received: clip_norm={clip} in the rule {rule.pattern!r}"
                )
        momenta = {m.momentum_in_exchange for m in self.methods}
        if len(momenta) > 1:
            found = ", ".join(f"{type(m).__name__} {m.momentum_in_exchange}" for m in self.methods)
            raise ValueError(
                "all methods of a policy must apply the same momentum: some variables would have "
                f"none. Received: momentum of {found}. Give all of them the same one, as in "
                "Dense(momentum=0.9), or none of them, and the momentum to the optimizer."
            )
        cadences = {(m.local_steps, m.delay) for m in self.methods}
        if len(cadences) > 1:
            raise ValueError(
                "all methods of a policy must have the same number of local steps, and the same "
                f"delay. Received: (local steps, delay) of {sorted(cadences)}"
            )

    @property
    def methods(self) -> tuple[Method, ...]:
        """All methods that the policy may choose, except dense fallbacks."""
        return (self.default, *(rule.method for rule in self.rules))

    def mark_output_layer(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        """Return `specs` with `output_layer` set."""
        if self.output_layer is not None:
            pattern = re.compile(self.output_layer)
            marks = [bool(pattern.search(s.name)) for s in specs]
        else:
            last = max((i for i, s in enumerate(specs) if len(s.shape) >= 2), default=-1)
            marks = [i == last for i in range(len(specs))]
        return [dataclasses.replace(s, output_layer=m) for s, m in zip(specs, marks, strict=True)]

    def assign(self, specs: Sequence[TensorSpec]) -> list[Assignment]:
        """Choose a method for each of `specs`, in their order.

        Raises:
            ValueError: for an `output_layer` or a rule that matches none of them.
        """
        if self.output_layer is not None:
            _check_matches("output_layer", self.output_layer, specs)
        for rule in self.rules:
            _check_matches("pattern", rule.pattern, specs)
        return [self._assign(spec) for spec in self.mark_output_layer(specs)]

    def _assign(self, spec: TensorSpec) -> Assignment:
        for rule in self.rules:
            if re.search(rule.pattern, spec.name):
                return _or_dense(spec, rule.method, f"rule {rule.pattern!r}")
        return _or_dense(spec, self.default, "default")


def _check_pattern(name: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"`{name}` must be a regular expression ({error}). Received: {name}={pattern!r}"
        ) from error


def _check_matches(name: str, pattern: str, specs: Sequence[TensorSpec]) -> None:
    if not any(re.search(pattern, spec.name) for spec in specs):
        names = ", ".join(spec.name for spec in specs)
        raise ValueError(
            f"`{name}` of the policy matches none of the variables. Received: {name}={pattern!r}. "
            f"The trainable variables are: {names}."
        )


def _or_dense(spec: TensorSpec, method: Method, reason: str) -> Assignment:
    refusal = method.refuses(spec)
    if refusal is None:
        return Assignment(spec, method, reason)
    return Assignment(spec, method.dense(), refusal)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of `Explanation`: a variable and what happens to it."""

    name: str
    shape: tuple[int, ...]
    elements: int
    bucket: int
    method: str
    how: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What the exchange does with every variable; `str` prints a table.

    Attributes:
        rows: One for each variable, in the model's order.
        workers: Number of workers.
        dense_bytes: Bytes a worker would send in a step without compression.
        bytes_per_step: Bytes a worker sends in a step, after warm-up.
        replicas: Number of replicas that are one worker together.
    """

    rows: tuple[Row, ...]
    workers: int
    dense_bytes: float
    bytes_per_step: float
    replicas: int = 1

    def __str__(self) -> str:
        head = ("variable", "shape", "elements", "bucket", "method", "how", "why")
        table = [head] + [
            (r.name, str(r.shape), f"{r.elements:,}", str(r.bucket), r.method, r.how, r.reason)
            for r in self.rows
        ]
        widths = [max(len(line[i]) for line in table) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
            for line in table
        ]
        ratio = self.dense_bytes / self.bytes_per_step if self.bytes_per_step else float("inf")
        total = (
            f"{self.workers} workers, {self.bytes_per_step:,.0f} bytes sent per worker and step, "
            f"dense {self.dense_bytes:,.0f}, ratio {ratio:.1f}"
            if self.workers > 1
            else "1 worker: nothing is sent"
        )
        if self.replicas > 1:
            total = f"dense among the {self.replicas} replicas of a host, then {total}"
        return "\n".join([*lines, total])


def explain(
    assignments: Sequence[Assignment], buckets: Sequence[Bucket], workers: int, sent: float
) -> Explanation:
    """Make the table.

    Args:
        assignments: In the model's order.
        buckets: All buckets.
        workers: Number of workers.
        sent: Bytes a worker sends in a step.
    """
    rows = {
        spec.position: Row(
            name=spec.name,
            shape=spec.shape,
            elements=spec.size,
            bucket=bucket.layout.index,
            method=type(bucket.method).__name__,
            how=bucket.method.describe(spec),
            reason=assignments[spec.position].reason,
        )
        for bucket in buckets
        for spec in bucket.layout.specs
    }
    return Explanation(
        rows=tuple(rows[i] for i in sorted(rows)),
        workers=workers,
        dense_bytes=dense_bytes([a.spec for a in assignments], workers),
        bytes_per_step=sent,
    )


def dense_bytes(specs: Sequence[TensorSpec], workers: int) -> float:
    """Bytes a worker sends in a ring all-reduce of all of `specs` as float32."""
    return 2.0 * (workers - 1) / workers * sum(s.bytes for s in specs)
