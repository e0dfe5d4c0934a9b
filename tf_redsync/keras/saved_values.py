"""Whether training can go on from the values of a checkpoint.

Valid checksums say that a file is what was written. This says that a model can take it over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tf_redsync.keras import training_state
from tf_redsync.state.checkpointing import Found


def problem(model: Any, values: Mapping[str, np.ndarray]) -> str:
    """Say what keeps training from going on from values of `shared` or `own`, or `""`.

    Weights that are trained must be finite, and an optimizer's variables not NaN: sums of squares
    may be infinite where gradients are large. Other variables of the model are the user's, who may
    mask by minus infinity, or statistics, which a skipped step may have spoiled for good.
    """
    of_the_user = training_state.perhaps_own(model)
    for name, copies in training_state.variables(model).items():
        variable = copies[0]
        for key in [k for k in (name, *training_state.replicas(name, copies)) if k in values]:
            value = values[key]
            if not training_state.suits(variable, value):
                form = f"{variable.dtype.name}{variable.shape}"
                return f"{key} must be {form}. Received: {value.dtype}{value.shape}"
            if name in of_the_user or not (variable.dtype.is_floating or variable.dtype.is_complex):
                continue
            trained = name.startswith(f"{training_state.MODEL}/")
            bad = int(np.sum(~np.isfinite(value) if trained else np.isnan(value)))
            if bad:
                what = "not finite" if trained else "NaN"
                return f"{bad} of {value.size} numbers of {variable.name} ({key}) are {what}"
    return ""


def check(model: Any, found: Found) -> None:
    """Check that a model can take over what a checkpoint holds; asks no other worker.

    Raises:
        ValueError: for values that are missing, of another form, or that no training leads to.
    """
    missing = [name for name in training_state.variables(model) if name not in found.shared]
    if missing:
        raise ValueError(f"its files lack {len(missing)} variables, {missing[0]} for one")
    for values in (found.shared, *found.own):
        if said := problem(model, values):
            raise ValueError(said)
