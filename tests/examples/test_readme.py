"""What README.md and CONTRIBUTING.md show exists: code parses; names, flags and files are real."""

import ast
import inspect
import pathlib
import re
import shlex

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md"]
_FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def blocks(page, language):
    """The fenced blocks of one language, indentation removed."""
    found = []
    for indent, name, text in _FENCE.findall((ROOT / page).read_text()):
        if name == language:
            found.append(re.sub(f"^{indent}", "", text, flags=re.MULTILINE))
    return found


def commands(page):
    """Every shell command of a page as words, without comments and environment settings."""
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"\w+=", words[0]):
                words = words[1:]
            if words and words[0] != "export":
                yield words


def defined_flags():
    """Names of the absl flags of examples/train_digits.py."""
    text = (ROOT / "examples/train_digits.py").read_text()
    return {
        node.args[0].value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr.startswith("DEFINE_")
    }


def dotted(node):
    """`a.b.c` for an attribute chain, else None."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def test_pages_have_code():
    assert len(blocks("README.md", "python")) >= 2
    assert len(blocks("README.md", "bash")) >= 4
    assert {"method", "momentum", "density", "epochs", "optimizer", "data_dir"} <= defined_flags()


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_use_what_exists(page):
    import tf_redsync as rs

    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            name = dotted(node)
            if name and name.startswith("rs."):
                value = rs
                for part in name.split(".")[1:]:
                    value = getattr(value, part)
            if isinstance(node, ast.Call) and (dotted(node.func) or "").startswith("rs."):
                function = rs
                for part in dotted(node.func).split(".")[1:]:
                    function = getattr(function, part)
                # Raises TypeError for an argument that does not exist.
                keywords = {k.arg: None for k in node.keywords}
                inspect.signature(function).bind(*[None] * len(node.args), **keywords)


@pytest.mark.parametrize("page", PAGES)
def test_commands_name_existing_scripts_modules_and_flags(page):
    flags = defined_flags()
    seen = 0
    for words in commands(page):
        for word in words:
            if re.fullmatch(r"[\w./]+\.(py|sh)", word) or word.startswith(("./", "tests/")):
                assert (ROOT / word).exists(), words
                seen += 1
        if "-m" in words and words[0] == "python":
            module = words[words.index("-m") + 1]
            assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), words
        if "examples/train_digits.py" in words:
            own = words[words.index("examples/train_digits.py") + 1 :]
            used = {re.match(r"--(\w+)", word).group(1) for word in own}
            assert used and used <= flags, words
    assert seen


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text()):
        if not target.startswith("https://"):
            assert (ROOT / target).exists(), target


def test_table_of_the_readme_has_the_columns_the_quickstart_prints():
    text = (ROOT / "README.md").read_text()
    assert re.search(r"^dense +0\.\d+ +[\d,]+ +1\.0x", text, re.MULTILINE)
    assert re.search(r"^redsync +0\.\d+ +[\d,]+ +\d+\.\dx", text, re.MULTILINE)
