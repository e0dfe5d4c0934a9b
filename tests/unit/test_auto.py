"""`Auto.decide` as a pure function of measurements, without a cluster or a clock."""

import keras
import pytest
import tf_keras

import tf_redsync as rs
from tests.loops import loop
from tf_redsync.auto import cost
from tf_redsync.auto.candidates import names
from tf_redsync.auto.decision import Measured
from tf_redsync.exchange.layout import TensorSpec
from tf_redsync.keras import accuracy

P = 4
SPECS = [
    TensorSpec("a/kernel", (1000, 500), position=0),
    TensorSpec("a/bias", (500,), position=1),
    TensorSpec("b/kernel", (500, 200), position=2),
]
REDSYNC = rs.RedSync(density=0.01)
AUTO = rs.Auto(candidates=(REDSYNC, rs.ACPSGD()))
ONE_BUCKET = 1 << 30


def measurements(rate=1e6, latency=0.0, work=cost.NO_WORK, workers=P):
    return Measured(workers, cost.Link.of(rate, latency), {REDSYNC: work, rs.ACPSGD(): work})


def chosen_methods(decision, specs=SPECS):
    return [type(a.method).__name__ for a in decision.assign(specs)]


def test_slow_links_compress_and_fast_links_do_not():
    busy = cost.Work(fixed=0.3)
    slow = AUTO.decide(SPECS, measurements(1e6, work=busy), ONE_BUCKET)
    fast = AUTO.decide(SPECS, measurements(1e10, work=busy), ONE_BUCKET)
    assert chosen_methods(slow) == ["ACPSGD", "Dense", "ACPSGD"]
    assert chosen_methods(fast) == ["Dense"] * 3
    assert slow.trial_steps == AUTO.trial_steps > 0 and fast.trial_steps == 0


@pytest.mark.parametrize(("part", "steps"), [(0.04, 0), (0.06, 5)])
def test_certain_predictions_need_no_trial(part, steps):
    free, dense = cost.Line(0.0, float("inf")), cost.Line(0.0, 1e6)
    work = {REDSYNC: cost.Work(fixed=part * 1.5 * 4 * 500_000 / 1e6)}
    measured = Measured(P, cost.Link(free, dense, free), work)
    decision = rs.Auto(candidates=(REDSYNC,)).decide(SPECS[:1], measured, ONE_BUCKET)
    assert chosen_methods(decision, SPECS[:1]) == ["RedSync"]
    assert decision.trial_steps == steps
    assert ("no trial: predicted 4.0% of" in str(decision)) == (steps == 0)


@pytest.mark.parametrize(
    ("candidates", "budget"),
    [
        ((REDSYNC, rs.ACPSGD(), REDSYNC), {}),
        ((rs.Dense(), rs.LocalSGD(steps=4)), {"max_overhead": 0.1, "step_seconds": 1.0}),
    ],
    ids=["a method twice", "the all-reduce"],
)
def test_repeated_candidates_count_once(candidates, budget):
    auto = rs.Auto(candidates=candidates, **budget)
    assert auto.methods == tuple(dict.fromkeys((rs.Dense(), *candidates)))
    decision = auto.decide(SPECS, measurements(), ONE_BUCKET)
    assert str(decision).splitlines()[1].count(" ms") == len(auto.methods)


def test_cheapest_candidate_is_chosen():
    slow_factors = {REDSYNC: cost.NO_WORK, rs.ACPSGD(): cost.Work(fixed=100.0)}
    decision = AUTO.decide(SPECS, Measured(P, cost.Link.of(1e6, 0.0), slow_factors), ONE_BUCKET)
    assert chosen_methods(decision) == ["RedSync", "Dense", "RedSync"]
    (choice,) = decision.choices
    dense, redsync, factors = choice.seconds
    assert dense == pytest.approx(1.5 * 4 * (500_000 + 500 + 100_000) / 1e6)
    assert redsync < dense < 100 < factors


@pytest.mark.parametrize(("part", "expected"), [(0.99, "RedSync"), (1.01, "Dense")])
def test_candidate_must_be_clearly_faster(part, expected):
    """Where only the all-reduce's bytes cost time, computation decides."""
    free, dense = cost.Line(0.0, float("inf")), cost.Line(0.0, 1e6)
    specs = [SPECS[0]]  # no tensor that RedSync would send densely
    all_reduce = 1.5 * 4 * 500_000 / 1e6
    work = {REDSYNC: cost.Work(fixed=part * 0.9 * all_reduce)}
    auto = rs.Auto(candidates=(REDSYNC,))
    found = auto.decide(specs, Measured(P, cost.Link(free, dense, free), work), ONE_BUCKET)
    assert type(found.choices[0].method).__name__ == expected


@pytest.mark.parametrize(("saved", "expected"), [(1.01, "RedSync"), (0.99, "Dense")])
def test_saving_must_exceed_measurement_error(saved, expected):
    """A faster candidate is rejected if the difference is within the measurement error."""
    worthwhile = 5e-4 + 3e-5  # seconds: fixed, and for the one tensor
    free, dense = cost.Line(0.0, float("inf")), cost.Line(saved * worthwhile / 6, 1e99)
    auto = rs.Auto(candidates=(REDSYNC,))
    found = auto.decide(SPECS[:1], Measured(P, cost.Link(free, dense, free), {}), ONE_BUCKET)
    assert type(found.choices[0].method).__name__ == expected


@pytest.mark.parametrize(("tensors", "expected"), [(1, "CodedTopK"), (200, "Dense")])
def test_many_small_tensors_stay_dense(tensors, expected):
    """For many small tensors, such as ResNet50's norms, the ops cost more than they save."""
    specs = [TensorSpec(f"v{i}", (200_000 // tensors,), i) for i in range(tensors)]
    free, dense = cost.Line(0.0, float("inf")), cost.Line(0.003 / 6, 1e99)
    auto = rs.Auto(candidates=(rs.CodedTopK(),))
    found = auto.decide(specs, Measured(P, cost.Link(free, dense, free), {}), ONE_BUCKET)
    assert type(found.choices[0].method).__name__ == expected


def test_each_bucket_is_decided_separately():
    """The fixed cost of a bucket keeps the small one dense."""
    work = cost.Work(fixed=0.7)  # between 0.6 s and 3 s of all-reduce
    decision = AUTO.decide(SPECS, measurements(1e6, work=work), 400_000)
    assert [[s.name for s in c.specs] for c in decision.choices] == [
        ["b/kernel"],
        ["a/kernel"],
        ["a/bias"],
    ]
    assert [type(c.method).__name__ for c in decision.choices] == ["Dense", "ACPSGD", "Dense"]
    assert chosen_methods(decision) == ["ACPSGD", "Dense", "Dense"]


def test_more_workers_make_all_gather_more_expensive():
    auto = rs.Auto(candidates=(REDSYNC,))
    few = auto.decide(SPECS, measurements(workers=4), ONE_BUCKET)
    many = auto.decide(SPECS, measurements(workers=400), ONE_BUCKET)
    assert "RedSync" in chosen_methods(few) and "RedSync" not in chosen_methods(many)


def test_equal_measurements_give_equal_decisions():
    first = AUTO.decide(SPECS, measurements(), ONE_BUCKET)
    second = AUTO.decide(list(SPECS), measurements(), ONE_BUCKET)
    assert first == second and str(first) == str(second)
    assert first != AUTO.decide(SPECS, measurements(2e6), ONE_BUCKET)


def test_table():
    lines = str(AUTO.decide(SPECS, measurements(1e6, 0.001), 400_000)).splitlines()
    assert "4 workers" in lines[0] and "all-to-all 1.00 ms per hop and 1.0 MB/s" in lines[0]
    assert lines[1].split() == [
        *("bucket", "tensors", "elements", "Dense", "ms", "RedSync", "ms", "ACPSGD", "ms"),
        "chosen",
    ]
    rows = [line.split() for line in lines[2:5]]
    assert [row[:3] for row in rows] == [
        ["0", "1", "100,000"],
        ["1", "1", "500,000"],
        ["2", "1", "500"],
    ]
    assert rows[0][3] == "606.00"  # 6 hops and 1.5 times 400,000 bytes
    assert [row[-1] for row in rows] == ["ACPSGD", "ACPSGD", "Dense"]


def test_methods_of_one_class_have_distinct_names():
    diloco = [rs.DiLoCo(steps=steps) for steps in (15, 50)]
    factors = rs.BlockQuantized(method=rs.PowerSGD(), bits=4)
    assert names((*rs.Auto().methods, *diloco, factors)) == [
        *("Dense", "CodedTopK", "PowerSGD"),
        *("BlockQuantized(bits=4)", "BlockQuantized(bits=8)", "HalfPrecision"),
        *("DiLoCo(steps=15)", "DiLoCo(steps=50)", "BlockQuantized(method=PowerSGD, bits=4)"),
    ]
    assert names((rs.BlockQuantized(),)) == ["BlockQuantized"]
    decision = rs.Auto().decide(SPECS, measurements(1e6), ONE_BUCKET)
    header, *rows = str(decision).splitlines()[1:]
    assert all(f"{name} ms" in header for name in names(rs.Auto().methods))
    assert any(row.endswith(f"  {name}") for row in rows for name in ("PowerSGD", "CodedTopK"))


def test_nothing_to_decide_is_dense():
    decision = AUTO.decide([], measurements(), ONE_BUCKET)
    assert decision.choices == () and decision.assign([]) == [] and decision.trial_steps == 0
    assert "4 workers" in str(decision)


@pytest.mark.parametrize("options", [{}, {"max_overhead": 0.1, "step_seconds": 1.0}])
@pytest.mark.parametrize(("workers", "text"), [(1, "1 worker:"), (3, "3 workers:")])
def test_no_predictions_without_measurements(workers, text, options):
    """A table of 0 ms for one worker would look like a prediction."""
    unmeasured = Measured(workers, cost.Link.of(float("inf"), 0.0), {})
    decision = rs.Auto(**options).decide(SPECS, unmeasured, ONE_BUCKET)
    assert {a.method for a in decision.assign(SPECS)} == {rs.Dense()}
    assert {a.reason for a in decision.assign(SPECS)} == {"dense without measurements"}
    (line,) = str(decision).splitlines()
    assert text in line and "inf" not in line and "predicted" not in line


def test_output_layer_is_never_quantized():
    quantized = rs.RedSync(density=0.01, dense_below=0, quantized=True)
    auto = rs.Auto(candidates=(quantized,))
    decision = auto.decide(SPECS, Measured(P, cost.Link.of(1e6, 0.0), {}), ONE_BUCKET)
    hidden, _, output = decision.assign(SPECS)
    assert quantized.describe(hidden.spec).endswith("one mean")
    assert quantized.describe(output.spec) == "trimmed"


LOCAL = (rs.LocalSGD(steps=10), rs.LocalSGD(steps=100), rs.DiLoCo(steps=1000))


@pytest.mark.parametrize(("most", "place"), [(4.0, 0), (3.0, 1), (0.1, 2), (0.004, 3)])
def test_budget_selects_the_first_candidate_that_fits(most, place):
    """The all-reduce takes 1.5 x 4 x 600,500 bytes / 1 MB/s = 3.603 s, of a step of one second."""
    auto = rs.Auto(candidates=LOCAL, max_overhead=most, step_seconds=1.0)
    decision = auto.decide(SPECS, measurements(), 400_000)
    assert len(decision.choices) == 3
    assert {a.method for a in decision.assign(SPECS)} == {(rs.Dense(), *LOCAL)[place]}
    assert decision.trial_steps == 0
    assert f"of at most {1e3 * most:.4g} ms" in str(decision).splitlines()[-1]
    totals = [sum(times) for times in zip(*(c.seconds for c in decision.choices), strict=True)]
    assert totals == pytest.approx([3.603, 0.3603, 0.03603, 0.003603])


def test_budget_that_no_candidate_fits():
    auto = rs.Auto(candidates=LOCAL[:2], max_overhead=0.01, step_seconds=1.0)
    decision = auto.decide(SPECS, measurements(), ONE_BUCKET)
    assert {a.method for a in decision.assign(SPECS)} == {LOCAL[1]}
    assert "no method fits 10 ms" in str(decision)
    assert decision.assign(SPECS)[0].reason == "the fastest: none fits the budget"


def test_default_candidates_of_a_budget():
    """Candidates range from exact to small, without warm-ups and votes."""
    auto = rs.Auto(max_overhead=0.1, step_seconds=1.0)
    names = [type(m).__name__ for m in auto.methods]
    assert names[0] == "Dense" and names[-1] == "SparseLoCo" and "DiLoCo" in names
    assert not {"OneBitAdam", "DeMo"} & set(names)
    sparser = rs.Auto(max_overhead=0.1, step_seconds=1.0, density=0.001)
    assert sparser.methods == tuple(
        rs.CodedTopK(density=0.001, value_bits=4) if isinstance(m, rs.CodedTopK) else m
        for m in auto.methods
    )
    kept = auto.suited(lambda m: "late" if isinstance(m, rs.CodedTopK) else None)
    assert [type(m).__name__ for m in kept.methods] == [n for n in names if n != "CodedTopK"]


def test_candidates_share_the_momentum():
    with pytest.raises(ValueError, match=r"momentum=0.0 in Auto, and 0.9 in DGC. Use Auto\("):
        rs.Auto(candidates=(rs.DGC(momentum=0.9),))
    assert rs.Auto(candidates=(rs.DGC(momentum=0.9),), momentum=0.9).methods[1].momentum == 0.9


@loop(
    ("inner", "auto", "told"),
    [
        (
            keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
            rs.Auto(),
            {"CodedTopK": ["momentum=0.9", "SGD(momentum=0.0) with Auto(momentum=0.9)"]},
        ),
        (
            tf_keras.optimizers.RMSprop(0.1, momentum=0.5),
            rs.Auto(),
            {"CodedTopK": ["momentum=0.5", "use RMSprop(momentum=0.0)"]},
        ),
        (
            keras.optimizers.AdamW(1e-3),
            rs.Auto(),
            {
                "CodedTopK": ["beta_1=0.9", "use AdamW(beta_1=0.0)"],
                "PowerSGD": ["AdamW", "beta_1=0.0", "CodedTopK"],
            },
        ),
        (
            keras.optimizers.Adam(1e-3, beta_1=0.0, beta_2=0.9),
            rs.Auto(),
            {
                "CodedTopK": ["second moment", "AMSGrad"],
                "PowerSGD": ["low rank"],
            },
        ),
        (
            keras.optimizers.SGD(0.1),
            rs.Auto(momentum=0.9),
            {
                "PowerSGD": [
                    *("BlockQuantized(bits=4)", "BlockQuantized(bits=8)", "HalfPrecision"),
                    *("no momentum", "Auto()"),
                ]
            },
        ),
        (
            keras.optimizers.SGD(0.1, momentum=0.9),
            rs.Auto(max_overhead=0.1, step_seconds=0.1),
            {"CodedTopK": ["momentum=0.9"]},
        ),
        (keras.optimizers.SGD(0.1), rs.Auto(), {}),
        (keras.optimizers.SGD(0.1, momentum=0.9), AUTO, {}),
    ],
)
def test_table_lists_excluded_methods(inner, auto, told):
    """The table also shows their time on the network, and thus the possible gain."""
    suited = accuracy.suited(inner, auto, lambda text: None)
    decision = suited.decide(SPECS, measurements(1e6), ONE_BUCKET)
    lines = [x for x in str(decision).splitlines() if x.startswith("left out: ")]
    assert len(lines) == len(told)
    for line, (name, words) in zip(lines, told.items(), strict=True):
        assert line.startswith(f"left out: {name}, ") and "ms on the network alone" in line
        assert all(word in line for word in words)
    assert not set(names(suited.methods)) & set(told) or auto.candidates
    again = rs.methods.from_config(rs.methods.serialize(suited))
    assert again == suited  # not part of the table


@loop(
    ("inner", "momentum"),
    [
        (keras.optimizers.SGD(0.1, momentum=0.9), 0.9),
        (tf_keras.optimizers.SGD(0.1, momentum=0.5, weight_decay=0.1), 0.5),
        (tf_keras.optimizers.SGD(0.1, momentum=0.5, clipnorm=1.0), 0.0),
        (keras.optimizers.SGD(0.1, momentum=0.5, clipnorm=1.0), 0.5),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), 0.9),
        (keras.optimizers.SGD(0.1), 0.0),
        (keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), 0.0),
        (keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2), 0.0),
        (keras.optimizers.RMSprop(0.1, momentum=0.9), 0.0),
        (tf_keras.optimizers.legacy.SGD(0.1, momentum=0.9), 0.0),
        (type("SGD", (keras.optimizers.SGD,), {"__module__": "mine"})(0.1, momentum=0.9), 0.0),
    ],
)
def test_momentum_may_move_into_the_exchange(inner, momentum):
    """The whole model's time decides where plain SGD's momentum is applied; the default is SGD."""
    suited = accuracy.suited(inner, rs.Auto(), lambda text: None)
    assert suited.movable == pytest.approx(momentum)
    others = [m for m in rs.Auto().methods if isinstance(m, (rs.PowerSGD, rs.BlockQuantized))]
    # otherwise one candidate would win in both cases
    work = dict.fromkeys(others, cost.Work(fixed=10.0))
    fast, slow = (
        suited.decide(SPECS, Measured(P, cost.Link.of(rate, 0.0), work), ONE_BUCKET)
        for rate in (1e10, 1e6)
    )
    assert {a.method for a in fast.assign(SPECS)} == {rs.Dense()}
    exchanged = {a.method.traits.momentum_in_exchange for a in slow.assign(SPECS)}
    assert list(exchanged) == pytest.approx([momentum])
    if momentum:
        assert "not chosen: momentum=" in str(fast)
        assert "is applied in the exchange" in str(slow) and "CodedGMC ms" in str(slow)
        assert rs.CodedGMC(density=0.03, momentum=momentum) in suited.considered
    # the user's own candidates
    assert accuracy.suited(inner, AUTO, lambda text: None).movable == 0.0


def test_predicted_gain_of_the_advice():
    """The predicted time of an excluded method ignores its computation."""
    sgd = keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)
    (line,) = (
        accuracy.suited(sgd, rs.Auto(), lambda text: None)
        .decide(SPECS, measurements(1e6), ONE_BUCKET)
        .left_out
    )
    considered = rs.Auto().decide(SPECS, measurements(1e6), ONE_BUCKET)
    (choice,) = considered.choices
    seconds = dict(zip(choice.methods, choice.seconds, strict=True))[rs.Auto().methods[1]]
    assert f"CodedTopK, {1e3 * seconds:.2f} ms" in line
    unmeasured = Measured(1, cost.Link.of(float("inf"), 0.0), {})
    (line,) = (
        accuracy.suited(sgd, rs.Auto(), lambda text: None)
        .decide(SPECS, unmeasured, ONE_BUCKET)
        .left_out
    )
    assert line.startswith("left out: CodedTopK: ")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_overhead": 0.1}, "must be given together"),
        ({"step_seconds": 0.1}, "must be given together"),
        ({"max_overhead": 0.0, "step_seconds": 1.0}, "`max_overhead` must be in (0, inf)"),
        ({"max_overhead": 0.1, "step_seconds": -1.0}, "`step_seconds` must be in (0, inf)"),
        ({"max_overhead": 10, "step_seconds": 1.0}, "`max_overhead` must be at most 5"),
        ({"max_overhead": 0.1, "step_seconds": 1.0, "momentum": 0.9}, "`momentum` must be 0"),
        (
            {"max_overhead": 0.1, "step_seconds": 1.0, "candidates": (rs.contrib.OneBitAdam(),)},
            "without warm-up or phases",
        ),
        (
            {"max_overhead": 0.1, "step_seconds": 1.0, "candidates": (rs.contrib.ZeroOneAdam(),)},
            "without warm-up or phases",
        ),
        (  # only `Policy` defines a fragment's tensors
            {
                "max_overhead": 0.1,
                "step_seconds": 1.0,
                "candidates": (rs.StreamingDiLoCo(overlap=0, mixing=0.0),),
            },
            "constant number of local steps",
        ),
        (  # the workers would train independently
            {"max_overhead": 0.1, "step_seconds": 1.0, "candidates": (rs.NoExchange(),)},
            "Received: NoExchange() in candidates",
        ),
        *(  # the all-reduce would train without momentum, or at the learning rate of votes
            (
                {"max_overhead": 0.1, "step_seconds": 1.0, "candidates": (method,)},
                "must apply no momentum and send no votes",
            )
            for method in (rs.DGC(), rs.CodedGMC(), rs.DeMo(), rs.SignSGD())
        ),
        ({"candidates": (rs.LocalSGD(),)}, "must exchange gradients in every step"),
    ],
)
def test_bad_budgets(options, text):
    with pytest.raises(ValueError) as caught:
        rs.Auto(**options)
    assert text in str(caught.value)
