"""Python blocks of the pages in docs/ run unchanged, on two workers.

A comment above a block selects how it runs: `<!-- run -->`, after the other blocks of its page and
with the names that a how-to page presupposes (`Given`); `<!-- run: two workers -->`, as a separate
script; `<!-- run: after X -->`, as `<!-- run -->`, in a namespace of its own; `<!-- not run: reason
-->`. The new side of a diff runs, and with `<!-- run: both sides of X -->` the old one too. Other
blocks are fragments: test_readme.py checks that their names and arguments exist.
"""

import ast
import re
from pathlib import Path

import pytest

from tests.deep import DEEP
from tests.distributed.cluster import run_workers

SHORT = ("first-script.md", "custom-loops.md")  # `--deep` runs the other pages
ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(
    r"^<!-- (run|not run)(?:: ([^>]*))? -->\n```(python|diff)\n(.*?)^```$", re.M | re.S
)


def marked():
    """Page, kind, and text of each block that is marked to run."""
    found = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        for mark, kind, language, text in _BLOCK.findall(path.read_text(encoding="utf-8")):
            if mark == "run" and kind.startswith("both"):
                found.append((path.name, f"before {kind}", side(text, "-")))
            if mark == "run":
                found.append((path.name, kind, side(text, "+") if language == "diff" else text))
    return found


def side(diff, sign):
    """The old (-) or the new (+) script of a diff."""
    lines = (line for line in diff.splitlines() if line[:1] in ("", " ", sign))
    return "".join(f"{line[1:]}\n" for line in lines)


def test_marks_are_valid():
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    marks = re.findall(r"^<!-- (?:not )?run\b.*$", text, flags=re.M)
    assert len(marks) == len(_BLOCK.findall(text)) >= 15
    kinds = {kind.partition(" ")[0] for _, kind, _ in marked()}
    assert kinds == {"", "two", "after", "before", "both"}


def test_both_sides_of_a_diff_are_python():
    text = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    diffs = [block for *_, language, block in _BLOCK.findall(text) if language == "diff"]
    assert len(diffs) == 4
    for diff in diffs:
        ast.parse(side(diff, "-"))
        ast.parse(side(diff, "+"))


class Given(dict):
    """Names that a page presupposes, created when a block first uses them."""

    def __init__(self, strategy):
        import keras
        import tensorflow as tf

        import tf_redsync as rs

        super().__init__(strategy=strategy, keras=keras, tf=tf, rs=rs, build_model=self.build)

    def build(self):
        keras = self["keras"]
        hidden = keras.layers.Dense(64, "relu")
        return keras.Sequential(
            [keras.Input([16]), hidden, keras.layers.Dense(3, "softmax", dtype="float32")]
        )

    def __missing__(self, name):
        if name not in ("dataset", "train", "data"):
            raise KeyError(name)
        import numpy as np

        x = np.random.default_rng(0).normal(size=[64, 16]).astype("float32")
        rows = self["tf"].data.Dataset.from_tensor_slices((x, x[:, :3].argmax(-1)))
        return rows.batch(32) if name == "dataset" else rows


def run_pages(blocks):
    """Run the blocks: the script first, since it creates the strategy."""
    import os
    import tempfile

    import numpy as np

    os.chdir(tempfile.mkdtemp())  # for files that they save
    blocks = sorted(blocks, key=lambda block: block[1] != "two workers")
    script = {}
    exec(blocks[0][2].replace("epochs=5", "epochs=1"), script)
    strategy, optimizer, train = (script[name] for name in ("strategy", "optimizer", "train"))
    of_a_worker = strategy.experimental_local_results
    batches = strategy.experimental_distribute_dataset(train)
    rows = [np.asarray(of_a_worker(images)[0]) for images, _ in batches]
    found = {
        "rank": script["rank"],
        "workers": script["workers"],
        "saved": os.path.exists("digits.keras"),
        "checkpoint": bool(os.listdir("digits_run")),
        "sizes": np.array([len(batch) for batch in rows]),
        "rows": np.concatenate(rows),
        "all": script["images"][:1500],
        "sent": float(optimizer.bytes_per_step()),
        "accuracy": script["model"].history.history["accuracy"][0],
    }
    import tf_redsync as rs

    rs.MultiWorkerMirroredStrategy = lambda: strategy  # a process has only one
    spaces = {}
    for page, kind, text in blocks[1:]:
        names = spaces.setdefault((page, kind), Given(strategy))
        try:
            exec(text.replace("epochs=10", "epochs=1"), names)
        except Exception as error:
            raise AssertionError(f"{page}: {error}:\n{text}") from error
    return {**found, "ran": len(blocks)}


@pytest.mark.distributed
def test_blocks_run_and_first_script_matches_its_page():
    blocks = [block for block in marked() if DEEP or block[0] in SHORT]
    workers = run_workers(run_pages, args=(blocks,), timeout=250)
    for rank, worker in enumerate(workers):
        assert worker["ran"] == len(blocks)
        assert (worker["rank"], worker["workers"]) == (rank, 2)
        # "The batch is global": 64, half for each worker; the last one is shorter.
        assert set(worker["sizes"][:-1]) == {32}
        assert worker["saved"] == (rank == 0) and worker["checkpoint"]
        assert 0 < worker["sent"] < 40_000 < 4 * 150_000
    # "Sharding": the workers together see every example once.
    seen = [row.tobytes() for worker in workers for row in worker["rows"]]
    assert sorted(seen) == sorted(row.tobytes() for row in workers[0]["all"])
    assert workers[0]["accuracy"] == workers[1]["accuracy"]
