"""From the workers' results to the table: pooling, and checks that all did the same work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.step import step_report

COLUMNS = ("median ms", "min ms", "cpu ms", "x none", "wire MB")
# Plain SGD, by its names in the libraries: weights are equal in all of them, up to rounding.
EXACT = {"none": ("none",), "dense": ("dense", "Dense()")}
# Relative to the largest logit. Workers add the same numbers; libraries round differently, which
# gives 1e-5 with `mlp` and 1e-2 with `vgg`. Half the gradient gives a quarter with `mlp`.
SAME_WORKERS, SAME_LIBRARIES = 1e-4, 0.05


class DisagreementError(RuntimeError):
    """Workers that should have equal weights differ."""


def distance(logits: Any, first: Any) -> float:
    """Returns the largest difference relative to the largest of the first logits."""
    there = np.asarray(first)
    return float(np.abs(np.asarray(logits) - there).max() / np.abs(there).max())


def collect(method: str, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns worker 0's result of a run after comparing it with the others'.

    Args:
      method: of the run; with `none` workers are independent.
      results: of all workers.

    Raises:
      DisagreementError: the workers' weights differ.
    """
    if method != "none":
        for rank, result in enumerate(results):
            apart = distance(result["logits"], results[0]["logits"])
            if not apart <= SAME_WORKERS:  # also true for a NaN
                raise DisagreementError(
                    f"worker {rank} has other weights than worker 0 after {method}: their logits "
                    f"differ by {apart:.1%}"
                )
    return results[0]


def differences(peers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a sentence for each library whose exact method ends with other weights.

    All start from the same weights and read the same data, so `none` and `dense` are the same
    computation everywhere.
    """
    found = []
    for method, names in EXACT.items():
        runs = {
            name: row["logits"]
            for name, peer in peers.items()
            for own_name, row in peer.get("methods", {}).items()
            if own_name in names and row.get("logits") is not None
        }
        for name, logits in list(runs.items())[1:]:
            first = next(iter(runs))
            apart = distance(logits, runs[first])
            if not apart <= SAME_LIBRARIES:
                found.append(
                    f"{name} and {first} did not do the same work: under `{method}` their logits "
                    f"differ by {apart:.1%} after the last step."
                )
    return found


def part(
    results: Mapping[str, Sequence[dict[str, Any]]],
    errors: Mapping[str, str],
    versions: dict[str, str] | None,
) -> dict[str, Any]:
    """Returns a library's part of the report.

    Args:
      results: per method, worker 0's measurements of each round.
      errors: of the methods that failed.
      versions: None: those in the results.
    """
    methods: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {"versions": versions, "methods": methods}
    for method, rounds in results.items():
        if method in errors:
            methods[method] = {"error": errors[method]}
            continue
        last = rounds[-1]
        found |= {"versions": versions or last["versions"]}
        found |= {key: last[key] for key in ("params", "batch")}
        methods[method] = {
            **step_report.summary(rounds),
            "settings": last.get("settings", {}),
            "logits": last.get("logits"),
        }
    return found


def reason(text: str) -> str:
    """Returns the line of a message to show in the table."""
    return text.strip().splitlines()[0]


def table(peers: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the lines to print: one method per line, times in ms, traffic in MB (10^6 bytes)."""
    lines = [f"{'library':<12}{'method':<22}" + "".join(f"{title:>12}" for title in COLUMNS)]
    for name, peer in peers.items():
        if "error" in peer:
            lines.append(f"{name:<12}not installed: {reason(peer['error'])}")
            continue
        none = peer["methods"].get("none", {}).get("step_ms")
        for method, row in peer["methods"].items():
            head = f"{name:<12}{method:<22}"
            if "error" in row:
                lines.append(f"{head}failed: {reason(row['error'])}")
                continue
            wire = row["wire_bytes_per_step"]
            cells = (
                f"{row['step_ms']:.1f}",
                f"{row['step_ms_min']:.1f}",
                f"{row['cpu_ms_per_step']:.1f}",
                f"{row['step_ms'] / none:.2f}" if none else "-",
                "-" if wire is None else f"{wire / 1e6:.3f}",
            )
            lines.append(head + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def failures(peers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the full texts of all failures."""
    found = []
    for name, peer in peers.items():
        if "error" in peer:
            found.append(f"{name} is not installed: {peer['error']}")
        for method, row in peer.get("methods", {}).items():
            if "error" in row:
                found.append(f"{name}, `{method}`: {row['error']}")
    return found


def versions(peers: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the lines with the measured versions, one per library."""
    lines = []
    for name, peer in peers.items():
        parts = [
            f"{package} {version}" for package, version in (peer.get("versions") or {}).items()
        ]
        for method, row in peer.get("methods", {}).items():
            options = ", ".join(f"{k}={v}" for k, v in row.get("settings", {}).items())
            parts += [f"{method}: {options}"] if options else []
        lines += [f"{name}: {'; '.join(parts)}"] if parts else []
    return "\n".join(lines)
