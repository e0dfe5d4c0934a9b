"""The tables of the papers: lists of exchanges, each with the paper's figure.

A figure is listed if the paper's abstract or its public code has it. Figures of other papers, and
those noted without access to the paper, have a star, which the table explains.
"""

from __future__ import annotations

import dataclasses
from typing import Any

NONE = "-"


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        what: Its name.
        method: The exchange, as an expression of `benchmarks/method_expressions.py`.
        paper: The paper's figure.
        feedback: Whether there is error feedback; without it, residuals are cleared.
        whole_model: Whether the model is exchanged as a single tensor.
    """

    what: str
    method: str
    paper: str = NONE
    feedback: bool = True
    whole_model: bool = False

    @property
    def key(self) -> str:
        """The key of the row in a report."""
        variant = "" if self.feedback else "; no feedback"
        return self.method + variant + ("; one tensor" if self.whole_model else "")


@dataclasses.dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: Its heading.
        kind: How it is measured, a key of `paper_tables.KINDS`.
        rows: Its rows.
        settings: Defaults of the kind's flags, by name.
        paper: Description of the paper's figures.
        not_comparable: Differences from the paper.
    """

    title: str
    kind: str
    rows: tuple[Row, ...]
    paper: str
    not_comparable: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


def _redsync(density: float, options: str) -> str:
    masked = ", masking=True" if density >= 0.1 else ""  # the default there: no masking
    return f"RedSync(density={density:g}, momentum=0.9, dense_below=0{masked}{options})"


def _redsync_rows() -> tuple[Row, ...]:
    # Of ResNet44 on CIFAR-10: the paper's only figure close to this task.
    paper = {(0.001, ""): "7.17 % error*", (0.001, ", quantized=True"): "7.87 % error*"}
    rows = [Row("dense", "Dense()", "7.48 % error*")]
    for density in (0.1, 0.01, 0.001, 0.0001):
        for name, options in (("", ""), (", quantized", ", quantized=True")):
            figure = paper.get((density, options), NONE)
            rows.append(Row(f"{100 * density:g} %{name}", _redsync(density, options), figure))
    return tuple(rows)


def _foroutan_rows() -> tuple[Row, ...]:
    """Rows by scheme, by layer or model, with feedback or none."""
    schemes = {
        "top-k, layer": ("TopK(density={d})", False),
        "top-k, model": ("TopK(density={d}, scope='model')", False),
        "threshold": ("FixedThreshold(threshold={t}, density={d})", False),
        "random-k, layer": ("RandomK(density={d})", False),
        "random-k, model": ("RandomK(density={d})", True),
        "random block, layer": ("RandomBlock(density={d})", False),
        "random block, model": ("RandomBlock(density={d})", True),
    }
    paper = {
        ("top-k, layer", 0.1): "94.4 %*", ("top-k, layer", 0.01): "93.6 %*",
        ("random-k, layer", 0.1): "94.0 %*", ("random-k, layer", 0.01): "92.6 %*",
        ("random block, layer", 0.1): "93.3 %*", ("random block, layer", 0.01): "87.8 %*",
    }  # fmt: skip
    rows = [Row("dense", "Dense()", "94.3 %*")]
    for density, threshold in ((0.1, 0.005), (0.01, 0.02)):
        for name, (method, whole) in schemes.items():
            text = method.format(d=density, t=threshold)
            for feedback in (True, False):
                words = "" if feedback else ", no feedback"
                figure = paper.get((name, density), NONE) if feedback else NONE
                rows.append(
                    Row(f"{100 * density:g} %: {name}{words}", text, figure, feedback, whole)
                )
    return tuple(rows)


_SBC_PRESETS = {
    (1, 0.001): (" = SBC (1)", NONE),
    (10, 0.01): (" = SBC (2)", "the baseline's"),
    (100, 0.01): (" = SBC (3)", "1 % less"),
}
# All tensors are compressed, as in the paper; the default leaves biases dense.
_SBC_GRID = tuple(
    Row(
        f"delay {steps}, density {density:g}{name}",
        f"SBC(steps={steps}, density={density:g}, dense_below=0)",
        figure,
    )
    for steps in (1, 10, 100)
    for density in (0.1, 0.01, 0.001)
    for name, figure in [_SBC_PRESETS.get((steps, density), ("", NONE))]
)
_CDSGD = "CDSGD(full_every={k}, warm_up=None{more})"
_CDSGD_NEVER = 10**6  # a step beyond the end of every training here
_CDSGD_ROWS = (
    Row("dense", "Dense()"),
    Row("2-bit, no delay", "TwoBit()"),
    *(Row(f"k = {k}", _CDSGD.format(k=k, more="")) for k in (2, 5, 10, 20)),
    Row("k = infinity", _CDSGD.format(k=_CDSGD_NEVER, more="")),
)
_RANKS = (1, 4, 8, 16, 32)
_ACPSGD = "ACPSGD(rank={r}, min_compression_rate=0.0)"
_ACPSGD_ROWS = (
    Row("dense", "Dense()"),
    *(Row(f"ACP-SGD, rank {r}", _ACPSGD.format(r=r)) for r in _RANKS),
)
_POWERSGD = tuple(
    Row(f"PowerSGD, rank {r}", f"PowerSGD(rank={r}, min_compression_rate=0.0)") for r in (1, 4, 32)
)
_MB = 10**6
_DIGITS = {"workers": 4, "batch": 32, "steps": 300, "seeds": 3, "learning_rate": 0.2}
_NETWORK = {"workers": 2, "rate": "1gbit", "model": "mlp", "rounds": 2, "steps": 10, "warmup": 4}

TABLES = {
    "redsync": Table(
        "RedSync: densities, with and without quantization",
        "convergence",
        _redsync_rows(),
        "ResNet44 on CIFAR-10 at 0.1 %; * from notes, not checked against the paper. Its abstract "
        'says "correct accuracy and the same convergence speed".',
        "The paper trains 160 epochs or so, the first of them densely; here it is a network of "
        "156,186 weights for 3 epochs, compressed from the first step on.",
        {"task": "cifar10", "model": "cnn", "epochs": 3, "schedule": "cosine", "evaluations": 3},
    ),
    "redsync_dispatch": Table(
        "RedSync: selection by layer",
        "dispatch",
        (
            Row("bytes, the paper's", "RedSync()", "below 128 KB, up to 4 MB, above"),
            Row(
                "elements, the authors' code",
                "RedSync(dense_below=524288, threshold_above=16777216)",
                "131,072 and 4,194,304 elements",
            ),
        ),
        "CNNs use trimmed top-k in effect, LSTMs the threshold search.",
        "Nothing: the sizes of layers decide. The paper's LSTM has two layers of 1,500.",
    ),
    "acpsgd": Table(
        "ACP-SGD: ranks",
        "convergence",
        (*_ACPSGD_ROWS, *_POWERSGD),
        "Accuracy is that of PowerSGD. Rank 4 for ResNet50 and ResNet152, rank 32 for BERT.",
        "A network of 50,826 weights, whose last matrix has 10 columns: higher ranks are those of "
        "the matrix itself there.",
        {"task": "digits", "seeds": 3},
    ),
    "acpsgd_time": Table(
        "ACP-SGD: ranks, and sizes of the buffer",
        "time",
        (
            Row("no exchange", "NoExchange()"),
            *_ACPSGD_ROWS,
            Row("PowerSGD, rank 4", "PowerSGD(rank=4)", "1.34 x ACP-SGD's time"),
            *(
                Row(f"rank 4, buffer {mb:g} MB", f"ACPSGD(), bucket_bytes={max(1, int(mb * _MB))}")
                for mb in (0, 1, 5, 25, 100, 1500)
            ),
        ),
        "4.06 times as fast as S-SGD and 1.34 times as fast as PowerSGD, means of four networks, "
        "on 32 GPUs and 10 Gbit/s; buffers of 0 to 1500 MB of gradients, 25 by default.",
        "Two workers of one thread each, which share two cores with TensorFlow's gRPC; the network "
        "is nothing but dense layers, so that dense exchange takes most of a step.",
        _NETWORK,
    ),
    "sbc_bytes": Table(
        "SBC: compression on counted bytes",
        "bytes",
        (
            Row("SBC (1)", "SBC.preset(1, dense_below=0)"),
            Row("SBC (2)", "SBC.preset(2, dense_below=0)", "x3531"),
            Row("SBC (3)", "SBC.preset(3, dense_below=0)", "x37208"),
            Row("SBC (1), small tensors dense", "SBC.preset(1)"),
            Row("SBC (2), small tensors dense", "SBC.preset(2)"),
            Row("SBC (3), small tensors dense", "SBC.preset(3)"),
        ),
        "ResNet50 on ImageNet, the bytes that a worker sends.",
        "Messages here have room for the worst positions, so that all have one length; the paper "
        "counts those that came. Which of its figures belongs to which preset follows from the "
        "formula.",
    ),
    "sbc": Table(
        "SBC: gradient sparsity against temporal sparsity",
        "digits",
        (Row("dense", "Dense()"), *_SBC_GRID),
        "ResNet50 reaches the baseline's accuracy at x3531, and 1 % less at x37208.",
        "Digits, 1,000 steps: ten exchanges of 100 local steps, where ImageNet has thousands. "
        "Plain SGD, so that there is no local momentum to mask.",
        {**_DIGITS, "steps": 1000},
    ),
    "sbc_real": Table(
        "SBC: the presets with local momentum, by worker processes",
        "convergence",
        (
            Row("dense", "Dense()"),
            *(
                Row(f"SBC ({i})", f"SBC.preset({i}, dense_below=0)", figure)
                for i, figure in ((1, NONE), (2, "the baseline's"), (3, "1 % less"))
            ),
            Row("SBC (3), no masking", "SBC.preset(3, dense_below=0, masking=False)"),
        ),
        "ResNet50 reaches the baseline's accuracy at x3531, and 1 % less at x37208.",
        "Digits, two workers, 1,000 steps. SGD with momentum 0.9 on each worker, cleared where a "
        "change was sent.",
        {"task": "digits", "real": True, "workers": 2, "steps": 1000, "evaluations": 1},
    ),
    "foroutan": Table(
        "Sparse communication: scheme, layer or model, feedback",
        "digits",
        _foroutan_rows(),
        "* of PowerSGD's paper, table 4: ResNet-18 on CIFAR-10 with feedback, densities 1/32 and "
        "1/136. Foroutan's and Jaggi's own table was not at hand.",
        "Plain SGD at the learning rate of dense training. Without feedback nothing is scaled by "
        "1 / density, so a step is as short as what it sends. Biases are dense but where the model "
        "is one tensor or top-k is of the model. Messages of thresholds have room for the density "
        "of the other rows, and what does not fit waits.",
        _DIGITS,
    ),
    "cdsgd": Table(
        "CD-SGD: k, and 2-bit without delay",
        "digits",
        (
            *_CDSGD_ROWS,
            Row("k = 5, no compensation", _CDSGD.format(k=5, more=", local_learning_rate=0.0")),
        ),
        "Accuracy is that of S-SGD or slightly better.",
        "Plain SGD without a warm-up, where the authors' code has one of 1,000 steps.",
        _DIGITS,
    ),
    "cdsgd_time": Table(
        "CD-SGD: k, and 2-bit without delay",
        "time",
        (Row("no exchange", "NoExchange()"), *_CDSGD_ROWS),
        "30 % less time in all than 2-bit without delay, on 16 GPUs and 56 Gbit/s.",
        "The paper's 2-bit codes go to a server, from which all weights come back in float32; here "
        "codes go both ways, and every k-th step is an all-reduce of float32. The processors that "
        "compute serve the network as well.",
        _NETWORK,
    ),
}  # fmt: skip
