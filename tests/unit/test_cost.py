"""The cost model against bytes and times computed by hand."""

import pytest

import tf_redsync as rs
from tf_redsync.auto import cost
from tf_redsync.auto.decision import Measured
from tf_redsync.exchange import traffic
from tf_redsync.exchange.layout import BucketLayout, TensorSpec
from tf_redsync.exchange.requests import AllReduce

P = 4
KERNEL, EMBEDDING = TensorSpec("kernel", (20, 30)), TensorSpec("embedding", (50, 8), position=1)
LAYOUT = BucketLayout((EMBEDDING, KERNEL), P)  # 400 and 600 elements
ELEMENTS = 1000


def sent(method, layout=LAYOUT):
    return [[(m.kind, m.sent) for m in step] for step in traffic.messages(method, layout)]


@pytest.mark.parametrize(
    ("kind", "workers", "expected"),
    [("all_gather", 8, 7), ("all_reduce", 8, 14), ("all_to_all", 8, 1), ("all_reduce", 2, 2)],
)
def test_ring_hops(kind, workers, expected):
    assert cost.hops(kind, workers) == expected


def test_dense_sends_the_gradients_twice_except_its_own_part():
    step = [("all_reduce", 2 * 3 / 4 * 4 * ELEMENTS)]
    assert sent(rs.Dense()) == [step]


@pytest.mark.parametrize(
    ("selection", "slots"),
    [("exact", 4 + 6), ("trimmed", 4 + 6), ("threshold", 4 + 6)],
)
def test_redsync_gathers_flag_counts_indices_and_values(selection, slots):
    method = rs.RedSync(density=0.01, selection=selection, dense_below=0)
    words = 1 + 2 + 2 * slots
    assert sent(method) == [[("all_gather", 3 * 4 * words)]]


def test_quantized_redsync_gathers_one_mean_instead_of_values():
    method = rs.RedSync(density=0.01, selection="exact", dense_below=0, quantized=True)
    words = 1 + 2 * (1 + 1) + 4 + 6
    assert sent(method) == [[("all_gather", 3 * 4 * words)]] * 2  # of positive, of negative values


def test_default_candidates_of_auto_are_counted_without_a_trace(monkeypatch):
    """For a model with many variables, traces would take most of a minute."""
    monkeypatch.setattr(traffic, "dry_run", None)
    for method in (*rs.Auto().methods, *rs.Auto(momentum=0.9).methods):
        assert sent(method), method


def test_subclass_with_its_own_exchange_has_no_inherited_formula():
    class Twice(rs.TopK):
        def exchange(self, grads, state, ctx):
            yield AllReduce(grads)
            return (yield from super().exchange(grads, state, ctx))

    (step,) = sent(Twice(density=0.01))
    assert [kind for kind, _ in step] == ["all_reduce", "all_gather"]


def test_buckets_of_equal_shapes_share_a_trace(monkeypatch):
    traced, run = [], traffic.dry_run

    def counted(method, layout, *args):
        traced.append(layout.specs[0].shape)
        return run(method, layout, *args)

    monkeypatch.setattr(traffic, "dry_run", counted)
    other = TensorSpec("another", KERNEL.shape, position=7)
    for spec in (KERNEL, other, EMBEDDING):
        traffic.messages(rs.GMC(density=0.013), BucketLayout((spec,), P, index=spec.position))
    assert traced == [KERNEL.shape, EMBEDDING.shape]


def test_acp_sgd_alternates_between_factors():
    method = rs.ACPSGD(rank=2, min_compression_rate=0)
    rows, columns = 2 * (8 + 20), 2 * (50 + 30)  # the shorter sides, the longer ones
    found = sorted(step[0][1] for step in sent(method))
    assert found == sorted([2 * 3 / 4 * 4 * rows, 2 * 3 / 4 * 4 * columns])
    assert all(len(step) == 1 and step[0][0] == "all_reduce" for step in sent(method))


def test_power_sgd_reduces_both_factors():
    method = rs.PowerSGD(rank=2, min_compression_rate=0)
    factors = [("all_reduce", 2 * 3 / 4 * 4 * 2 * n) for n in (8 + 20, 50 + 30)]
    assert sent(method) == [factors]


def test_half_precision_sends_blocks_to_owners_and_back():
    block = 1 + 1000 // 8  # a flag; 1,000 numbers, two per word, in four blocks
    step = [("all_to_all", 3 / 4 * 4 * P * block), ("all_gather", 3 * 4 * block)]
    assert sent(rs.HalfPrecision()) == [step]


def test_empty_layout_sends_nothing():
    assert sent(rs.RedSync(), BucketLayout((), P)) == [[]]
    assert cost.exchange_seconds(
        rs.RedSync(), BucketLayout((), P), cost.Link.of(1e6, 1.0), cost.Work(1.0)
    ) == 0.0  # fmt: skip


def test_link_has_a_line_per_kind_of_collective():
    link = cost.Link(
        all_gather=cost.Line(0.001, 1e6),
        all_reduce=cost.Line(0.01, 1e5),
        all_to_all=cost.Line(0.1, 1e4),
    )
    one = [traffic.Message(kind, 1e4) for kind in ("all_gather", "all_reduce", "all_to_all")]
    by_hand = [3 * 0.001 + 0.01, 6 * 0.01 + 0.1, 0.1 + 1.0]
    for message, expected in zip(one, by_hand, strict=True):
        assert link.seconds([message], 4) == pytest.approx(expected)
    assert link.seconds(one, 4) == pytest.approx(sum(by_hand))
    assert link.seconds([], 4) == 0.0


def test_round_trips():
    """The first answer takes one round trip, and each further hop of a ring half of one."""
    link = cost.Link.with_round_trips(1e6, 0.05)
    by_hand = {"all_gather": 0.1, "all_reduce": 0.175, "all_to_all": 0.05, "pair_gather": 0.05}
    for kind, latencies in by_hand.items():
        assert link.seconds([traffic.Message(kind, 1e4)], 4) == pytest.approx(latencies + 0.01)


def test_work_counts_buckets_elements_and_messages():
    assert cost.Work(0.5, 0.001, 0.01).seconds(100, 3) == pytest.approx(0.5 + 0.1 + 3.0)
    assert cost.NO_WORK.seconds(10**9, 10**3) == 0.0


def test_exchange_time_is_transfer_plus_computation():
    link, work = cost.Link.of(rate=1e6, latency=0.002), cost.Work(0.01, 1e-6, 1e-7)
    method = rs.RedSync(density=0.01, selection="exact", dense_below=0)
    network = 3 * 0.002 + 3 * 4 * (1 + 2 + 2 * 10) / 1e6
    computed = 0.01 + 1000 * (1e-6 + 4e-7)
    assert cost.exchange_seconds(method, LAYOUT, link, work) == pytest.approx(network + computed)


def test_alternating_methods_cost_the_mean_of_both_steps():
    method, link = rs.ACPSGD(rank=2, min_compression_rate=0), cost.Link.of(1e6, 0.002)
    mean = 2 * 3 / 4 * 4 * (2 * (50 + 20) + 2 * (8 + 30)) / 2
    found = cost.exchange_seconds(method, LAYOUT, link, cost.NO_WORK)
    assert found == pytest.approx(6 * 0.002 + mean / 1e6)


def test_rejected_tensors_cost_as_dense():
    bias = TensorSpec("bias", (100,), position=2)
    method = rs.RedSync(density=0.01, selection="exact", dense_below=0)
    measured = Measured(P, cost.Link.of(1e6, 0.002), {method: cost.Work(1.0)})
    gather = 3 * 0.002 + 3 * 4 * (1 + 2 + 2 * 10) / 1e6 + 1.0
    reduce = 6 * 0.002 + 2 * 3 / 4 * 400 / 1e6
    assert measured.seconds(method, [KERNEL, EMBEDDING, bias]) == pytest.approx(gather + reduce)
    assert measured.seconds(method, [bias]) == pytest.approx(reduce)
