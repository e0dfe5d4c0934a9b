"""Source rules: private names, variables, randomness, sizes, doctests."""

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path

import keras
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.python.distribute import cross_device_ops, cross_device_utils
from tensorflow.python.eager import context

import tf_redsync as rs
from tests.loops import loop

PACKAGE = Path(rs.__file__).parent
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
TREES = {name: ast.parse(text) for name, text in SOURCES.items()}

# The only files that may use private names of TensorFlow and Keras.
ADAPTERS = (
    "keras/amsgrad.py",
    "keras/first_batch.py",
    "keras/keras3.py",
    "keras/tf_keras.py",
    "keras/legacy.py",
    "keras/muon.py",
    "keras/fit_resume.py",
    "keras/slots.py",
)
TENSORFLOW_ADAPTERS = (
    "autograph.py",
    "network/collectives.py",
    "network/strategies.py",
    "cluster/coordination.py",
    "cluster/device_iterators.py",
    "network/groups.py",
)
PRIVATE_NAMES_ALLOWED = (
    *ADAPTERS,
    *TENSORFLOW_ADAPTERS,
    "network/initial_values.py",
    "keras/adapter.py",
)


def test_there_are_sources():
    assert len(SOURCES) > 20 and all(name in SOURCES for name in PRIVATE_NAMES_ALLOWED)


def test_contributing_lists_the_modules_with_private_tensorflow_names():
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rules = text[text.index("## Rules") :]
    listed = {name for name in re.findall(r"`([\w/]+\.py)`", rules) if name in SOURCES}
    modules = {name for name in PRIVATE_NAMES_ALLOWED if not name.startswith("keras/")}
    assert modules <= listed, modules - listed


def imported_modules(tree):
    """Returns every module name that a tree imports, including imports in functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted_name(node) -> str:
    """Returns `a.b.c` for an attribute of names, else its known part."""
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


# ------------------------------------------------------------------------------ private names


def violations(rule, modules=SOURCES) -> dict[str, list[str]]:
    """Returns the violations of `rule(tree)` by module."""
    found = {module: sorted(set(rule(TREES[module]))) for module in modules}
    return {module: names for module, names in found.items() if names}


def calls(tree):
    """Returns the name and the line of every call in a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield dotted_name(node.func), node.lineno


def private_modules(tree) -> list[str]:
    return [
        n for n in imported_modules(tree) if re.match(r"tensorflow\.python|(tf_)?keras\.src", n)
    ]


def test_only_seams_import_private_modules():
    found = violations(private_modules)
    assert set(found) <= set(PRIVATE_NAMES_ALLOWED), found
    for module in TENSORFLOW_ADAPTERS:
        assert all(n.startswith("tensorflow.python") for n in found[module])


def test_every_seam_needs_its_exemption():
    names = defined_names()
    used = {*violations(private_modules)}
    used |= {*violations(lambda tree: private_attributes_of_others(tree, names))}
    assert set(PRIVATE_NAMES_ALLOWED) - used == set(), "these exemptions are not needed"


def test_private_modules_are_not_accessed_as_attributes():
    """For example `tf.python.x`; `addons.py` names `keras.src` in strings, to alias it."""

    def reached(tree):
        names = [dotted_name(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        word = r"\btf\.python\b|\bkeras\.src\b|\btensorflow\.python\b"
        return [name for name in names if re.search(word, name)]

    assert reached(ast.parse("tf.python.eager.context")), "the search matches no attribute"
    assert violations(reached) == {}


def defined_names() -> set[str]:
    """Returns private names that the package defines: attributes, methods, functions, fields."""
    names = set()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if dotted_name(node.value) == "self":
                    names.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
            elif isinstance(node, ast.Assign):
                names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return names


# Private names of the standard library are exempt.
STANDARD_LIBRARY = {"sys._getframe", "sys._current_frames", "os._exit"}


def private_attributes_of_others(tree, own: set[str]) -> list[str]:
    """Returns uses of `x._name` where `x` is not `self` and the package defines no `_name`."""
    return [
        f"line {node.lineno}: {dotted_name(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.match(r"_[a-z]", node.attr)
        and dotted_name(node) not in STANDARD_LIBRARY
        and not (dotted_name(node.value) in ("self", "cls") and node.attr in own)
    ]


def test_only_seams_use_foreign_private_attributes():
    names = defined_names()
    modules = set(SOURCES) - set(PRIVATE_NAMES_ALLOWED)
    assert violations(lambda tree: private_attributes_of_others(tree, names), modules) == {}


@pytest.mark.parametrize(
    "text",
    [
        "strategy.extended._cross_device_ops",
        "self.strategy.extended._cross_device_ops._launchers[0]",
        "self._all_reduce_sum_gradients",
        "f(x)._launchers",
    ],
)
def test_private_attribute_search(text):
    assert private_attributes_of_others(ast.parse(text), {"_launchers", "_cross_device_ops"})
    assert not private_attributes_of_others(ast.parse("self._launchers"), {"_launchers"})


def test_private_keras_names_exist():
    """Fails if Keras renames a name that the adapters replace; then fix the adapter."""
    optimizer = keras.optimizers.SGD(0.1)
    assert list(inspect.signature(optimizer._all_reduce_sum_gradients).parameters) == [
        "grads_and_vars"
    ]
    assert list(inspect.signature(optimizer._distributed_tf_update_step).parameters) == [
        "distribution",
        "grads_and_vars",
        "learning_rate",
    ]
    # Keras must look both up on the instance, where the adapter replaces them.
    source = inspect.getsource(type(optimizer)._backend_update_step)
    assert "self._all_reduce_sum_gradients(" in source
    assert "self._distributed_tf_update_step" in source
    # Callers of the update, see `keras/keras3.py`.
    source = inspect.getsource(keras.optimizers.Optimizer._backend_apply_gradients)
    for name in (
        "_apply_weight_decay",
        "_update_model_variables_moving_average",
        "_overwrite_model_variables_with_average_value",
    ):
        assert f"self.{name}(" in source
    assert hasattr(keras.optimizers.LossScaleOptimizer(optimizer), "check_finite")
    assert list(inspect.signature(optimizer._get_variable_index).parameters) == ["variable"]


def test_private_tf_keras_names_exist():
    optimizer = tf_keras.optimizers.SGD(0.1)
    assert list(inspect.signature(optimizer.aggregate_gradients).parameters) == ["grads_and_vars"]
    assert "distribution" in inspect.signature(optimizer._distributed_apply_gradients_fn).parameters
    assert list(inspect.signature(optimizer._apply_weight_decay).parameters) == ["variables"]
    legacy = tf_keras.optimizers.legacy.SGD(0.1)
    assert list(inspect.signature(legacy._aggregate_gradients).parameters) == ["grads_and_vars"]
    assert "distribution" in inspect.signature(legacy._distributed_apply).parameters
    for name in ("_create_all_weights", "_get_hyper", "_set_hyper"):
        assert callable(getattr(legacy, name))
    rate = keras.optimizers.schedules.CosineDecay(0.1, 9)
    assert vars(keras.optimizers.SGD(rate))["_learning_rate"] is rate
    rate = tf_keras.optimizers.schedules.CosineDecay(0.1, 9)
    assert vars(tf_keras.optimizers.SGD(rate))["_learning_rate"] is rate
    assert tf_keras.optimizers.legacy.SGD(rate)._hyper["learning_rate"] is rate


def test_private_tensorflow_names_exist():
    launcher = cross_device_utils.CollectiveReplicaLauncher
    for name in ("_next_instance_key", "_get_ordering_token", "batch_all_reduce", "_all_gather"):
        assert callable(getattr(launcher, name))
    assert hasattr(context.context(), "_collective_ops_server_def")
    # Replaced on instances: TensorFlow must look it up there.
    assert inspect.getsource(launcher.all_gather).count("self._all_gather(") == 2
    source = inspect.getsource(launcher.__init__)
    names = ("_group_key", "_group_size", "_device", "_options", "_collective_keys")
    for name in (*names, "_ordering_token"):
        assert f"self.{name} =" in source
    arguments = ["self", "group_key", "group_size", "collective_keys", "device", "options"]
    assert list(inspect.signature(launcher.__init__).parameters) == arguments
    assert cross_device_utils.CollectiveKeys(5).get_group_key(["CPU:0"]) == 5
    assert "self._launchers" in inspect.getsource(cross_device_ops.CollectiveAllReduce)
    strategy = tf.distribute.MultiWorkerMirroredStrategy
    extended = inspect.getsource(inspect.getmodule(strategy))
    for name in (
        "_cross_device_ops",
        "_host_cross_device_ops",
        "_num_workers",
        "_id_in_cluster",
        "_cluster_spec",
    ):
        assert f"self.{name} =" in extended


# ---------------------------------------------------------------------------- variables, state


def test_variables_are_created_in_one_module():
    constructors = ("tf.Variable", "tf.compat.v1.Variable")
    found = violations(lambda tree: [name for name, _ in calls(tree) if name in constructors])
    assert list(found) == ["step/state_variables.py"], found


def test_no_global_random_generator():
    allowed = r"(experimental\.)?stateless_|default_rng|Generator"
    # The operating system's `random.SystemRandom` has no state to share.
    word = rf"(np|numpy|tf|keras)\.random\.(?!{allowed})|random\.(?!SystemRandom)"

    def drawn(tree):
        return [f"line {line}: {name}" for name, line in calls(tree) if re.match(word, name)]

    assert drawn(ast.parse("np.random.randn(3)")) and drawn(ast.parse("random.random()"))
    assert violations(drawn) == {}


# ---------------------------------------------------------------------------------- folders

# Names that a folder must not use; test_layers.py checks imports from this package.
# "tf.distribute" and "tf.Variable" are attributes, the others are modules.
FORBIDDEN = {
    "methods/": ("tf.distribute", "tf.Variable", "keras", "tf_keras",
                 "tf_redsync.network.collectives", "tf_redsync.network.strategies",
                 "tf_redsync.step.state_variables"),
    "contrib/": ("tf.distribute", "tf.Variable", "keras", "tf_keras",
                 "tf_redsync.network.collectives", "tf_redsync.network.strategies",
                 "tf_redsync.step.state_variables"),
    "codings/": ("tf.distribute", "tf.Variable", "keras", "tf_keras"),
    "schedules.py": ("tf.distribute", "tf.Variable", "keras"),
    "policy.py": ("tf.distribute", "tf.Variable", "keras"),
    "exchange/": ("tf.distribute", "tf.Variable", "keras", "tf_keras"),
    "network/": ("keras", "tf_keras"),
    "cluster/": ("keras", "tf_keras"),
    "step/": ("keras", "tf_keras"),
    "state/": ("keras", "tf_keras"),
    "state/checkpoint_": ("tf", "tensorflow"),
    "ops/": ("tf.distribute", "keras"),
    "building/": ("tf", "tensorflow", "keras", "tf_keras"),
}  # fmt: skip


def test_lower_folders_do_not_use_higher_ones():
    for prefix, words in FORBIDDEN.items():
        modules = [module for module in SOURCES if module.startswith(prefix)]
        assert modules, f"there is no module {prefix}"

        def known(tree, words=words):
            names = [dotted_name(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
            names += imported_modules(tree)
            return [n for n in names for w in words if n == w or n.startswith(w + ".")]

        assert violations(known, modules) == {}, prefix


# ------------------------------------------------------------------------------------ sizes

LONG_FUNCTIONS = {
    "cli/launch.py:run": "one argument a line, and what is made of them",
    "ops/selection.py:accumulate_and_select": "one argument a line, twice",
    "ops/reference/selection.py:accumulate_and_select": "the signature again, and the op's steps",
    "ops/reference/selection.py:_threshold_search": "one loop, its conditions as local functions",
}
MAX_FUNCTION = 40


def code_lines(function) -> int:
    """Returns the number of lines of a function without its docstring."""
    body = function.body
    docstring = body[0] if ast.get_docstring(function) is not None else None
    lines = function.end_lineno - function.lineno + 1
    return lines - (docstring.end_lineno - docstring.lineno + 1 if docstring else 0)


def test_functions_are_short():
    long = {
        f"{module}:{node.name}"
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and code_lines(node) > MAX_FUNCTION
    }
    assert long == set(LONG_FUNCTIONS), f"split functions of more than {MAX_FUNCTION} lines"


# -------------------------------------------------------------------------------- docstrings


@loop("module", sorted(m for m, text in SOURCES.items() if ">>> " in text))
def test_doctests(module):
    name = "tf_redsync." + module.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0 and result.failed == 0


def test_there_are_doctests():
    found = sum(text.count(">>> ") for text in SOURCES.values())
    assert found >= 5


def test_public_names_have_docstrings():
    assert [n for n in rs.__all__ if not (inspect.getdoc(getattr(rs, n)) or "").strip()] == []


def test_modules_start_with_a_docstring():
    found = [module for module, tree in TREES.items() if not ast.get_docstring(tree)]
    assert not found, "these modules need a docstring above their imports"


def test_version_matches_the_project():
    text = (PACKAGE.parent / "pyproject.toml").read_text()
    assert f'version = "{rs.__version__}"' in text
