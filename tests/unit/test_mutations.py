"""tools/mutate.py breaks functions by replacing text: the text and the tests have to be there."""

import pathlib
import runpy

import pytest

ROOT = pathlib.Path(__file__).parents[2]
MUTATIONS = runpy.run_path(str(ROOT / "tools" / "mutate.py"))["MUTATIONS"]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_mutation_can_be_made(mutation):
    path = ROOT / "tf_redsync" / mutation.file
    assert path.is_file(), mutation.file
    assert path.read_text(encoding="utf-8").count(mutation.old) == 1
    for argument in mutation.tests:
        assert not argument.endswith(".py") or (ROOT / argument).is_file(), argument
