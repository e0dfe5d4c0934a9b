"""docs/methods/ has every method: equations and a line in the list; docstrings stand alone."""

import dataclasses
import inspect
import re
from pathlib import Path

import tf_redsync as rs

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "methods"
ENTRIES = rs.methods.table().entries
INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")


def cell(text):
    return text.replace("|", "\\|")


def test_every_method_has_a_page_with_equations_and_nothing_else_has():
    for entry in ENTRIES:
        page = (FOLDER / f"{entry.name}.md").read_text(encoding="utf-8")
        assert page.startswith(f"# {entry.name}\n") and f"\n::: tf_redsync.{entry.name}\n" in page
        equations = re.search(r"^\$\$\n(.*?)\n\$\$$", page, flags=re.MULTILINE | re.DOTALL)
        assert equations and "=" in equations.group(1), entry.name
    pages = {path.stem for path in FOLDER.glob("*.md")}
    assert pages == {entry.name for entry in ENTRIES} | {"README", "codings"}
    navigation = (FOLDER / ".nav.yml").read_text(encoding="utf-8")
    assert sorted(re.findall(r"(\w+)\.md", navigation)) == sorted(pages)


def test_the_list_has_every_method_with_its_bits():
    rows = {row.split("`")[1]: row for row in INDEX.splitlines() if row.startswith("| [`")}
    assert rows.keys() == {entry.name for entry in ENTRIES}
    for entry in ENTRIES:
        assert rows[entry.name].endswith(f" | {cell(entry.bits)} |"), entry.name


def classes():
    codings = [getattr(rs.codings, name) for name in rs.codings.__all__]
    bases = (rs.codings.IndexCoding, rs.codings.ValueCoding)
    return [
        *(getattr(rs, entry.name) for entry in ENTRIES),
        *(c for c in codings if isinstance(c, type) and issubclass(c, bases) and c not in bases),
    ]


def arguments(cls):
    """Names that the section "Args" of a class's docstring describes."""
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


def test_docstrings_stand_alone():
    """`help(rs.TopK)` has the paper and the formulas, and refers to no docstring of a module."""
    methods = {getattr(rs, entry.name) for entry in ENTRIES}
    for cls in classes():
        text = re.split(r"^(?:Args|Raises|Returns|Example):\n", inspect.getdoc(cls), flags=re.M)[0]
        assert "module's docstring" not in text, cls
        paper = getattr(cls, "paper", "-")
        if re.search(r"\d{4}", paper):
            assert re.split(r"[, ]", paper)[0] in text, f"{cls}: no {paper}"
        if cls in methods and cls not in (rs.NoExchange, rs.DeepReduce):
            formulas = r"`.+ <- .+`|^ {4,}\S.*( <-| =|:|to all workers)"
            assert re.search(formulas, text, flags=re.M), f"{cls}: no formula"
