"""`Auto`'s measurement of a method on this device."""

import pytest

import tf_redsync as rs
from tf_redsync.auto import probe


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


def test_update_takes_time():
    assert 0.0 < probe._update_seconds(probe.SMALL_SHAPE) < 1.0
