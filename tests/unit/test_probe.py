"""`Auto`'s measurement of a method on this device."""

import pytest

import tf_redsync as rs
from tf_redsync.auto import probe
from tf_redsync.exchange.context import Context


@pytest.mark.parametrize(
    ("method", "sparse_totals", "saves"),
    [
        (rs.CodedTopK(density=0.03), True, True),
        (rs.CodedTopK(density=0.03), False, False),
        (rs.PowerSGD(rank=4), True, False),  # its totals are dense
    ],
    ids=["sparse totals", "dense totals", "low rank"],
)
def test_sparse_update_saves_the_dense_update(monkeypatch, method, sparse_totals, saves):
    """If it saves a second per matrix, the exchange's own time is fully compensated."""
    measured = []

    def update_seconds(shape):
        measured.append(shape)
        return 1.0 * shape[0] * shape[1]

    monkeypatch.setattr(probe, "_update_seconds", update_seconds)
    work = probe.work(method, (2,), sparse_totals)
    assert measured == ([probe.SMALL_SHAPE, probe.LARGE_SHAPE] if saves else [])
    assert (work.seconds(2**20, 2) == 0.0) == saves


def test_steps_after_the_warm_up_are_measured(monkeypatch):
    """As `traffic` counts bytes after it."""
    method, counts = rs.DGC(density=0.01, warm_up=rs.ExponentialWarmUp(100), dense_below=0), []

    def context(layout, rank, step):
        counts.append(method._k(layout, step))
        return Context(layout, rank, step)

    monkeypatch.setattr(probe, "Context", context)
    monkeypatch.setattr(probe.tf, "function", lambda autograph: lambda function: function)
    probe._exchange_seconds(method, (100, 100), 2, sparse_totals=False)
    assert counts == [[100]] * (2 + probe.REPEATS)


def test_update_takes_time():
    assert 0.0 < probe._update_seconds(probe.SMALL_SHAPE) < 1.0
