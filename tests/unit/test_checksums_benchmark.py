"""benchmarks/step/checksums.py: arithmetic and command line."""

import pytest

from benchmarks.step import checksums


def test_ratios_compare_the_same_round():
    # The machine slows down with each round, which no ratio may show.
    blocks = [{"checked": 1.01 * n, "plain": 1.0 * n, "control": 1.0 * n} for n in range(1, 6)]
    result = checksums.report({"params": 7, "words": [10, 20], "blocks": blocks, "ops": 0.003}, 20)
    assert result["checked"] == pytest.approx([1.0, 1.0, 1.0])
    assert result["control"] == pytest.approx([0.0, 0.0, 0.0])
    assert result["step_ms"] == pytest.approx(150.0) and result["message_bytes"] == 120
    assert result["ops_percent"] == pytest.approx(2.0)


def test_bad_arguments(capsys):
    with pytest.raises(SystemExit):
        checksums.main(["--block", "0"])
    assert "`--block` must be at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        checksums.main(["--rounds", "1"])
    assert "`--rounds` must be at least 2" in capsys.readouterr().err
