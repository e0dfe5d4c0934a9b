"""Import layers of the package: no module imports a higher layer, and no imports are circular."""

import ast
import functools
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tf_redsync as rs

PACKAGE = Path(rs.__file__).parent

# From the lowest layer to the highest. A unit is a folder or a top-level module. A unit may import
# its own layer and lower ones.
LAYERS = (
    (
        "autograph.py",
        "checks.py",
        "config.py",
        "environment.py",
        "errors.py",
        "patching.py",
        "requirements.py",
        "stopping.py",
        "tables.py",
        "version.py",
    ),
    ("building/",),
    ("ops/",),
    ("outer.py",),
    ("exchange/",),
    ("network/", "codings/", "schedules.py"),
    ("cluster/", "methods/"),
    ("contrib/", "policy.py"),
    ("explanation.py", "summary.py", "auto/"),
    ("step/",),
    ("state/", "metrics/"),
    ("keras/",),
    ("strategy.py", "optimizer.py", "callbacks/", "addons.py", "saving.py"),
    ("expressions.py",),
    ("planning/",),
    ("cli/",),
    ("flags.py",),
    ("launch.py", "__main__.py", "__init__.py"),
)


def sources(package):
    return {p.relative_to(package).as_posix(): p.read_text() for p in package.rglob("*.py")}


def layer_of(module):
    found = [number for number, units in enumerate(LAYERS) if unit_of(module) in units]
    assert found, f"{module} belongs to no layer"
    return found[0]


def unit_of(module):
    """Returns the folder of a module, or the module itself at the top level."""
    folder, slash, _ = module.partition("/")
    return folder + slash


@functools.cache
def package_imports(text):
    """Returns the imports from this package in a source text, as pairs `(name, package)`."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports must be absolute"
            found += [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
    return [pair for pair in found if pair[0].split(".")[0] == "tf_redsync"]


def imports(texts):
    """Returns each module's imports, including those in functions and for types."""

    def file_of(name):
        path = name.removeprefix("tf_redsync").removeprefix(".").replace(".", "/")
        candidates = (f"{path}.py", f"{path}/__init__.py".removeprefix("/"))
        return next((path for path in candidates if path in texts), None)

    return {
        module: {file_of(name) or file_of(package) for name, package in package_imports(text)}
        - {module}
        for module, text in texts.items()
    }


def upward(texts):
    return [
        f"{module} imports {other}"
        for module, others in sorted(imports(texts).items())
        for other in sorted(others)
        if layer_of(other) > layer_of(module)
    ]


def test_no_upward_imports():
    texts = sources(PACKAGE)
    assert upward(texts) == []
    found = imports(texts)
    assert "exchange/driver.py" in found["step/gradient_exchange.py"] | found["step/workers.py"]
    assert "strategy.py" in found["__init__.py"]  # for types only
    of_contrib = {m for m, others in found.items() if any(o.startswith("contrib/") for o in others)}
    assert {m for m in of_contrib if not m.startswith("contrib/")} == {"__init__.py"}


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("ops/wire.py", "from tf_redsync.network import groups"),
        ("ops/selection.py", "def f():\n    from tf_redsync import exchange"),
        ("methods/common/sparsifier.py", "from tf_redsync.step import plan"),
        ("methods/topk.py", "from tf_redsync.contrib import SIDCo"),
        ("step/masks.py", "import tf_redsync.keras.keras3"),
        ("policy.py", "if TYPE_CHECKING:\n    from tf_redsync import DistributedOptimizer"),
    ],
)
def test_upward_imports_are_detected(module, line):
    texts = sources(PACKAGE)
    texts[module] += f"\n{line}\n"
    assert len(upward(texts)) == 1 and upward(texts)[0].startswith(f"{module} imports ")


def test_no_circular_imports():
    texts = sources(PACKAGE)
    TopologicalSorter(imports(texts)).prepare()
    units = {}
    for module, others in imports(texts).items():
        units.setdefault(unit_of(module), set()).update(map(unit_of, others))
    TopologicalSorter({unit: others - {unit} for unit, others in units.items()}).prepare()
    texts["exchange/requests.py"] += "\nfrom tf_redsync.exchange import driver\n"
    with pytest.raises(CycleError):
        TopologicalSorter(imports(texts)).prepare()
