"""Policies: the assignment of a method to every variable."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tf_redsync import checks
from tf_redsync.config import Configurable, register
from tf_redsync.exchange.capabilities import Fragmented, capability, clipping
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.exchange.method import Method


@dataclasses.dataclass(frozen=True)
class Assignment:
    """A variable, its method, and the reason."""

    spec: TensorSpec
    method: Method
    reason: str


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule(Configurable):
    """A pattern of variable names, and the method of the variables that match.

    Args:
        pattern: Regular expression, searched in the variable's path.
        method: The method of these variables.
    """

    pattern: str
    method: Method

    def __post_init__(self) -> None:
        checks.pattern("pattern", self.pattern)
        if not isinstance(self.method, Method):
            raise ValueError(
                "`method` must be a tf_redsync method. Received: "
                f"method={self.method!r}{checks.class_hint(self.method)}"
            )


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy(Configurable):
    """A method for every variable, by rules.

    A variable gets the method of the first rule whose pattern matches its name, else `default`. If
    that method refuses the tensor (size, rank), the variable gets the method's dense counterpart.

    Args:
        default: Method of variables that no rule matches.
        rules: The rules, by decreasing priority.
        output_layer: Regular expression for the names of the output layer's weights.
            `RedSync(quantized=True)` and `TernGrad` do not quantize them, `contrib.LGC` sends them
            dense; other methods ignore it. `None`: the last variable that is not a bias or norm.

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
                "`default` must be a tf_redsync method. Received: "
                f"default={self.default!r}{checks.class_hint(self.default)}"
            )
        if self.output_layer is not None:
            checks.pattern("output_layer", self.output_layer)
        checks.make_tuple(self, "rules")
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise ValueError(
                    "`rules` must be a tuple of tf_redsync.Rule(pattern=..., method=...). "
                    f"Received: {rule!r} in rules"
                )
            clips = clipping(rule.method)
            if clips is not None:
                raise ValueError(
                    "`clip_norm` clips the whole gradient; set it in the policy's `default` "
                    f"method. Received: clip_norm={clips.clip_norm} in the rule {rule.pattern!r}"
                )
        check_together(self.methods)

    @property
    def methods(self) -> tuple[Method, ...]:
        """All methods that the policy may choose, except dense fallbacks."""
        return (self.default, *(rule.method for rule in self.rules))

    @property
    def trial_steps(self) -> int:
        """0, because the methods are given and need no trial."""
        return 0

    def resolve(
        self,
        specs: Sequence[TensorSpec],
        strategy: Any,
        network: Any,
        bucket_bytes: int | None,
        sparse_totals: Callable[[Method], bool],
    ) -> Resolved:
        """Return the policy itself, which has no choice to make."""
        del specs, strategy, network, bucket_bytes, sparse_totals
        return self

    def mark_output_layer(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        """Return `specs` with `output_layer` set."""
        if self.output_layer is not None:
            pattern = re.compile(self.output_layer)
            marks = [bool(pattern.search(s.name)) for s in specs]
        else:
            last = max((i for i, s in enumerate(specs) if not s.is_bias_or_norm), default=-1)
            marks = [i == last for i in range(len(specs))]
        return [dataclasses.replace(s, output_layer=m) for s, m in zip(specs, marks, strict=True)]

    def assign(self, specs: Sequence[TensorSpec]) -> list[Assignment]:
        """Choose a method for each of `specs`, in their order.

        Raises:
            ValueError: `output_layer` or a rule matches none of them, or earlier rules match all
                variables of a rule.
        """
        if self.output_layer is not None:
            _check_matches("output_layer", self.output_layer, specs)
        for rule in self.rules:
            _check_matches("pattern", rule.pattern, specs)
            if all(self.rule_of(spec) is not rule for spec in specs):
                raise ValueError(
                    "earlier rules of the policy match all variables of a rule, so it would never "
                    f"apply; put it before them. Received: pattern={rule.pattern!r}"
                )
        return _with_fragments([self._assign(spec) for spec in self.mark_output_layer(specs)])

    def _assign(self, spec: TensorSpec) -> Assignment:
        rule = self.rule_of(spec)
        if rule is None:
            return or_dense(spec, self.default, "default")
        return or_dense(spec, rule.method, f"rule {rule.pattern!r}")

    def rule_of(self, spec: TensorSpec) -> Rule | None:
        """Return the first rule that matches a variable, or `None`."""
        return next((rule for rule in self.rules if re.search(rule.pattern, spec.name)), None)


class Resolved(Protocol):
    """Interface of an assignment of methods to variables: a `Policy`, or the choice of `Auto`."""

    @property
    def trial_steps(self) -> int:
        """Number of training steps of each kind in a trial of dense and compressed exchanges."""

    def assign(self, specs: Sequence[TensorSpec]) -> list[Assignment]:
        """Choose a method for each of `specs`, in their order."""


class Undecided(Protocol):
    """Interface of `Policy` and `Auto` before the optimizer is built, which resolves them."""

    @property
    def default(self) -> Method:
        """The method whose `clip_norm` applies, if it has one."""

    @property
    def methods(self) -> tuple[Method, ...]:
        """All methods that may be chosen."""

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of its constructor."""

    def resolve(
        self,
        specs: Sequence[TensorSpec],
        strategy: Any,
        network: Any,
        bucket_bytes: int | None,
        sparse_totals: Callable[[Method], bool],
    ) -> Resolved:
        """Choose the methods; all workers call it at the same point, outside of any replica.

        Args:
            specs: The variables, in the model's order.
            strategy: The strategy.
            network: The network that answers requests.
            bucket_bytes: See `make_buckets`.
            sparse_totals: Returns whether a method's totals may be sparse.
        """


def check_clip_norms(methods: Sequence[Method]) -> None:
    """Check that no method clips the gradient otherwise than the first one, the default.

    Raises:
        ValueError: another method has a `clip_norm`, which would not be applied.
    """
    norms = [clips and clips.clip_norm for clips in map(clipping, methods)]
    for method, norm in zip(methods, norms, strict=True):
        if norm not in (None, norms[0]):
            raise ValueError(
                "`clip_norm` clips the whole gradient; set it in the policy's `default` method, or "
                f"clip in the optimizer. Received: clip_norm={norm} in {method!r}, and "
                f"clip_norm={norms[0]} in the default {methods[0]!r}"
            )


def check_together(methods: Sequence[Method]) -> None:
    """Check that `methods`, the default first, can be combined in one model.

    Raises:
        ValueError: the methods differ in momentum, adaptation, dense steps, local steps, delay,
            interval or fragments, or a method other than the default clips the gradient.
    """
    check_clip_norms(methods)
    momenta = {m.traits.momentum_in_exchange for m in methods}
    if len(momenta) > 1:
        received = ", ".join(f"{type(m).__name__} {m.traits.momentum_in_exchange}" for m in methods)
        raise ValueError(
            "all methods of a policy must apply the same momentum. Received: momentum of "
            f"{received}. Set the same momentum in all of them, as in Dense(momentum=0.9), or set "
            "it in the optimizer only."
        )
    if len({m.traits.needs_sgd for m in methods}) > 1:
        received = ", ".join(type(m).__name__ for m in methods)
        raise ValueError(
            "CodedAdam sends updates of Adam and cannot be combined with methods that send "
            f"gradients. Received: {received}. Use CodedAdam for all variables, with a higher "
            "density where you want more accuracy."
        )
    _check_schedules(methods)


def _check_schedules(methods: Sequence[Method]) -> None:
    for name in ("warm_up_steps", "dense_every"):
        if len(values := {getattr(m.sync_schedule, name) for m in methods} - {0}) > 1:
            raise ValueError(
                f"all methods of a policy must have the same `{name}`, or none. Received: "
                f"{name} of {sorted(values)}"
            )
    schedules = {(m.sync_schedule.local_steps, m.sync_schedule.delay) for m in methods}
    if len(schedules) > 1:
        raise ValueError(
            "all methods of a policy must have the same number of local steps, and the same "
            f"delay. Received: (local steps, delay) of {sorted(schedules)}"
        )
    if len({m.sync_schedule.intervals for m in methods}) > 1:
        received = ", ".join(f"{type(m).__name__} {m.sync_schedule.intervals}" for m in methods)
        raise ValueError(
            "all methods of a policy must have the same growing intervals, or none. Received: "
            f"intervals of {received}"
        )
    fragments = {f and f.fragmentation for f in (capability(m, Fragmented) for m in methods)}
    if len(fragments) > 1:
        raise ValueError(
            "all methods of a policy must have the same `fragments`, and the same `mixing`. "
            f"Received: (fragments, mixing) of {sorted(map(str, fragments))}"
        )


def _check_matches(name: str, pattern: str, specs: Sequence[TensorSpec]) -> None:
    if not any(re.search(pattern, spec.name) for spec in specs):
        names = ", ".join(spec.name for spec in specs)
        raise ValueError(
            f"`{name}` of the policy matches none of the variables. Received: {name}={pattern!r}. "
            f"The trainable variables are: {names}."
        )


def _with_fragments(assignments: list[Assignment]) -> list[Assignment]:
    """Return the assignments with each variable's fragment set, if the method has fragments."""
    fragmented = capability(assignments[0].method, Fragmented) if assignments else None
    if fragmented is None or not assignments[0].method.sync_schedule.fragments:
        return assignments
    numbers = fragmented.fragments_of([a.spec for a in assignments])
    return [
        dataclasses.replace(a, spec=dataclasses.replace(a.spec, fragment=number))
        for a, number in zip(assignments, numbers, strict=True)
    ]


def or_dense(spec: TensorSpec, method: Method, reason: str) -> Assignment:
    """Return the assignment of a tensor to a method, or to the method's dense counterpart.

    The dense counterpart serves tensors that the method refuses.
    """
    refusal = method.refuses(spec)
    if refusal is None:
        return Assignment(spec, method, reason)
    return Assignment(spec, method.dense(), refusal)
