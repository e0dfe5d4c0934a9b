"""Declarations of a method: facts that callers read before any exchange."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """Declarations of a method with given hyper-parameters; conformance tests check most of them.

    A method returns `dataclasses.replace(super().traits, ...)` with the fields that differ from its
    base class.

    Args:
        paper: Authors and year, for `table()`.
        requests: The collectives of a step, as text for `table()`.
        bits: Formula for the bits that a worker contributes per element and step, for `table()`.
        exchanges: Whether workers exchange gradients at all, so that their weights stay equal.
        state_kinds: By name in the state, its kind: `"sum"`, `"mean"` or `"shared"`; see
            `step/state_variables.py`. A name has no `.` and no `/`. Gradients that are not
            delivered yet must be named `"residual"`, of kind `"sum"`, with one tensor for each
            gradient in its shape: only these does `flush()` deliver. The name `"pending"` belongs
            to delayed exchanges.
        period: Number of steps after which an exchange repeats, such as 2 for a method that sends
            its two factors in turn. Times and bytes are means over whole periods, and every step
            should have gradients of all variables.
        rounds_values: Whether a wrapper may round all values that it sends, because its residual
            keeps the rounding errors.
        finer_sums: Number of leading all-reduces of a step that `BlockQuantized` sends with twice
            the bits, because no residual keeps their rounding errors.
        votes: Whether totals are votes, -1, 0 or 1, also in dense exchanges. Votes need another
            learning rate than sums of gradients.
        whole_model: Whether all tensors of a fragment share one bucket of any size.
        conserves: Whether sum(gradient + old residual) = total + sum(new residual) up to rounding,
            with sums over workers.
        dense_delivers: Whether `dense_exchange` delivers the residual as well, and leaves momentum
            in it. The first step after `disable()` then delivers the whole residual.
        totals_may_overflow: Whether totals can be non-finite although all received values are
            finite. Every step then checks them, and all workers skip a step that fails.
        waiting_steps: Mean number of exchanges until an element is sent; 1 if each one sends it.
        sends_selected: Whether the method sends only selected elements, in messages that `Coded`
            can encode.
        density_changes: Whether the number of elements that are sent depends on the step.
        needs_amsgrad: Whether the method is made for AMSGrad as the inner optimizer.
        needs_sgd: Whether totals are updates that the exchange has adapted to each element, so that
            the inner optimizer must be SGD without momentum.
        momentum_in_exchange: Momentum that the exchange applies; the inner optimizer must then have
            none.
        notes: Differences between these hyper-parameters and what the method's name promises.
    """

    paper: str = ""
    requests: str = ""
    bits: str = ""
    exchanges: bool = True
    state_kinds: dict[str, str] = dataclasses.field(default_factory=dict)
    period: int = 1
    rounds_values: bool = False
    finer_sums: int = 0
    votes: bool = False
    whole_model: bool = False
    conserves: bool = True
    dense_delivers: bool = False
    totals_may_overflow: bool = True
    waiting_steps: float = 1.0
    sends_selected: bool = False
    density_changes: bool = False
    needs_amsgrad: bool = False
    needs_sgd: bool = False
    momentum_in_exchange: float = 0.0
    notes: tuple[str, ...] = ()
