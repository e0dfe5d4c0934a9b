"""`optimizer.summary()` in all families: the printed numbers add up."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_redsync as rs
from tests.loops import loop

SHAPES = {"small": (8, 4), "kernel": (60, 50), "second": (40, 30), "bias": (30,)}
POLICY = rs.Policy(
    default=rs.TopK(density=0.01), rules=(rs.Rule(pattern="second", method=rs.PowerSGD(rank=2)),)
)


def build_optimizer(strategy, kind, inner, method=POLICY):
    with strategy.scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        variables = [kind(np.zeros(s, np.float32), name=n) for n, s in SHAPES.items()]
        optimizer = rs.DistributedOptimizer(inner, method)
        optimizer.build(variables)
    return optimizer


@loop(
    ("kind", "inner"),
    [
        (keras.Variable, lambda: keras.optimizers.SGD(0.1)),
        (tf.Variable, lambda: tf_keras.optimizers.SGD(0.1)),
        (tf.Variable, lambda: tf_keras.optimizers.legacy.SGD(0.1)),
    ],
)
def test_table(mirrored, capsys, kind, inner):
    optimizer = build_optimizer(mirrored(2), kind, inner())
    optimizer.summary()
    printed = capsys.readouterr().out.splitlines()
    lines = []
    optimizer.summary(print_fn=lines.append)
    assert lines == printed and lines[0] == f'Optimizer: "{optimizer.name}"'
    rows = {}
    for line in lines[4:8]:
        name, *cells = [cell for cell in line.split("  ") if cell]
        rows[name.partition(":")[0]] = [cell.strip() for cell in cells]
    assert list(rows) == list(SHAPES)
    assert [row[1] for row in rows.values()] == ["Dense", "TopK", "PowerSGD", "Dense"]
    assert rows["kernel"][2] == "0.01" and rows["bias"][2] == "1"
    sent = [int(row[3].replace(",", "")) for row in rows.values()]
    assert sum(sent) == pytest.approx(optimizer.bytes_per_step(), abs=2)
    # 30 elements of 8 bytes, a count and a flag; two factors of rank 2
    assert sent[1] == 30 * 8 + 4 + 4 and sent[2] == 4 * 2 * (40 + 30)
    assert [row[4] for row in rows.values()][1] == f"{4 * 3000 / sent[1]:.1f}"
    assert rows["kernel"][-1] == "11.72 KB"  # a residual of 3,000 float32
    assert any("2 workers" in line and "ratio" in line for line in lines)


@pytest.mark.parametrize("method", [POLICY, rs.PowerSGD(rank=2)], ids=["policy", "bucket"])
def test_rows_show_the_exchange_in_use(mirrored, method):
    """After `disable()` all tensors, also those of one bucket, are sent in float32."""
    optimizer = build_optimizer(mirrored(2), keras.Variable, keras.optimizers.SGD(0.1), method)
    lines = []
    optimizer.disable()
    optimizer.summary(print_fn=lines.append)
    rows = [[cell.strip() for cell in line.split("  ") if cell] for line in lines[4:8]]
    sent = [int(row[4].replace(",", "")) for row in rows]
    assert sent == [4 * np.prod(shape) for shape in SHAPES.values()]
    assert {row[5] for row in rows} == {"1.0"} and sum(sent) == optimizer.bytes_per_step()


def test_one_worker_and_no_exchange(mirrored):
    lines = []
    alone = build_optimizer(tf.distribute.get_strategy(), keras.Variable, keras.optimizers.SGD(0.1))
    alone.summary(print_fn=lines.append)
    assert any("1 worker: nothing is sent" in line for line in lines)
    none = build_optimizer(mirrored(2), keras.Variable, keras.optimizers.SGD(0.1), rs.NoExchange())
    none.summary(print_fn=lines.append)
    assert any(" inf " in line for line in lines)


def test_errors():
    optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.TopK())
    with pytest.raises(RuntimeError, match=r"optimizer\.build"):
        optimizer.summary()
    with pytest.raises(ValueError, match="`print_fn` must be a function.*print_fn=3"):
        optimizer.summary(print_fn=3)
