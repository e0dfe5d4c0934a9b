"""Tables without training: the selection of each layer of a network, and bytes of messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.method_expressions import exchanged
from benchmarks.papers.declared import Row

if TYPE_CHECKING:
    import keras

    from tf_redsync.exchange.layout import TensorSpec

_GOLDEN = (math.sqrt(5) + 1) / 2
PARTS = ("dense", "trimmed", "threshold")
VOCABULARY, UNITS = 10_000, 1500  # Penn Treebank; both LSTM layers of the paper


def _applications(name: str) -> keras.Model:
    import keras

    return getattr(keras.applications, name)(weights=None)


def _lstm() -> keras.Model:
    from keras import Input, Sequential, layers

    recurrent = [layers.LSTM(UNITS, return_sequences=True) for _ in range(2)]
    return Sequential(
        [Input((35,), dtype="int32"), layers.Embedding(VOCABULARY, UNITS), *recurrent,
         layers.Dense(VOCABULARY)]
    )  # fmt: skip


MODELS: dict[str, Callable[[], keras.Model]] = {
    "ResNet50": lambda: _applications("ResNet50"),
    "VGG16": lambda: _applications("VGG16"),
    "LSTM 2 x 1500": _lstm,
}


def specs_of(name: str) -> list[TensorSpec]:
    """Returns the trainable variables of a network of `MODELS`."""
    from tf_redsync.exchange.layout import tensor_spec

    return [tensor_spec(v, i) for i, v in enumerate(MODELS[name]().trainable_variables)]


def dispatch(rows: Sequence[Row], models: dict[str, Sequence[TensorSpec]]) -> list[dict[str, Any]]:
    """Counts the layers of each selection.

    Returns:
        A row for each method and network: of `dense`, `trimmed` and `threshold` the number of
        tensors with more than one axis, and the share of all weights, biases included.
    """
    import tf_redsync as rs

    found = []
    for row in rows:
        policy = rs.Policy(default=exchanged(row.method).method)
        for name, specs in models.items():
            layers, weights = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
            for assigned in policy.assign(specs):
                part = "dense"
                if isinstance(assigned.method, rs.RedSync):
                    part = assigned.method.selector(assigned.spec)
                layers[part] += not assigned.spec.is_bias_or_norm
                weights[part] += assigned.spec.size
            total = sum(weights.values())
            shares = {part: weights[part] / total for part in PARTS}
            found.append(
                {"method": row.key, "model": name, "elements": total, "layers": layers,
                 "shares": shares}
            )  # fmt: skip
    return found


def message_bytes(method: Any, specs: Sequence[TensorSpec]) -> float:
    """Returns the bytes that a worker contributes to the collectives of one exchange."""
    import tf_redsync as rs
    from tf_redsync.exchange import traffic
    from tf_redsync.exchange.layout import make_buckets

    assignments = [(a.spec, a.method) for a in rs.Policy(default=method).assign(specs)]
    # With two workers, each sends what it contributes, in all kinds of collectives.
    buckets = make_buckets(assignments, workers=2)
    return sum(traffic.bytes_sent(traffic.messages(b.method, b.layout)) for b in buckets)


def compression(method: Any, specs: Sequence[TensorSpec]) -> float:
    """Returns the ratio to the bytes of dense exchanges in every step."""
    dense = sum(s.bytes for s in specs)
    return dense * max(1, method.sync_schedule.local_steps) / message_bytes(method, specs)


def papers_compression(steps: int, density: float) -> float:
    """Returns the ratio by the paper's formula: 32 bits per element and step against Golomb codes.

    A random position of density p takes b + 1 / (1 - (1 - p)^(2^b)) bits, with the parameter b.
    """
    parameter = 1 + math.floor(math.log2(math.log(_GOLDEN - 1) / math.log1p(-density)))
    bits = parameter + 1 / (1 - (1 - density) ** (2**parameter))
    return 32 * steps / (density * bits)


def counted(rows: Sequence[Row], specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    """Counts the messages of methods with local steps."""
    found = []
    for row in rows:
        method = exchanged(row.method).method
        found.append(
            {
                "method": row.key,
                "bytes": message_bytes(method, specs),
                "compression": compression(method, specs),
                "formula": papers_compression(
                    method.sync_schedule.local_steps or 1, method.density
                ),
            }
        )
    return found
