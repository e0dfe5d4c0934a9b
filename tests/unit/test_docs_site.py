"""The documentation site: strict build, completeness, and no network requests."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]
# `tests/run.sh` installs the extra `docs`; these tests also run with only `test` installed.
pytest.importorskip("mkdocs", reason="needs the extra `docs`")
docs_site = pytest.importorskip("tools.docs_site", reason="needs the extra `docs`")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    # As in CONTRIBUTING: `--quiet` would hide warnings of plugins from `--strict`.
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tensorflow" not in (done.stdout + done.stderr).lower()  # the package is not imported
    pages = {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*.html")}
    return {name: page for name, page in pages.items() if name != "404.html"}


def test_every_page_is_built(site):
    for path in (ROOT / "docs").rglob("*.md"):
        name = path.relative_to(ROOT / "docs").with_suffix("")
        folder = name.parent if name.name in ("index", "README") else name
        assert (folder / "index.html").as_posix() in site
    assert {"contributing/index.html", "changelog/index.html"} <= site.keys()


def test_every_public_name_is_documented(site):
    import tf_redsync as rs

    found = {
        name for page in site.values() for name in re.findall(r'id="(tf_redsync[\w.]*)"', page)
    }
    wanted = {f"tf_redsync.{name}" for name in rs.__all__}
    for module in (rs.callbacks, rs.codings, rs.contrib.codings, rs.ops):
        wanted |= {f"{module.__name__}.{name}" for name in module.__all__}
    # Methods and the base class are described once.
    others = set(rs.methods.__all__) - set(rs.__all__)
    wanted |= {f"tf_redsync.methods.{name}" for name in others}
    wanted |= {f"{m.__module__}.{m.__name__}" for m in map(METHODS.get, rs.contrib.__all__) if m}
    assert wanted <= found, sorted(wanted - found)


def test_equations_are_rendered(site):
    for name, page in site.items():
        assert "arithmatex" not in page, name
        assert not re.search(r"\\(begin|frac|sum|text)\b", html.unescape(page)), name
    assert site["methods/TopK/index.html"].count("<mtr>") >= 4


def test_links_have_titles_instead_of_file_names(site):
    texts = {
        text
        for name, page in site.items()
        if name != "changelog/index.html"
        for text in re.findall(r"<a [^>]+>([\w.-]+\.md)</a>", page)
    }
    assert not texts
    title = (ROOT / "docs" / "auto.md").read_text().splitlines()[0].removeprefix("# ")
    assert f'auto/">{title}</a>' in site["index.html"]


def test_pages_make_no_network_requests(site):
    for name, page in site.items():
        fetched = re.findall(r'<(?:script|img|link|iframe)[^>]+(?:src|href)="(\w+://[^"]+)', page)
        assert not fetched, name


def test_front_page_states_the_limits(site):
    warning = re.search(r'<div class="admonition warning">(.*?)</div>', site["index.html"], re.S)
    assert "GPU" in warning.group(1)


# Failures of the checks.


class Page:
    class file:  # noqa: N801
        src_uri = "methods/TopK.md"


class Config:
    repo_url = None


def render(text, repo_url=None, path=Page.file.src_uri):
    config, page = Config(), Page()
    config.repo_url = repo_url
    page.file = SimpleNamespace(src_uri=path)
    return docs_site.on_page_markdown(text, page=page, config=config)


def test_links_out_of_the_docs_folder():
    assert render("[a](../../README.md)") == "[a](../index.md)"
    assert render("[a](../../CONTRIBUTING.md#rules)") == "[a](../contributing.md#rules)"
    assert render("[`a`](../../setup.py) b") == "`a` b"
    url = "https://example.com/tf_redsync"
    assert render("[a](../../setup.py)", url) == f"[a]({url}/blob/main/setup.py)"
    assert render("[a](../auto.md#limits)") == "[a](../auto.md#limits)"
    assert render("`[a](../../nothing)`") == "`[a](../../nothing)`"
    with pytest.raises(docs_site.PluginError, match="links to ../../nothing"):
        render("[a](../../nothing)")


def test_unknown_equation_raises():
    good = r'<div class="arithmatex">\[a \leftarrow \frac{b}{c}\]</div>'
    assert "<mfrac>" in docs_site.on_page_content(good)
    bad = r'<span class="arithmatex">\(\begin{aligned} a &amp;= b \end{aligned}\)</span>'
    with pytest.raises(docs_site.PluginError, match="not understood"):
        docs_site.on_page_content(bad)


def test_undocumented_names_are_added():
    text = render(docs_site.OTHER_NAMES)
    assert "::: tf_redsync.AMSGrad" in text and "::: tf_redsync.TopK" not in text


def test_new_method_gets_a_page_and_a_row(tmp_path, monkeypatch):
    """From the sources alone: a new file with `@register` is enough."""
    source = ROOT / "tf_redsync" / "contrib" / "sidco.py"
    for folder in docs_site.FOLDERS:
        (tmp_path / "tf_redsync" / folder).mkdir(parents=True)
    new = source.read_text().replace("class SIDCo", "class Fresh")
    (tmp_path / "tf_redsync" / "contrib" / "fresh.py").write_text(new)
    monkeypatch.setattr(docs_site, "ROOT", tmp_path)
    docs_site.registered_methods.cache_clear()
    try:
        (found,) = docs_site.registered_methods()
        text = render("# More methods", path="contrib/README.md")
        assert render("# Methods", path="methods/README.md") == "# Methods"
    finally:
        docs_site.registered_methods.cache_clear()
    assert found.page == "contrib/Fresh.md"
    assert found.as_page() == "# Fresh\n\n::: tf_redsync.contrib.fresh.Fresh\n"
    assert "\n| [`Fresh`](Fresh.md) | " in text and text.endswith(f" | {found.bits} |\n")
