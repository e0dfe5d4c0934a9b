"""The method of each variable, and the table that shows it."""

import json
import re

import pytest

import tf_redsync as rs
from tests.loops import loop
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.explanation import Explanation, Row, dense_bytes
from tf_redsync.methods import from_config, serialize

SPECS = [
    TensorSpec("embedding/table", (1000, 64), position=0),
    TensorSpec("dense/kernel", (64, 512), position=1),
    TensorSpec("dense/bias", (512,), position=2),
    TensorSpec("norm/gamma", (100_000,), position=3),
    TensorSpec("scale", (), position=4),
    TensorSpec("out/kernel", (512, 10), position=5),
    TensorSpec("out/bias", (10,), position=6),
]


def methods(policy):
    return {a.spec.name: a.method for a in policy.assign(SPECS)}


def reasons(policy):
    return {a.spec.name: a.reason for a in policy.assign(SPECS)}


def test_default_method_and_its_exclusions():
    sparse = rs.RedSync(momentum=0.9, nesterov=True)
    policy = rs.Policy(default=sparse)
    found = methods(policy)
    dense = rs.Dense(momentum=0.9, nesterov=True)  # the same momentum for every parameter
    for name in ("dense/bias", "norm/gamma", "scale", "out/kernel", "out/bias"):
        assert found[name] == dense
    assert found["embedding/table"] == found["dense/kernel"] == sparse
    why = reasons(policy)
    assert why["norm/gamma"] == "rank 1 (bias, norm)" and why["scale"] == "rank 0 (bias, norm)"
    assert why["out/kernel"] == "20480 bytes < dense_below"
    assert why["dense/kernel"] == "default"


@pytest.mark.parametrize(("elements", "sparse"), [(32767, False), (32768, True)])
def test_dense_below_is_in_bytes(elements, sparse):
    (assignment,) = rs.Policy(default=rs.RedSync()).assign([TensorSpec("v", (elements, 1))])
    assert isinstance(assignment.method, rs.RedSync) == sparse


def test_first_matching_rule_applies():
    first, second = rs.RedSync(density=0.5), rs.Dense()
    policy = rs.Policy(
        default=rs.NoExchange(),
        rules=(rs.Rule(pattern="embed", method=first), rs.Rule(pattern="e", method=second)),
    )
    found = methods(policy)
    assert found["embedding/table"] == first
    assert found["dense/kernel"] == second
    assert found["norm/gamma"] == rs.NoExchange()
    assert reasons(policy)["dense/kernel"] == "rule 'e'"
    assert policy.methods == (rs.NoExchange(), first, second)


def test_rule_cannot_force_an_unsupported_tensor():
    policy = rs.Policy(
        default=rs.Dense(momentum=0.5),
        rules=(rs.Rule(pattern="bias", method=rs.RedSync(momentum=0.5)),),
    )
    assert methods(policy)["dense/bias"] == rs.Dense(momentum=0.5)
    assert reasons(policy)["dense/bias"] == "rank 1 (bias, norm)"


def marked_names(policy, specs=SPECS):
    return [s.name for s in policy.mark_output_layer(specs) if s.output_layer]


def test_output_layer():
    method = rs.RedSync(quantized=True)
    assert marked_names(rs.Policy(default=method)) == ["out/kernel"]
    assert marked_names(rs.Policy(default=method, output_layer="embedding")) == ["embedding/table"]
    assert marked_names(rs.Policy(default=method, output_layer="kernel$")) == [
        "dense/kernel",
        "out/kernel",
    ]
    assert marked_names(rs.Policy(default=method), SPECS[2:5]) == []
    assert marked_names(rs.Policy(default=method), []) == []


LOST = rs.Rule(pattern="^bias", method=rs.Dense())


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("output_layer", rs.Policy(default=rs.RedSync(), output_layer="outt/")),
        ("pattern", rs.Policy(default=rs.Dense(), rules=(LOST,))),
    ],
)
def test_unmatched_pattern_raises(name, policy):
    with pytest.raises(ValueError, match=f"`{name}` of the policy matches none") as error:
        policy.assign(SPECS)
    assert f"Received: {name}=" in str(error.value) and "out/kernel" in str(error.value)


def test_rule_behind_a_wider_one_raises():
    wide, narrow = (rs.Rule(pattern=p, method=rs.Dense()) for p in ("dense", "dense/kernel"))
    rs.Policy(default=rs.TopK(), rules=(narrow, wide)).assign(SPECS)
    with pytest.raises(ValueError, match="earlier rules.*Received: pattern='dense/kernel'"):
        rs.Policy(default=rs.TopK(), rules=(wide, narrow)).assign(SPECS)


def test_output_layer_is_not_quantized():
    policy = rs.Policy(default=rs.RedSync(quantized=True, dense_below=0))
    how = {a.spec.name: a.method.describe(a.spec) for a in policy.assign(SPECS)}
    assert how["dense/kernel"] == "trimmed, one mean"
    assert how["out/kernel"] == "trimmed"


def test_config_round_trip():
    policy = rs.Policy(
        default=rs.RedSync(density=0.01, warm_up=rs.ExponentialWarmUp(2, (0.5, 0.1))),
        rules=(rs.Rule(pattern="a|b", method=rs.Dense()),),
        output_layer="head",
    )
    assert from_config(json.loads(json.dumps(serialize(policy)))) == policy


@pytest.mark.parametrize(
    "made",
    [
        rs.Policy(default=rs.TopK(), rules=[rs.Rule(pattern="a", method=rs.Dense())]),
        rs.Auto(candidates=[rs.TopK()]),
    ],
)
def test_lists_are_converted_to_tuples(made):
    again = from_config(json.loads(json.dumps(serialize(made))))
    assert again == made and hash(again) == hash(made)


@loop(
    ("make", "words"),
    [
        (lambda: rs.Policy(default="redsync"), ["`default`", "'redsync'"]),
        (lambda: rs.Policy(default=rs.RedSync), ["`default`", "RedSync"]),
        (lambda: rs.Rule(pattern="(", method=rs.Dense()), ["`pattern`", "pattern='('"]),
        (lambda: rs.Rule(pattern=None, method=rs.Dense()), ["`pattern`", "pattern=None"]),
        (lambda: rs.Rule(pattern=re.compile("a"), method=rs.Dense()), ["`pattern`", "a text"]),
        (lambda: rs.Rule(pattern=b"a", method=rs.Dense()), ["`pattern`", "pattern=b'a'"]),
        (lambda: rs.Rule(pattern="a", method=0.1), ["`method`", "method=0.1"]),
        (lambda: rs.Policy(default=rs.Dense(), output_layer="["), ["`output_layer`", "'['"]),
        (lambda: rs.Policy(default=rs.Dense(), rules=(rs.Dense(),)), ["`rules`", "Dense("]),
        (
            lambda: rs.Policy(default=rs.Dense(), rules=rs.Rule(pattern="x", method=rs.Dense())),
            ["`rules` must be a tuple", "rules=Rule("],
        ),
        (lambda: rs.Auto(candidates=rs.TopK()), ["`candidates` must be a tuple", "TopK("]),
        (lambda: rs.BitBudget(bits=1.0, candidates=rs.TopK), ["must be a tuple", "It is a class"]),
        (
            lambda: rs.Policy(
                default=rs.Dense(), rules=(rs.Rule(pattern="x", method=rs.RedSync(clip_norm=2.0)),)
            ),
            ["`clip_norm`", "clip_norm=2.0", "'x'"],
        ),
        (
            lambda: rs.Auto(candidates=(rs.RedSync(clip_norm=2.0),)),
            ["`clip_norm`", "clip_norm=2.0 in RedSync(", "clip_norm=None in the default Dense("],
        ),
        (
            lambda: rs.Auto(
                candidates=(rs.Coded(method=rs.TopK()), rs.Coded(method=rs.RedSync(clip_norm=2.0))),
                max_overhead=0.1,
                step_seconds=1.0,
            ),
            ["`clip_norm`", "clip_norm=2.0 in Coded("],
        ),
        (
            lambda: rs.BitBudget(
                default=rs.RedSync(clip_norm=1.0), candidates=(rs.RedSync(clip_norm=2.0),)
            ),
            ["`clip_norm`", "clip_norm=2.0 in RedSync(", "clip_norm=1.0 in the default"],
        ),
        (
            lambda: rs.Policy(
                default=rs.RedSync(momentum=0.9),
                rules=(rs.Rule(pattern="x", method=rs.Dense()),),
            ),
            ["the same momentum", "RedSync 0.9, Dense 0.0"],
        ),
        (
            lambda: rs.Policy(
                default=rs.LocalSGD(steps=4),
                rules=(rs.Rule(pattern="x", method=rs.contrib.ZeroOneAdam(start=2, steps=4)),),
            ),
            ["the same growing intervals", "LocalSGD None", "ZeroOneAdam Intervals("],
        ),
        (
            lambda: rs.Policy(
                default=rs.RedSync(warm_up=rs.DenseWarmUp(3)),
                rules=(rs.Rule(pattern="x", method=rs.RedSync(warm_up=rs.DenseWarmUp(5))),),
            ),
            ["the same `warm_up_steps`", "[3, 5]"],
        ),
        (
            lambda: rs.Policy(
                default=rs.CDSGD(full_every=3),
                rules=(rs.Rule(pattern="x", method=rs.CDSGD(full_every=5)),),
            ),
            ["the same `dense_every`", "[3, 5]"],
        ),
        (  # momentum correction, and a quantizer without a residual to correct
            lambda: rs.Policy(default=rs.DGC(), rules=(rs.Rule(pattern="x", method=rs.QSGD()),)),
            ["the same momentum", "DGC 0.9, QSGD 0.0"],
        ),
    ],
)
def test_bad_input(make, words):
    with pytest.raises(ValueError) as error:
        make()
    for word in [*words, "Received"]:
        assert word in str(error.value)


def test_explanation_prints_a_table():
    rows = (
        Row("a/kernel", (20, 50), 1000, 0, "RedSync", "trimmed", "default"),
        Row("b", (), 1, 1, "Dense", "all-reduce", "rank 0 (bias, norm)"),
    )
    text = str(Explanation(rows, workers=4, dense_bytes=6006.0, bytes_per_step=600.6))
    lines = text.splitlines()
    assert len(lines) == 4
    assert lines[0].split() == ["variable", "shape", "elements", "bucket", "method", "how", "why"]
    assert re.split(" {2,}", lines[1]) == [
        "a/kernel", "(20, 50)", "1,000", "0", "RedSync", "trimmed", "default",
    ]  # fmt: skip
    assert lines[3] == "4 workers, 601 bytes sent per worker and step, dense 6,006, ratio 10.0"
    # Every column starts at the same offset in all lines.
    cells = zip(lines, ["method", "RedSync", "Dense"], strict=False)
    assert len({line.index(cell) for line, cell in cells}) == 1


def test_explanation_of_one_worker_and_of_no_bytes():
    assert "1 worker: nothing is sent" in str(Explanation((), 1, 0.0, 0.0))
    assert "ratio inf" in str(Explanation((), 2, 100.0, 0.0))


def test_dense_bytes():
    specs = [TensorSpec("a", (10, 10)), TensorSpec("b", (3,), "bfloat16")]
    assert dense_bytes(specs, 4) == 2 * 3 / 4 * 4 * 103
    assert dense_bytes(specs, 1) == 0
