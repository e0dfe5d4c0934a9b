"""tools/mutate.py breaks functions by replacing text: the texts and the tests must exist."""

import pathlib
import re
import runpy

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "mutate.py"))
MUTATIONS = TOOL["MUTATIONS"]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_mutation_can_be_applied(mutation):
    path = ROOT / "tf_redsync" / mutation.file
    assert path.is_file(), mutation.file
    assert path.read_text(encoding="utf-8").count(mutation.old) == 1
    for argument in mutation.tests:
        assert not argument.endswith(".py") or (ROOT / argument).is_file(), argument
    for word in selected_words(mutation.tests):
        assert word in source_of(mutation.tests), word


def selected_words(arguments):
    """Returns the names in an expression of `-k`."""
    expression = arguments[arguments.index("-k") + 1] if "-k" in arguments else ""
    return set(re.findall(r"\w+", expression)) - {"and", "or", "not"}


def source_of(arguments):
    """Returns the text of the test files, and of the methods' table for those in conformance."""
    files = [ROOT / argument for argument in arguments if argument.endswith(".py")]
    if any(file.parent.name == "conformance" for file in files):
        files += (ROOT / "tests/conformance/families").glob("*.py")
    return "".join(file.read_text(encoding="utf-8") for file in files)


def test_unknown_name_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["mutate.py", "--only", "no_such_name"])
    with pytest.raises(SystemExit) as end:
        TOOL["main"]()
    assert end.value.code == 2 and "--only=no_such_name" in capsys.readouterr().err


TESTS = """
import pathlib
import pytest

@pytest.fixture
def value():
    assert pathlib.Path("tf_redsync/module.py").read_text() == "one"

def test_by_a_fixture(value):
    pass

def test_that_fails_anyway():
    assert False, "as where the copy lacks a file"
"""


@pytest.mark.parametrize(
    ("test", "says"),
    [
        ("test_by_a_fixture", "caught by test_it.py::test_by_a_fixture"),
        ("test_that_fails_anyway", "NOT TRIED: test_it.py::test_that_fails_anyway fails without"),
    ],
)
def test_failure_without_the_mutation_does_not_count(tmp_path, test, says):
    (tmp_path / "tf_redsync").mkdir()
    module = tmp_path / "tf_redsync" / "module.py"
    module.write_text("one")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    mutation = TOOL["Mutation"]("it", "module.py", "one", "two", (f"test_it.py::{test}",))
    assert TOOL["outcome"](mutation, tmp_path, 60).startswith(says)
    assert module.read_text() == "one"
