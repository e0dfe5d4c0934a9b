"""methods/frontier.py: two contenders and few steps; what is undominated; bad arguments."""

import numpy as np
import pytest

from benchmarks.methods import frontier


def test_rows_and_picture(tmp_path, capsys):
    flags = ["--only", "Dense", "--only", "TopK", "--steps", "4", "--seeds", "2"]
    args = frontier.parse([*flags, "--workers", "2"])
    rows = frontier.run(args)
    assert [row["name"] for row in rows] == ["Dense"] + len(frontier.DENSITIES) * ["TopK"]
    assert "6/6 TopK 10.0%" in capsys.readouterr().out
    bits = [row["bits"] for row in rows[1:]]
    assert bits == sorted(bits) and len(set(bits)) == len(bits) and bits[-1] < rows[0]["bits"] == 32
    assert all(0 < row["loss"] < np.log(10) + 0.2 for row in rows)
    frontier.plot(rows, str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_undominated():
    points = [(1.0, 1.0), (0.5, 2.0), (2.0, 0.5), (2.0, 2.0), (1.0, 1.5)]
    rows = [
        {"bits": b, "loss": p, "name": "x", "setting": "", "accuracy": 0.5, "sent_bytes": 1.0}
        for b, p in points
    ]
    # Equal bits do not make one better in both.
    assert frontier.undominated(rows) == [True, True, True, False, True]
    assert [line.endswith("*") for line in frontier.table(rows).splitlines()[1:]] == (
        frontier.undominated(rows)
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--only", "Nothing"], "invalid choice: 'Nothing'"),
        (["--seeds", "0"], "`--seeds` must be at least 1. Received: --seeds=0"),
    ],
)
def test_bad_arguments(flags, words, capsys):
    with pytest.raises(SystemExit):
        frontier.parse(flags)
    assert words in capsys.readouterr().err
