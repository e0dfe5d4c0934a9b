"""Hooks of `mkdocs build`: differences between the site and the pages on GitHub.

* CONTRIBUTING.md and CHANGELOG.md are pages of the site;
* links out of docs/ lead to files of the project, which must exist. Without a `repo_url` they
  become plain text;
* a link whose text is the name of a page, as `[auto.md](auto.md)`, shows that page's title;
* equations become MathML, which browsers render without a script or a network;
* `<!-- all other public names -->` becomes a reference entry for each name without a page;
* a registered method without a page gets one from its docstring, and without a row in the list of
  methods, a row there.

Imports nothing of tf_redsync: building the site needs no TensorFlow.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import html
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OWN_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
OTHER_NAMES = "<!-- all other public names -->"
FOLDERS = ("methods", "contrib")  # of methods, in the package and in docs/

_CODE = re.compile(r"^( *)```.*?^\1```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
_MATH = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages outside of docs/."""
    for source, page in OWN_PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    for method in registered_methods():
        if files.get_file_from_path(method.page) is None:
            files.append(File.generated(config, method.page, content=method.as_page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Completes the reference and fixes links that lead out of docs/."""
    if OTHER_NAMES in markdown:
        entries = "\n\n".join(f"::: tf_redsync.{name}" for name in undescribed())
        markdown = markdown.replace(OTHER_NAMES, entries)
    path = page.file.src_uri
    if path in [f"{folder}/README.md" for folder in FOLDERS]:
        markdown += _further_rows(markdown, posixpath.dirname(path))
    outside = {page: source for source, page in OWN_PAGES.items()}
    folder = posixpath.dirname(outside.get(path) or f"docs/{path}")

    def mend(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        return picture + _link(text, target, folder, posixpath.dirname(path), config.repo_url)

    return _outside_of_code(markdown, mend)


def on_page_content(content: str, **_: Any) -> str:
    """Converts equations to MathML."""
    return _MATH.sub(_mathml, content)


def public_names() -> list[str]:
    """Returns the package's public names except methods, parsed from its source."""
    path = ROOT / "tf_redsync" / "__init__.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES":
            return list(ast.literal_eval(node.value))
    raise PluginError(f"{path} has no `_MODULES`")


@dataclasses.dataclass(frozen=True)
class RegisteredMethod:
    """A class with `@register`, parsed from its source.

    Attributes:
        name: Name of the class.
        module: Its module.
        summary: The first line of its docstring.
        bits: Bits that it sends per element.
    """

    name: str
    module: str
    summary: str
    bits: str

    @property
    def page(self) -> str:
        """Its page in docs/."""
        return f"{self.module.split('.')[1]}/{self.name}.md"

    def as_page(self) -> str:
        """Returns a page with its docstring, for a method without a page of equations."""
        return f"# {self.name}\n\n::: {self.module}.{self.name}\n"

    def as_row(self) -> str:
        """Returns a row for the list of methods."""
        cells = (c.replace("|", "\\|") for c in (self.summary, self.bits))
        return f"| [`{self.name}`]({self.name}.md) | {' | '.join(cells)} |\n"


@functools.cache
def registered_methods() -> tuple[RegisteredMethod, ...]:
    """Returns the methods with `@register`, by name; codings have a page of their own."""
    found = []
    for path in [p for f in FOLDERS for p in (ROOT / "tf_redsync" / f).rglob("*.py")]:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            marks = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
            if isinstance(node, ast.ClassDef) and "register" in marks and ".codings." not in module:
                summary = (ast.get_docstring(node) or "").partition("\n")[0].rstrip(".")
                found.append(RegisteredMethod(node.name, module, summary, _bits(node)))
    return tuple(sorted(found, key=lambda m: m.name))


def _bits(node: ast.ClassDef) -> str:
    """Returns the bits per element in a class's `traits`, or "" if a base class declares them."""
    declared = (
        argument
        for function in node.body
        if isinstance(function, ast.FunctionDef) and function.name == "traits"
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        for argument in call.keywords
    )
    return next((str(ast.literal_eval(a.value)) for a in declared if a.arg == "bits"), "")


def _further_rows(markdown: str, folder: str) -> str:
    """Returns a table of the folder's methods that are missing in its list."""
    rows = [
        method.as_row()
        for method in registered_methods()
        if method.page.startswith(f"{folder}/") and f"| [`{method.name}`]" not in markdown
    ]
    head = "\n## More\n\n| method | | bits per element |\n|---|---|---|\n"
    return head + "".join(rows) if rows else ""


def undescribed() -> list[str]:
    """Returns the public names without an entry on any page."""
    pages = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs").rglob("*.md"))
    described = set(re.findall(r"^::: tf_redsync\.(\w+)", pages, flags=re.MULTILINE))
    return [name for name in public_names() if name not in described]


def _link(text: str, target: str, folder: str, site_folder: str, repo_url: str | None) -> str:
    """Returns a link of a page in `folder` of the project, for the site."""
    path, hash_, anchor = target.partition("#")
    if not path or re.match(r"\w+:", target):
        return f"[{text}]({target})"
    found = posixpath.normpath(posixpath.join(folder, path))
    if found in OWN_PAGES or found.startswith("docs/"):
        on_site = OWN_PAGES.get(found) or found.removeprefix("docs/")
        text = _title(ROOT / found) if text == posixpath.basename(found) else text
        if (ROOT / found).is_dir():  # a folder is no page
            return f"[{text}]({repo_url}/tree/main/{found})" if repo_url else text
        return f"[{text}]({posixpath.relpath(on_site, site_folder or '.')}{hash_}{anchor})"
    if not (ROOT / found).exists():
        raise PluginError(f"a page in {folder or 'the root'} links to {target}, which is not there")
    if found == "README.md" and not anchor:
        return f"[{text}]({posixpath.relpath('index.md', site_folder or '.')})"
    return f"[{text}]({repo_url}/blob/main/{found}{hash_}{anchor})" if repo_url else text


def _title(page: Path) -> str:
    """Returns a page's first heading, or its name if it has none."""
    lines = page.read_text(encoding="utf-8").splitlines() if page.is_file() else []
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), page.name)


def _outside_of_code(markdown: str, mend: Any) -> str:
    """Replaces links; code is unchanged, also inside of a link's text."""
    held: list[str] = []

    def hold(code: re.Match[str]) -> str:
        held.append(code.group())
        return f"\0{len(held) - 1}\0"

    text = _LINK.sub(mend, _CODE.sub(hold, markdown))
    return re.sub("\0(\\d+)\0", lambda m: held[int(m.group(1))], text)


def _mathml(match: re.Match[str]) -> str:
    tag, latex = match.groups()
    display = "block" if tag == "div" else "inline"
    result = convert(html.unescape(latex).strip(), display=display)
    unknown = re.search(r"<mi>(&|\\\w+)</mi>", result)
    if unknown:
        raise PluginError(f"`{unknown.group(1)}` in an equation is not understood: {latex}")
    return f'<div class="equation">{result}</div>' if tag == "div" else result
