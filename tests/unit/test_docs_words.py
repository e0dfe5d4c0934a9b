"""The pages of the documentation keep their word budgets; longer material is in docs/archive."""

import re
from pathlib import Path

from tests.loops import loop

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GUIDE = 1000
BUDGETS = {
    "README.md": 750,
    "docs/gpu.md": 800,
    "docs/architecture.md": 2500,
    "docs/benchmarks.md": 1250,  # one page of results, mostly tables
}


def count_words(text):
    """Returns the number of words with a letter or a digit; table markup is not counted."""
    return len(re.findall(r"\S*\w\S*", text))


def pages():
    """Returns the paths of all pages with a budget, relative to the project."""
    found = [p.relative_to(ROOT).as_posix() for p in DOCS.rglob("*.md")]
    return ["README.md", *sorted(p for p in found if not p.startswith("docs/archive/"))]


@loop("page", pages())
def test_page_keeps_its_budget(page):
    count = count_words((ROOT / page).read_text(encoding="utf-8"))
    assert count <= BUDGETS.get(page, GUIDE), f"{page} has {count} words"


def test_table_markup_is_not_counted():
    assert count_words("| a | `rs.TopK(density=0.01)` | - |\n|---|---|---|\n") == 2
    assert count_words("One *two* 3 % more, -0.5.") == 5


def test_each_archived_page_is_linked():
    sources = [*pages(), "CONTRIBUTING.md"]
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in sources)
    linked = set(re.findall(r"\]\((?:\.\./)?(?:docs/)?archive/([\w-]+\.md)", text))
    assert linked == {path.name for path in (DOCS / "archive").glob("*.md")}
