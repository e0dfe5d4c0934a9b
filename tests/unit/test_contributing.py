"""CONTRIBUTING's example of a method, in one process."""

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.conformance.descriptor import Descriptor
from tests.unit.test_method_pages import FORMULA
from tf_redsync.exchange import driver, loopback
from tf_redsync.exchange.layout import BucketLayout, TensorSpec

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
BLOCKS = re.findall(r"^   ```python\n(.*?)^   ```", PAGE.read_text(), re.S | re.M)
METHOD, ORACLE, TABLE = map(textwrap.dedent, BLOCKS)
SPECS = (TensorSpec("a", (2, 2), position=0),)
LAYOUT = BucketLayout(SPECS, 3)
GRADS = np.array([[[1, 2], [-3, 0]], [[-1, 5], [-1, 0]], [[1, 1], [9, 0]]], np.float32)


@pytest.fixture
def descriptor():
    """The entry of the table of the three files."""
    names = {"__name__": __name__, "np": np, "Descriptor": Descriptor}
    exec(METHOD.replace("@register\n", "") + ORACLE + TABLE, names)
    return names["TABLE"]["sign"]


def run_step(method, grads):
    states = loopback.initial_states(method, LAYOUT)
    return loopback.run_step(method, LAYOUT, [[tf.constant(g)] for g in grads], states, 0)


def test_example_of_a_method_returns_the_majority_of_signs(descriptor):
    step = run_step(descriptor.method, GRADS)
    assert step.finite
    (expected,) = descriptor.oracle(descriptor.method, SPECS, 3).step([[g] for g in GRADS])
    np.testing.assert_array_equal(expected, [[1, 1], [-1, 0]])
    for totals in step.totals:
        np.testing.assert_array_equal(totals[0], expected)
    assert tuple(map(type, step.requests)) == descriptor.requests
    sent = [driver.payload_bytes(request) for request in step.requests]
    assert sent == descriptor.payload(descriptor.method, SPECS, 0)
    bad = GRADS.copy()
    bad[1, 0, 0] = np.nan
    assert not run_step(descriptor.method, bad).finite


def test_example_of_a_method_passes_the_checks(descriptor):
    assert descriptor.method.dense() is descriptor.method
    assert re.search(FORMULA, inspect.getdoc(type(descriptor.method)), re.M)
    ruff = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--stdin-filename=tf_redsync/contrib/sign.py",
        "-",
    ]
    checked = subprocess.run(ruff, input=METHOD, capture_output=True, text=True, cwd=PAGE.parent)
    assert checked.returncode == 0, checked.stdout
    for node in ast.walk(ast.parse(METHOD)):  # mypy's no-untyped-def
        if isinstance(node, ast.FunctionDef):
            annotations = [node.returns, *(a.annotation for a in node.args.args[1:])]
            assert None not in annotations, node.name
