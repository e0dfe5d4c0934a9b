"""What `Auto` measures of a method on this device."""

import pytest

import tf_redsync as rs
from tf_redsync.auto import probe


@pytest.mark.parametrize(
    ("method", "sparse_totals", "saves"),
    [
        (rs.CodedTopK(density=0.03), True, True),
        (rs.CodedTopK(density=0.03), False, False),
        (rs.PowerSGD(rank=4), True, False),  # its totals are dense
        (rs.CodedTopK(density=0.03, steps=4), True, False),  # exchanges changes, not gradients
    ],
    ids=["coordinates", "dense totals", "low rank", "local steps"],
)
def test_an_update_at_coordinates_saves_that_of_all_weights(
    monkeypatch, method, sparse_totals, saves
):
    """A saving of a second for each matrix leaves nothing of what the exchange takes."""
    measured = []

    def update_seconds(shape, repeats):
        measured.append(shape)
        return 1.0 * shape[0] * shape[1]

    monkeypatch.setattr(probe, "_update_seconds", update_seconds)
    work = probe.work(method, (2,), sparse_totals)
    assert measured == ([probe.SMALL_SHAPE, probe.LARGE_SHAPE] if saves else [])
    assert (work.seconds(2**20, 2) == 0.0) == saves


def test_an_update_takes_time():
    assert 0.0 < probe._update_seconds(probe.SMALL_SHAPE, 3) < 1.0
