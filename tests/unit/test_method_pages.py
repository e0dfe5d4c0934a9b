"""Methods' pages have equations and a row in a list; their docstrings are self-contained."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import tf_redsync as rs
from tests.methods import METHODS

DOCS = Path(__file__).resolve().parents[2] / "docs"
ENTRIES = {e.name: e for e in rs.methods.table().entries}
PAGES = {p.stem: p for f in ("methods", "contrib") for p in (DOCS / f).glob("[A-Z]*.md")}
del PAGES["README"]
FORMULA = r"`.+ <- .+`|^ {4,}\S.*( <-| =|:|to all workers)"


def cell(text):
    return text.replace("|", "\\|")


def test_pages_have_equations_and_the_docstring():
    """The site creates a page from the docstring of a method without one."""
    assert set(PAGES) <= set(ENTRIES) and len(PAGES) > 50
    for name, path in PAGES.items():
        page = path.read_text(encoding="utf-8")
        assert path.parent.name == ("contrib" if ENTRIES[name].contrib else "methods")
        described = {f"::: tf_redsync.{name}", f"::: {METHODS[name].__module__}.{name}"}
        assert page.startswith(f"# {name}\n") and described & set(page.splitlines()), name
        equations = re.search(r"^\$\$\n(.*?)\n\$\$$", page, flags=re.MULTILINE | re.DOTALL)
        assert equations and "=" in equations.group(1), name


@pytest.mark.parametrize("folder", ["methods", "contrib"])
def test_lists_have_every_page_with_its_bits(folder):
    """The site adds missing pages."""
    text = (DOCS / folder / "README.md").read_text(encoding="utf-8")
    rows = {row.split("`")[1]: row for row in text.splitlines() if row.startswith("| [`")}
    pages = {name for name, path in PAGES.items() if path.parent.name == folder}
    assert rows.keys() == pages, f"docs/{folder}/README.md has a row for every page"
    for name in rows:
        assert rows[name].endswith(f" | {cell(ENTRIES[name].bits)} |"), name


def classes():
    homes = (rs.codings, rs.contrib.codings)
    codings = [getattr(home, name) for home in homes for name in home.__all__]
    bases = (rs.codings.IndexCoding, rs.codings.ValueCoding)
    return [
        *METHODS.values(),
        *(c for c in codings if isinstance(c, type) and issubclass(c, bases) and c not in bases),
    ]


def arguments(cls):
    """Returns the names in the section "Args" of a class's docstring."""
    section = re.search(
        r"^Args:\n((?:    .*\n|\n)*)", inspect.getdoc(cls) + "\n", flags=re.MULTILINE
    )
    return (
        set(re.findall(r"^    (\w+):", section.group(1), flags=re.MULTILINE)) if section else set()
    )


def test_docstrings_describe_all_arguments():
    for cls in classes():
        fields = {f.name for f in dataclasses.fields(cls) if f.init}
        assert arguments(cls) == fields, cls.__name__


def test_docstrings_are_self_contained():
    """`help(rs.TopK)` has the paper and the formulas, and refers to no module docstring."""
    for cls in classes():
        text = re.split(r"^(?:Args|Raises|Returns|Example):\n", inspect.getdoc(cls), flags=re.M)[0]
        assert "module's docstring" not in text, cls
        paper = cls().traits.paper if issubclass(cls, rs.Method) else getattr(cls, "paper", "-")
        if re.search(r"\d{4}", paper):
            assert re.split(r"[, ]", paper)[0] in text, f"{cls}: no {paper}"
        if issubclass(cls, rs.Method) and cls not in (rs.NoExchange, rs.contrib.DeepReduce):
            assert re.search(FORMULA, text, flags=re.M), f"{cls}: no formula"
