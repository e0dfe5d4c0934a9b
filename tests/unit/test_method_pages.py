"""docs/methods/ says what the docstrings say."""

import dataclasses
import re

import tf_redsync as rs
from tools import method_pages


def test_pages_are_up_to_date():
    assert not method_pages.stale(), "run `python tools/method_pages.py`"


def test_every_method_has_a_page_with_all_of_its_arguments():
    pages = method_pages.pages()
    for entry in rs.methods.table().entries:
        text = pages[f"{entry.name}.md"]
        assert entry.paper.split(",")[0] in text
        for field in dataclasses.fields(rs.methods.base.registered()[entry.name]):
            assert f"| `{field.name}` |" in text, f"{entry.name} does not document {field.name}"


def test_what_is_out_of_date_is_found(tmp_path):
    wanted = method_pages.pages()
    for name, text in wanted.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert method_pages.stale(tmp_path) == []
    (tmp_path / "TopK.md").write_text(wanted["TopK.md"] + "by hand", encoding="utf-8")
    (tmp_path / "DGC.md").unlink()
    (tmp_path / "Other.md").write_text("", encoding="utf-8")
    assert method_pages.stale(tmp_path) == ["DGC.md", "Other.md", "TopK.md"]


def test_headings_arguments_and_formulas():
    page = method_pages.pages()["TopK.md"]
    assert page.startswith(method_pages.NOTE)
    assert "\n### Differences from the paper\n" in page
    assert "\n    v <- v + g\n" in page  # indented: a code block
    assert "| `density` | `0.01` | Fraction of the elements that is sent, in (0, 1]. |" in page


def test_docstrings_stand_alone():
    """`help(rs.TopK)` has the paper and the formulas, and refers to no docstring of a module."""
    for kind, classes in method_pages.subjects().items():
        for name, cls in classes:
            docstring = method_pages.Docstring.of(cls)
            assert "module's docstring" not in docstring.text, name
            paper = getattr(cls, "paper", "-")
            if re.search(r"\d{4}", paper):
                assert re.split(r"[, ]", paper)[0] in docstring.text, f"{name}: no {paper}"
            if kind == "Methods" and cls not in (rs.NoExchange, rs.DeepReduce):
                formulas = r"`.+ <- .+`|^ {4,}\S.*( <-| =|:|to all workers)"
                assert re.search(formulas, docstring.text, flags=re.M), f"{name}: no formula"
