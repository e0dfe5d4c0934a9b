"""Typical Keras user code on two real workers: the rows of `user_code.py`.

A commit runs one row of each kind. `pytest --deep` runs all rows in all libraries and ways,
including the large models and 3,000 steps, and compares with the plain optimizer where possible;
this takes half an hour. `TF_REDSYNC_HABITS="keras3 fit"` selects rows whose names contain the text.
"""

import os

import numpy as np
import pytest

from tests.deep import DEEP
from tests.distributed.cluster import LEGACY, run_workers

ONLY = os.environ.get("TF_REDSYNC_HABITS", "")
pytestmark = pytest.mark.timeout(3700 if DEEP else 600)
# Rows whose optimizer features the wrapper could lose: the dense exchange must give the plain
# optimizer's weights.
AS_PLAIN = ("ema_and_weight_decay",)
# A commit runs `fit` of Keras 3 without these, and `OTHERS` in other libraries and ways.
ONLY_DEEP = (
    "a_frozen_layer",
    "a_layer_without_a_gradient",
    "attention",
    "batch_normalization_and_dropout",  # see test_fit.py, for this and the last one
    "clipnorm",
    "clipvalue",
    "compiled_outside_of_the_scope",  # see test_habits.py
    "ema",
    "early_stopping",  # see test_forgotten_consensus.py
    "ema_weights_swapped",
    "global_clipnorm",
    "labels_float32",
    "labels_float64",  # see test_dtypes.py, for all dtypes
    "labels_int32",
    "labels_int64",
    "one_hot_labels",
    "rate_on_a_plateau",  # see test_drift.py
    "recurrent",
    "regularizers_and_add_loss",
    "run_eagerly",  # see test_statistics.py
    "sample_weights",
    "several_outputs",
    "schedule",
    "steps_per_execution",
    "uneven_data",
    "weight_decay",
    "zipf_embedding",
)
OTHERS = {
    ("tf_keras", "fit"): ("zipf_embedding",),
    ("tf_keras", "train_step"): ("uneven_data",),
    ("addons", "loop"): ("uneven_data",),
}


def chosen(rows):
    """What to train: library, way, row, and whether to compare with the plain optimizer."""
    found = []
    for name, (_, libraries, ways, extra) in rows.items():
        for library in libraries:
            for way in ways:
                usual = name in OTHERS.get((library, way), ())
                if (library, way) == ("keras3", "fit"):
                    usual = name not in ONLY_DEEP and not extra.get("slow")
                compared = name in AS_PLAIN and (library, way) == ("keras3", "fit")
                if DEEP:
                    usual, compared = True, not extra.get("alone")
                if usual and ONLY in f"{library} {way} {name}":
                    found.append((library, way, name, compared))
    return found


def train_all():
    """Train all chosen rows with RedSync, and some with a dense exchange and without a wrapper."""
    import tf_redsync as rs
    from tests.distributed import user_code

    strategy = rs.MultiWorkerMirroredStrategy()
    wraps = {
        "redsync": lambda inner: rs.DistributedOptimizer(
            inner, rs.RedSync(density=0.1, dense_below=16)
        ),
        "dense": lambda inner: rs.DistributedOptimizer(inner, rs.Dense()),
        "plain": lambda inner: inner,
    }
    results = {}
    for library, way, name, compared in chosen(user_code.ROWS):
        for kind, wrap in wraps.items():
            if kind == "redsync" or compared:
                found = user_code.run(strategy, library, way, name, wrap)
                key = f"{library} {way} {name}"
                results.update({f"{key}/{kind}/{k}": v for k, v in found.items()})
    return results


@pytest.fixture(scope="module")
def trained():
    return run_workers(train_all, env=LEGACY, timeout=3600 if DEEP else 280)


def errors_in(first, second, case):
    """One line for each error in a case."""
    kinds = [k for k in ("redsync", "dense", "plain") if f"{case}/{k}/error" in first]
    errors = {w[f"{case}/{k}/error"] for k in kinds for w in (first, second)} - {""}
    if errors:
        return "; ".join(sorted(errors))
    losses = first[f"{case}/redsync/losses"]
    if not np.isfinite(losses).all():
        return f"losses {losses}"
    if list(losses) != list(second[f"{case}/redsync/losses"]):
        return "workers report different losses"
    if list(first[f"{case}/redsync/digests"]) != list(second[f"{case}/redsync/digests"]):
        return "workers have different weights"
    if first[f"{case}/redsync/falls"] and not min(losses[1:]) < losses[0]:
        return f"the loss did not fall: {losses}"
    if len(kinds) == 3:
        dense, plain = (first[f"{case}/{k}/weights"] for k in ("dense", "plain"))
        apart = float(np.abs(dense - plain).max())
        if apart > 2e-4:
            return f"dense and plain weights are {apart:.2g} apart"
    return ""


def test_rows_train(trained):
    first, second = trained
    cases = sorted({key.split("/")[0] for key in first})
    assert len(cases) >= (1 if ONLY else 8)
    wrong = {case: errors_in(first, second, case) for case in cases}
    assert {case: text for case, text in wrong.items() if text} == {}
