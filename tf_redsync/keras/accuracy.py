"""Warnings about settings that cost accuracy; `explain()` also shows them.

Warnings cite a measurement; docs/benchmarks.md and docs/momentum.md have the commands.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tf_redsync.auto import Auto
from tf_redsync.exchange.capabilities import AdamMoments, capability
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.exchange.method import Method
from tf_redsync.keras import conflicts, momentum
from tf_redsync.methods.coded_adam import CodedAdam
from tf_redsync.methods.coded_topk import CodedTopK
from tf_redsync.methods.common.wrapper import innermost
from tf_redsync.methods.gmc import CodedGMC
from tf_redsync.methods.low_rank import ACPSGD, PowerSGD
from tf_redsync.methods.redsync import RedSync
from tf_redsync.methods.sparse_loco import SparseLoCo
from tf_redsync.policy import Assignment, Policy

SHORT_WAIT = 10  # steps between messages, a density of 10 %; gradients are not stale then
MANY_WORKERS = 8  # `CodedAdam` lost nothing with 4
FEW_STEPS = 10  # local steps, fewer than in any measurement with a loss
SMALL_OUTER_MOMENTUM = 0.7  # between 0.9, which cost much accuracy, and 0.5, which did not
# Optimizers that compute the bias correction 1 - beta_2^t in the variable's dtype.
_CORRECTED = ("Adam", "Lamb", "Nadam", "ScheduleFreeAdamW", "Muon")  # AdamW is an Adam


class AccuracyWarning(UserWarning):
    """Category of warnings about settings that are known to cost accuracy.

    `warnings.simplefilter("ignore", tf_redsync.AccuracyWarning)` disables these warnings.
    """


def suited(inner: Any, policy: Policy | Auto, warn: Callable[[str], None]) -> Policy | Auto:
    """Return `policy`; of `Auto`, with the default candidates that suit the optimizer.

    Args:
        inner: The inner optimizer.
        policy: The user's policy.
        warn: Called with the text of each warning.

    Raises:
        ValueError: see `check_momentum`, `check_per_worker_weights`, `check_adam` and `check_sgd`
            of `conflicts`.
    """
    conflicts.check_momentum(inner, policy)
    if not (isinstance(policy, Auto) and policy.candidates is None):
        conflicts.check_per_worker_weights(inner, policy)
    conflicts.check_adam(inner, policy)
    conflicts.check_sgd(inner, policy)
    if isinstance(policy, Auto):
        return policy.suited(
            lambda m: _objection(inner, m, policy.max_overhead is None),
            momentum.movable(inner),
            adaptive=momentum.of(inner).beta_2 is not None,
        )
    for text in of_settings(inner, policy.methods):
        warn(text)
    return policy


def _objection(inner: Any, method: Method, moves_momentum: bool) -> str | None:
    """Return the reason and remedy if a method does not suit an optimizer, else `None`.

    Args:
        inner: The inner optimizer.
        method: A default candidate.
        moves_momentum: Whether `Auto` may apply momentum in the exchange.
    """
    setting = momentum.of(inner)
    if (conflict := conflicts.per_worker_weights(inner, [method])) is not None:
        return conflict
    if _stale_momentum_warning(inner, method) is not None:
        advice = setting.removal
        if moves_momentum and momentum.movable(inner):
            advice = f"CodedGMC({setting}) is considered instead"
        elif moves_momentum and setting.known and tuple(setting.values) == ("momentum",):
            if not momentum.clipping_of_totals(inner):  # of the velocity, then
                advice += f" with Auto({setting}), which considers CodedGMC({setting})"
        return f"{setting} of the inner optimizer acts on stale gradients; {advice}"
    if _second_moment_warning(inner, method) is not None:
        return (
            f"{setting.optimizer}'s second moment decays before elements are sent; use AMSGrad, or "
            "a higher density"
        )
    if _low_rank_warning(inner, method) is not None:
        advice = f"{setting.removal}, and " if setting.values else ""
        return (
            f"low rank loses accuracy with {setting.optimizer}; {advice}use CodedTopK(value_bits=4)"
        )
    if _one_bit_warning(inner, method) is not None:
        return f"one-bit values lose accuracy with {setting.optimizer}; use SGD with CodedAdam()"
    return None


def of_settings(inner: Any, methods: Sequence[Method]) -> tuple[str, ...]:
    """Return the warnings about an optimizer and methods.

    Args:
        inner: The inner optimizer.
        methods: The methods, the most important one first. Some warnings name only the first method
            that they apply to.
    """
    texts = [_second_moment_warning(inner, m) for m in methods]
    late = [m for m, text in zip(methods, texts, strict=True) if text is None]
    texts.append(next(filter(None, (_stale_momentum_warning(inner, m) for m in late)), None))
    texts.append(_suspected_momentum_warning(inner, methods))
    for check in (
        _one_mean_warning,
        _long_rounds_warning,
        lambda m: _low_rank_warning(inner, m),
        lambda m: _one_bit_warning(inner, m),
    ):
        texts.append(next(filter(None, map(check, methods)), None))
    return tuple(dict.fromkeys(filter(None, texts)))


def of_exchange(inner: Any, exchange: Any) -> tuple[str, ...]:
    """Return the warnings about an optimizer and its built `GradientExchange`."""
    texts = [_own_moments_warning(a.method, exchange.workers) for a in exchange.assignments]
    return tuple(dict.fromkeys((*of_dtypes(inner, exchange.specs), *filter(None, texts))))


def of_dtypes(inner: Any, specs: Sequence[TensorSpec]) -> tuple[str, ...]:
    """Return a warning for each dtype of variables in which an optimizer's `beta_2` rounds to 1.

    Args:
        inner: The inner optimizer.
        specs: The trainable variables.
    """
    adaptive = momentum.innermost(inner)
    if not any(kind.__name__ in _CORRECTED for kind in type(adaptive).__mro__):
        return ()
    config = momentum.config_of(adaptive)
    name = "beta_2" if "beta_2" in config else "adam_beta_2"
    beta_2 = config.get(name)
    if not isinstance(beta_2, numbers.Real):
        return ()
    steps = "its steps" if name == "beta_2" else "the steps of its AdamW"
    dtypes = dict.fromkeys(spec.dtype for spec in specs)
    return tuple(
        f"{type(adaptive).__name__} with {name}={beta_2:.6g} and {dtype} variables: {name} rounds "
        f"to 1 in {dtype}, so the bias correction is 0, and {steps} are 0 or NaN. Use "
        f"{name}=0.99, or the policy mixed_{dtype}; see docs/mixed-precision.md."
        for dtype in dtypes
        if tf.as_dtype(dtype).as_numpy_dtype(beta_2) == 1
    )


def _second_moment_warning(inner: Any, method: Method) -> str | None:
    """Return a warning if an adaptive optimizer's second moment decays before elements are sent.

    The decayed moment makes an element's next step too long. With local steps the optimizer
    receives its worker's gradient in every step, so the moment does not decay.
    """
    adaptive, label = momentum.innermost(inner), type(method).__name__
    if getattr(adaptive, "amsgrad", False):
        return None
    name = type(adaptive).__name__
    if method.traits.needs_amsgrad:
        return (
            f"{label} is made for AMSGrad. Received: {name}. Use tf_redsync.AMSGrad (Keras 3) "
            "or Adam(amsgrad=True)."
        )
    if method.sync_schedule.local_steps:
        return None
    beta_2 = momentum.of(inner).beta_2
    if beta_2 is not None and method.traits.waiting_steps * (1.0 - beta_2) >= 1.0 - 1e-6:
        return (
            f"{label} sends an element every {method.traits.waiting_steps:.0f} steps on average, "
            f"but the second moment of {name} decays in {1.0 / (1.0 - beta_2):.0f} steps, so "
            "elements take too long steps when they are sent. Use AMSGrad (tf_redsync.AMSGrad, "
            "Adam(amsgrad=True)), or a higher density; see docs/adaptive.md."
        )
    return None


def _one_mean_warning(method: Method) -> str | None:
    """Return a warning about quantized RedSync, which drops its quantization errors."""
    inside = innermost(method)
    if not (isinstance(inside, RedSync) and inside.quantized):
        return None
    return (
        f"quantized=True of RedSync drops the errors of its one mean: "
        f"{_ONE_MEAN}. CodedTopK and CodedGMC keep their errors: "
        "with fewer bits CodedTopK(density=0.01, momentum=0.9) reached 67.5 %; see docs/warm-up.md."
    )


def _long_rounds_warning(method: Method) -> str | None:
    """Return a warning about long rounds of local steps, or `None`.

    0/1 Adam is exempt, because its workers share the mean momentum.
    """
    schedule = method.sync_schedule
    if not schedule.local_steps or capability(method, AdamMoments) is not None:
        return None
    figure = long_rounds(method)
    if figure is None:
        return None
    part = "a part of " if isinstance(innermost(method), SparseLoCo) else ""
    momentum = getattr(schedule.outer, "momentum", 0.0)
    outlasts = momentum > SMALL_OUTER_MOMENTUM and not schedule.fragments
    if schedule.local_steps <= FEW_STEPS and not (part or outlasts):
        return None
    advice = f"Use steps={FEW_STEPS} or fewer if accuracy matters"
    if part:
        advice = "Exchange in every step if messages are cheap"
    elif outlasts:
        advice = (
            "The outer momentum outlasts a training of a few dozen rounds: with 0.5 the "
            "perplexity was 7.4 for 15 steps and 7.9 for 50. Use "
            "outer=tf_redsync.outer.Nesterov(learning_rate=0.7, momentum=0.5) for such trainings"
        )
    return (
        f"{_name(method)} exchanges {part}the workers' changes every {schedule.local_steps} steps: "
        f"{figure}. {advice}; see docs/benchmarks.md#bytes-for-perplexity."
    )


def _stale_momentum_warning(inner: Any, method: Method) -> str | None:
    """Return a warning if the inner optimizer's momentum acts on stale gradients."""
    setting = momentum.of(inner)
    waits = method.traits.waiting_steps > SHORT_WAIT and "residual" in method.traits.state_kinds
    if (
        not setting.values
        or not waits
        or method.sync_schedule.local_steps
        or method.traits.momentum_in_exchange
    ):
        return None
    density, to_method = 1.0 / method.traits.waiting_steps, ""
    cost = late_beta_1(density)
    if setting.known and tuple(setting.values) == ("momentum",):
        cost = late_momentum(density)
        to_method = f", and pass the momentum to the method, such as CodedGMC({setting})"
    return (
        f"{setting} of the inner optimizer {'is' if setting.known else 'may be'} momentum that "
        f"acts on stale gradients: {_name(method)} sends them {method.traits.waiting_steps:,.0f} "
        f"steps late on average. This cost {cost}. Instead, {setting.removal}{to_method}; see "
        "docs/momentum.md and docs/adaptive.md."
    )


def _suspected_momentum_warning(inner: Any, methods: Sequence[Method]) -> str | None:
    """Return a warning if an unknown optimizer may have momentum in addition to the method's."""
    setting, method = momentum.of(inner), conflicts.with_momentum(methods)
    if setting.known or not setting.values or method is None:
        return None
    return (
        f"{setting} of {setting.optimizer} may be momentum, which would be applied twice: there is "
        f"{conflicts.exchanged_momentum(method)}. {conflicts.one_side(setting, method)}"
    )


def _low_rank_warning(inner: Any, method: Method) -> str | None:
    """Return a warning about low-rank methods with adaptive optimizers.

    Adam divides by the size of the low-rank gradient, and later by that of its error.
    """
    if not isinstance(innermost(method), (ACPSGD, PowerSGD)):
        return None
    setting = momentum.of(inner)
    if setting.beta_2 is None:
        return None
    return (
        f"{_name(method)} with an adaptive optimizer: {low_rank(_name(innermost(method)))}"
        ". Use CodedAdam() around SGD; see docs/adaptive.md."
    )


def _one_bit_warning(inner: Any, method: Method) -> str | None:
    """Return a warning about values of one bit with adaptive optimizers."""
    inside = innermost(method)
    if not isinstance(inside, (CodedGMC, CodedTopK)) or inside.value_bits > 1:
        return None
    setting = momentum.of(inner)
    if setting.beta_2 is None or method.sync_schedule.local_steps:
        return None
    if _stale_momentum_warning(inner, method) is not None:
        return None  # stale momentum costs more, with any values
    cost, advice = _ONE_BIT, "value_bits=4"
    if isinstance(inside, CodedGMC) and inside.momentum:
        cost, advice = _ONE_BIT_GMC, "CodedTopK(value_bits=4)"
    return (
        f"{_name(inside)} with value_bits=1 and {setting.optimizer}: {cost}. Use {advice}, or "
        "CodedAdam() around SGD; see docs/adaptive.md."
    )


def _own_moments_warning(method: Method, workers: int) -> str | None:
    """Return a warning about second moments that each of many workers has of its own."""
    inside = innermost(method)
    if not isinstance(inside, CodedAdam) or inside.average_every or workers < MANY_WORKERS:
        return None
    return (
        f"CodedAdam with {workers} workers: the second moment of each worker sees 1 / {workers} of "
        f"the examples. {_OWN_MOMENTS}. Use CodedAdam(average_every=100); see docs/adaptive.md."
    )


def of_length(exchange: Any, so_far: int, epochs: int, steps: float) -> str | None:
    """Return a warning if a training is too short to send every element once, else `None`.

    Args:
        exchange: The built exchange.
        so_far: Number of updates before this training.
        epochs: Number of epochs.
        steps: Updates per epoch; 0 if unknown.
    """
    warm_up = 0 if exchange.warm_up is None else exchange.warm_up.steps
    compressed = so_far + epochs * steps - warm_up
    if exchange.workers == 1 or not steps or compressed <= 0:
        return None
    waits = [(_exchanges_between(a), a) for a in exchange.assignments]
    late = [(w, a) for w, a in waits if w > _exchanges(a.method, compressed, steps) > 0]
    if not late:
        return None
    wait, longest = max(late, key=lambda pair: pair[0])
    share = sum(a.spec.size for _, a in late) / max(1, sum(a.spec.size for _, a in waits))
    local = longest.method.sync_schedule.local_steps
    each = f" rounds of {local} steps" if local else " steps"
    count = _exchanges(longest.method, compressed, steps)
    advice = "Train for longer"
    if count >= 1.0 and hasattr(innermost(longest.method), "density"):
        advice = f"Set a density of {1.0 / count:.2g} or more, or train for longer"
    return (
        f"{_name(longest.method)} sends an element of {longest.spec.name} every {wait:,.0f}{each} "
        f"on average (density {1.0 / wait:.2g}), but this training has {count:,.0f} of them: most "
        f"of the gradient of {share:.0%} of the weights is never delivered. {advice}; see "
        "docs/warm-up.md."
    )


def _exchanges(method: Method, steps: float, per_epoch: float) -> float:
    """Return the number of a method's exchanges in `steps`; rounds end with an epoch."""
    local = method.sync_schedule.local_steps
    rounds = steps / min(local, per_epoch) if local else steps
    return rounds - method.sync_schedule.warm_up_steps


def _exchanges_between(assignment: Assignment) -> float:
    """Return the mean number of exchanges from one message with an element to the next."""
    method, spec = assignment.method, assignment.spec
    count = getattr(innermost(method), "k", None)
    traits = method.traits
    if traits.waiting_steps == 1.0 or count is None or traits.whole_model or not spec.size:
        return traits.waiting_steps
    return spec.size / count(spec)


def _name(method: Method) -> str:
    return type(method).__name__


_Number = TypeVar("_Number", int, float)

# With the mean of the selected values, with all values.
_ONE_MEAN = "58.1 % instead of 63.7 % on CIFAR-10 (3 epochs, density 0.1 %)"
# Accuracy with momentum of the inner optimizer, of the method, and global momentum; the method.
_MOMENTUM = {0.001: (60.8, 61.7, 64.0, "RedSync"), 0.03: (66.8, 67.9, 69.2, "CodedTopK")}
# Perplexity on characters, 600 steps, by density: with beta_1=0.9, with beta_1=0; the methods.
_BETA_1 = {0.01: (12.2, 8.4, "CompAMS and AMSGrad"), 0.03: (10.2, 7.3, "CodedTopK and AdamW")}
# Perplexity on characters, 600 steps of AdamW; dense exchanges reach 7.6.
_LOW_RANK = {"PowerSGD": 8.7, "ACPSGD": 10.4}
# After four epochs of AdamW at its best rate.
_ONE_BIT = "24.8 BLEU in translation instead of 27.4 with value_bits=4 or Dense() (AdamW, 4 epochs)"
_ONE_BIT_GMC = "2.1 BLEU in translation instead of 21.5 with Dense() (AdamW, 2 epochs)"
_OWN_MOMENTS = "With 16, the perplexity in translation was 11 % above Dense() after 4 epochs"
# Perplexity on characters, 1,000 steps of AdamW, by the momentum of the outer optimizer and the
# number of local steps. `None`: no loss of accuracy.
_DENSE = 6.49
_LOCAL: dict[float, dict[int, float | None]] = {
    0.0: {8: None, 15: 7.45, 50: 7.89},
    0.5: {15: 7.36, 50: 7.88},
    0.9: {15: 11.06, 50: 9.41, 250: 9.14},
}
_STREAMING = {50: 7.96}
_SPARSE = {(15, 32): 9.25, (15, 128): 8.16, (50, 128): 9.10}  # by `steps` and `top_k`


def late_momentum(density: float) -> str:
    """Return the measured cost of the inner optimizer's momentum at a density."""
    at = _nearest(_MOMENTUM, density)
    inner, local, shared, method = _MOMENTUM[at]
    return (
        f"{inner} % instead of {local} % with the method's own momentum and {shared} % with a "
        f"global one on CIFAR-10 ({method}, 3 epochs, density {100 * at:g} %)"
    )


def late_beta_1(density: float) -> str:
    """Return the measured cost of Adam's beta_1 at a density."""
    at = _nearest(_BETA_1, density)
    adam, without, method = _BETA_1[at]
    return (
        f"a perplexity of {adam} instead of {without} without it on characters ({method}, 600 "
        f"steps, density {100 * at:g} %)"
    )


def low_rank(name: str) -> str:
    """Return the measured cost of a low-rank method with Adam."""
    return (
        f"a perplexity of {_LOW_RANK[name]} instead of 7.6 with Dense() on characters (AdamW, "
        "600 steps, rank 4)"
    )


def long_rounds(method: Method) -> str | None:
    """Return the measured cost of local steps at the nearest setting; `None` without a loss."""
    schedule, inside = method.sync_schedule, innermost(method)
    if isinstance(inside, SparseLoCo):
        near = min(
            _SPARSE,
            key=lambda at: (_log_distance(at[0], inside.steps), _log_distance(at[1], inside.top_k)),
        )
        setting, perplexity = f"SparseLoCo(steps={near[0]}, top_k={near[1]})", _SPARSE[near]
    elif schedule.fragments:
        at = _nearest(_STREAMING, schedule.local_steps)
        setting, perplexity = f"StreamingDiLoCo(steps={at})", _STREAMING[at]
    else:
        momentum = float(getattr(schedule.outer, "momentum", 0.0))
        outer = min(_LOCAL, key=lambda known: abs(known - momentum))
        at = _nearest(_LOCAL[outer], schedule.local_steps)
        measured = _LOCAL[outer][at]
        if measured is None:
            return None
        setting, perplexity = f"LocalSGD(steps={at})", measured
        if outer:
            setting = f"DiLoCo(steps={at}) with an outer momentum of {outer}"
    return (
        f"a perplexity of {perplexity} with {setting}, the nearest measured setting, instead of "
        f"{_DENSE} in dense training, on characters (AdamW, 1,000 steps)"
    )


def _nearest(known: Mapping[_Number, Any], value: float) -> _Number:
    """Return the key that is nearest to a positive value, by ratio."""
    return min(known, key=lambda at: _log_distance(at, value))


def _log_distance(a: float, b: float) -> float:
    return abs(math.log(a / b))
