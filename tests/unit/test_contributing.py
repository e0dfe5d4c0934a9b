"""CONTRIBUTING's example of a method, in one process."""

import re
import textwrap
from pathlib import Path

import numpy as np
import tensorflow as tf

from tf_redsync.exchange import loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_example_of_a_method_returns_the_majority_of_signs():
    block = re.search(r" ```python\n(   import dataclasses\n.*?)   ```", PAGE.read_text(), re.S)
    names = {"__name__": __name__}
    exec(textwrap.dedent(block[1]).replace("@register\n", ""), names)
    method, layout = names["Sign"](), BucketLayout((TensorSpec("a", (2, 2), position=0),), 3)
    grads = np.array([[[1, 2], [-3, 0]], [[-1, 5], [-1, 0]], [[1, 1], [9, 0]]], np.float32)
    states = loopback.initial_states(method, layout)
    step = loopback.run_step(method, layout, [[tf.constant(g)] for g in grads], states, 0)
    assert step.finite
    for totals in step.totals:
        np.testing.assert_array_equal(totals[0], [[1, 1], [-1, 0]])
    grads[1, 0, 0] = np.nan
    step = loopback.run_step(method, layout, [[tf.constant(g)] for g in grads], states, 0)
    assert not step.finite
