"""Lets the library take part in what a Keras library's models do."""

from __future__ import annotations

from typing import Any

from tf_redsync.keras import fit_hook, left_fit, loss_scaling, own_weights


def install(library: Any) -> None:
    """Replace the methods of a library's classes that ours take part in; each is replaced once.

    Args:
        library: `keras` or `tf_keras`.
    """
    fit_hook.install(library.callbacks)
    for part in (left_fit, loss_scaling, own_weights):
        part.install(library.Model)
