"""Breaks central functions, one small change each, and reports which tests detect it.

    python tools/mutate.py                  # all; some minutes each
    python tools/mutate.py --only drive     # those whose names contain the text
    python tools/mutate.py --list

The package and its tests are copied into a temporary folder; the checkout is not changed. A
mutation that survives is a gap in the tests that a commit runs. One whose text no longer occurs
must be rewritten. Not part of the suite.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("tf_redsync", "tests", "benchmarks", "examples", "tools", "pyproject.toml", "README.md")
LAWS = "tests/conformance/test_laws.py"
ORACLES = "tests/conformance/test_oracles.py"


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A change, and the tests that must detect it.

    Attributes:
        name: Description of the fault.
        file: Path below `tf_redsync`.
        old: Text that occurs once in the file.
        new: Its replacement.
        tests: Arguments of pytest; one of its tests must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "reference top-k: selects one element fewer",
        "ops/reference/selection.py",
        "    values, indices = tf.math.top_k(a, k)\n",
        "    values, indices = tf.math.top_k(a, tf.maximum(k - 1, 0))\n",
        ("tests/unit/test_selection_quality.py", "-k", "select_sweep"),
    ),
    Mutation(
        "reference top-k: sent elements stay in the residual",
        "ops/reference/selection.py",
        "new_v.append(tf.reshape(_zero_at(v, indices), shape))",
        "new_v.append(tf.reshape(v, shape))",
        ("tests/unit/test_selection_quality.py", "-k", "select_sweep"),
    ),
    Mutation(
        "native top-k: returns the old residual",
        "ops/selection.py",
        "    return Selection(made[0], made[1], made[2], made[3], layout)\n",
        "    kept = residuals if runs_natively(grads) else made[1]\n"
        "    return Selection(made[0], kept, made[2], made[3], layout)\n",
        (LAWS, "-k", "conservation and top_k"),
    ),
    Mutation(
        "reference top-k: no momentum masking",
        "ops/reference/selection.py",
        "new_u.append(tf.reshape(_zero_at(flat_u, indices), shape) if masking else u)",
        "new_u.append(u)",
        ("tests/unit/test_selection_quality.py", "-k", "select_sweep"),
    ),
    Mutation(
        "threshold search: narrower accepted band",
        "ops/reference/selection.py",
        "        return 4 * nnz <= 3 * k64\n",
        "        return 4 * nnz <= 2 * k64\n",
        ("tests/unit/test_selection_quality.py", "-k", "select_sweep"),
    ),
    Mutation(
        "momentum correction: Nesterov without its second term",
        "exchange/feedback.py",
        "        return [u + g for u, g in zip(new, grads, strict=True)], new\n",
        "        return list(new), new\n",
        ("tests/unit/test_feedback.py",),
    ),
    Mutation(
        "dense exchange: velocity is not updated",
        "methods/common/momentum_correction.py",
        '        return totals, {**state, "velocity": velocity}\n',
        "        return totals, state\n",
        ("tests/unit/test_gradient_exchange.py", "-k", "oracle and everything"),
    ),
    Mutation(
        "pairs: same partners in all rounds",
        "exchange/loopback.py",
        "        lower = [rank & ~first.distance for rank in range(len(requests))]\n",
        "        lower = [rank & ~1 for rank in range(len(requests))]\n",
        (ORACLES, "-k", "gtopk or sparcml"),
    ),
    Mutation(
        "driver: any finite answer makes the step finite",
        "exchange/driver.py",
        "agreed = tf.reduce_all(finite) if finite",
        "agreed = tf.reduce_any(finite) if finite",
        ("tests/unit/test_driver.py",),
    ),
    Mutation(
        "driver: counts the bytes of the last request only",
        "exchange/driver.py",
        "bytes_sent = bytes_sent + sent_bytes(",
        "bytes_sent = sent_bytes(",
        ("tests/unit/test_driver.py",),
    ),
    Mutation(
        "all-to-all: returns a worker's own rows",
        "exchange/loopback.py",
        "    return [table[:, to] for to in range(len(requests))]",
        "    return [table[to] for to in range(len(requests))]",
        (ORACLES, "-k", "one_bit_sgd or quantized_fw"),
    ),
    Mutation(
        "all-gather: rows in TensorFlow's order",
        "network/collectives.py",
        "        return rows if self._in_order else map_words(self._order.by_rank, rows)\n",
        "        return rows\n",
        ("tests/distributed/test_ranks.py",),
    ),
    Mutation(
        "wire: finiteness flag in the last word",
        "ops/wire.py",
        "    return joined(as_row(tf.cast(finite, tf.int32)), words)\n",
        "    return joined(words, as_row(tf.cast(finite, tf.int32)))\n",
        ("tests/unit/test_wire.py",),
    ),
    Mutation(
        "wire: a non-finite message keeps its payload",
        "ops/wire.py",
        "    return zero_unless(finite, with_header(finite, joined(*words)))\n",
        "    return with_header(finite, joined(*words))\n",
        (LAWS, "-k", "nonfinite_value_skips and (sbc or spherical)"),
    ),
    Mutation(
        "agreement: differences are ignored",
        "cluster/agreement.py",
        "if _compared(report) != _compared(first)}",
        "if False}",
        ("tests/unit/test_drift.py", "tests/distributed/test_disagreement.py", "-k", "differ"),
    ),
    Mutation(
        "optimizer: applies a non-finite step",
        "keras/adapter.py",
        "            tf.cond(self.guard.finite, apply, lambda: tf.constant(False))\n",
        "            apply()\n",
        ("tests/unit/test_skipped_steps.py",),
    ),
    Mutation(
        "optimizer: totals in reverse order",
        "keras/adapter.py",
        "        return list(zip(totals, variables, strict=True))\n",
        "        return list(zip(totals, variables[::-1], strict=True))\n",
        ("tests/unit/test_mirrored.py", "-k", "density_one"),
    ),
    Mutation(
        "checkpoint: a resumed epoch repeats batches",
        "keras/fit_resume.py",
        "    for drawn in range(batches):\n",
        "    for drawn in range(0):\n",
        ("tests/unit/test_checkpoint.py", "-k", "resume_is_bitwise_equal"),
    ),
    Mutation(
        "checkpoint: a resumed run skips earlier shuffles",
        "keras/fit_resume.py",
        "        for draws in batches_of_past(epoch_iterator.data_adapter, past, one_for_all):\n",
        "        for draws in ():\n",
        ("tests/unit/test_checkpoint.py", "-k", "resume_is_bitwise_equal"),
    ),
    Mutation(
        "checkpoint: data of unknown size end one epoch early",
        "keras/fit_resume.py",
        "        if batch and self._tf_keras._inferred_steps is None:\n",
        "        if False:\n",
        ("tests/unit/test_checkpoint.py", "-k", "unknown_size"),
    ),
    Mutation(
        "checkpoint: metrics are reset",
        "keras/training_state.py",
        "    if values.keys() == copies.keys() and",
        "    if False and",
        ("tests/unit/test_checkpoint.py", "-k", "unknown_size or bitwise_equal"),
    ),
    Mutation(
        "checkpoint: parts are renamed after the manifest",
        "state/agreed_checkpoints.py",
        "        failed = _failure(write)\n",
        "        import os\n"
        "        failed = _failure(write)\n"
        "        path = self._store.path(number) / parts[0].name\n"
        '        late = path.with_suffix(".late")\n'
        "        os.rename(path, late)\n"
        "        threading.Timer(0.1, os.rename, (late, path)).start()\n",
        ("tests/distributed/test_checkpoints.py", "-k", "workers_agree"),
    ),
    Mutation(
        "checkpoint: commits without a failed part",
        "state/agreed_checkpoints.py",
        "        if not any(all_failed):\n            listed",
        "        results = [found for found in results if found[1]]\n"
        "        if True:\n            listed",
        ("tests/distributed/test_checkpoints.py", "-k", "workers_agree"),
    ),
    Mutation(
        "checkpoint: a save does not wait for the previous one",
        "state/agreed_checkpoints.py",
        "        self.finish()\n        number",
        "        number",
        ("tests/unit/test_checkpoint.py", "-k", "next_save_waits"),
    ),
    Mutation(
        "checkpoint: a failed fit does not wait for a save",
        "callbacks/checkpoint.py",
        "        self._signals.close()\n        self._files.finish()\n",
        "        self._signals.close()\n",
        ("tests/unit/test_checkpoint.py", "-k", "exit_waits_for"),
    ),
    Mutation(
        "checkpoint: no temporary file",
        "state/checkpoint_files.py",
        "    temporary = path.with_name(path.name + TEMPORARY)\n",
        "    temporary = path\n",
        ("tests/unit/test_checkpoint_store.py",),
    ),
    Mutation(
        "checkpoint: renamed before fsync",
        "state/checkpoint_files.py",
        "            os.fsync(file.fileno())\n        os.replace(temporary, path)\n",
        "        os.replace(temporary, path)\n"
        "        with open(path) as file:\n            os.fsync(file.fileno())\n",
        ("tests/unit/test_checkpoint_store.py",),
    ),
    Mutation(
        "checkpoint: no fsync of the directory",
        "state/checkpoint_files.py",
        "        raise\n    sync_directory(path.parent)\n",
        "        raise\n",
        ("tests/unit/test_checkpoint_store.py",),
    ),
    Mutation(
        "checkpoint: the manifest is removed last",
        "state/checkpoint_store.py",
        "    checkpoint_files.remove_file(directory / checkpoint_manifest.NAME)\n",
        "    for part in sorted(directory.glob('*.npz')):\n"
        "        checkpoint_files.remove_file(part)\n"
        "    checkpoint_files.remove_file(directory / checkpoint_manifest.NAME)\n",
        ("tests/unit/test_checkpoint_store.py",),
    ),
    *(
        Mutation(
            f"restore: skips arrays of kind {kind!r}",
            "state/restore.py",
            '        if entry.kind == "shared":\n',
            f'        if entry.kind == "{kind}":\n            return\n'
            '        if entry.kind == "shared":\n',
            tests,
        )
        for kind, tests in {
            "sum": ("tests/unit/test_worker_state.py",),
            "mean": ("tests/unit/test_worker_state.py",),
            "shared": ("tests/unit/test_worker_state.py",),
            "own": ("--deep", "tests/distributed/test_checkpoints.py", "-k", "bit and LocalSGD"),
        }.items()
    ),
    Mutation(
        "restore: all workers get the part of rank 0",
        "state/restore.py",
        "[self.by_rank[rank].row(entry.name, rank) for rank in self.own]",
        "[self.by_rank[min(self.by_rank)].row(entry.name, min(self.by_rank))] * copies",
        ("tests/unit/test_worker_state.py",),
    ),
)


def run(copy: Path, timeout: float, *arguments: str) -> subprocess.CompletedProcess:
    """Run pytest in the copy, up to the first test that fails."""
    words = [sys.executable, "-m", "pytest", "-n0", "-x", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*words, *arguments],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def outcome(mutation: Mutation, copy: Path, timeout: float) -> str:
    """Return "caught", "survived" or another outcome; the copy is restored afterwards.

    A test that also fails without the mutation has caught nothing.
    """
    path = copy / "tf_redsync" / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        return f"NOT TRIED: the text stands {text.count(mutation.old)} times in {mutation.file}"
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        done = run(copy, timeout, *mutation.tests)
    except subprocess.TimeoutExpired:
        return f"NOT TRIED: no end after {timeout:g} s"
    finally:
        path.write_text(text, encoding="utf-8")
    if done.returncode == 1:
        named = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.M)
        if not named:
            return f"NOT TRIED: pytest names no test that failed\n{done.stdout[-800:]}"
        try:
            plain = run(copy, timeout, *(a for a in mutation.tests if a == "--deep"), named[0])
        except subprocess.TimeoutExpired:
            return f"NOT TRIED: no end of {named[0]} after {timeout:g} s, without the mutation"
        if plain.returncode != 0:
            return f"NOT TRIED: {named[0]} fails without the mutation, too"
        return f"caught by {named[0]}"
    if done.returncode == 0:
        return "SURVIVED"
    return f"NOT TRIED: pytest ended with {done.returncode}\n{(done.stdout + done.stderr)[-800:]}"


def main() -> int:
    """Runs the command line; returns 0 if all mutations were tried and caught."""
    parser = argparse.ArgumentParser(description="Which tests notice a broken function?")
    parser.add_argument("--only", default="", help="mutations whose names hold this text")
    parser.add_argument("--list", action="store_true", help="print names and do nothing")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each mutation")
    args = parser.parse_args()
    chosen = [m for m in MUTATIONS if args.only in m.name]
    if not chosen:
        parser.error(f"no mutation's name contains --only={args.only}")
    if args.list:
        print("\n".join(m.name for m in chosen))
        return 0
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            source, target = ROOT / name, Path(folder) / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        for mutation in chosen:
            found = outcome(mutation, Path(folder), args.timeout)
            caught += found.startswith("caught")
            print(f"{mutation.name}: {found}", flush=True)
    print(f"{caught} of {len(chosen)} caught")
    return int(caught != len(chosen))


if __name__ == "__main__":
    sys.exit(main())
