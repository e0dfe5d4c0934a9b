"""Lists the functions of the package that one traced step runs through (the step's code path).

    python -m tests.road          prints the path of `CASES["TopK"]` as in docs/archive/code-path.md
    python -m tests.road --write  updates docs/archive/code-path.md

Two workers trace `optimizer.apply_gradients` once, in a custom loop with Keras 3, and a profile
function records every call, in the thread of the replica and in the main thread, which runs the
optimizer's update. Each named function counts once, with the lines of its source without
docstrings and blank lines.
"""

import argparse
import ast
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "docs" / "archive" / "code-path.md"
BEGIN, END = "<!-- road: begin -->\n", "<!-- road: end -->\n"
# Inner optimizer, method, and budget: files, functions, lines.
CASES = {
    "TopK": ("SGD(0.1)", "TopK(density=0.01)", (21, 105, 735)),
    "CodedGMC": ("SGD(0.1)", "CodedGMC()", (24, 118, 840)),
    "HalfPrecision": ("SGD(0.1)", "HalfPrecision()", (23, 107, 675)),
    "Adam with CodedTopK": ("Adam(1e-3)", "CodedTopK()", (22, 112, 795)),
}


def walk(names):
    """Code path of each case as `[[file, function, first line, lines], ...]`; runs in a worker."""
    import json

    import keras
    import tensorflow as tf

    import tf_redsync as rs

    package = Path(rs.__file__).parent
    strategy = rs.MultiWorkerMirroredStrategy()

    def path_of(inner, method):
        with strategy.scope():
            layers = [keras.layers.Dense(n) for n in (256, 256, 10)]
            model = keras.Sequential([keras.layers.Input((64,)), *layers])
            optimizer = rs.DistributedOptimizer(
                eval(f"keras.optimizers.{inner}"), eval(f"rs.{method}")
            )
            optimizer.build(model.trainable_variables)
        seen, applying = {}, []

        def note(frame, event, argument):
            code = frame.f_code
            ours = code.co_filename.startswith(f"{package}/")
            if applying and ours and event == "call" and "<" not in code.co_name:  # no lambdas
                seen.setdefault((code.co_filename, code.co_firstlineno, code.co_name), None)

        def replica():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(tf.ones([4, 64]), training=True) ** 2) / 2
            grads = tape.gradient(loss, model.trainable_variables)
            sys.setprofile(note)
            applying.append(True)
            try:
                optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            finally:
                applying.clear()
                sys.setprofile(None)
            return loss

        sys.setprofile(note)
        try:
            tf.function(lambda: strategy.run(replica), autograph=False)()
        finally:
            sys.setprofile(None)
        return [
            [Path(file).relative_to(package).as_posix(), name, first, sorted(lines(file, first))]
            for file, first, name in seen
        ]

    return {"roads": json.dumps({n: path_of(*CASES[n][:2]) for n in names})}


def lines(file, first):
    """Line numbers of the function that begins at line `first`, without its docstring."""
    text = Path(file).read_text()
    found = None
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            if first in (start, node.lineno) and (
                found is None or node.end_lineno >= found.end_lineno
            ):
                found = node
    if found is None:  # a comprehension: its lines belong to the function
        return set()
    numbers = set(range(found.lineno, found.end_lineno + 1))
    if isinstance(found, ast.FunctionDef) and ast.get_docstring(found) is not None:
        docstring = found.body[0]
        numbers -= set(range(docstring.lineno, docstring.end_lineno + 1))
    whole = text.split("\n")
    return {n for n in numbers if whole[n - 1].strip()}


def size(road):
    """Number of files, functions and lines of a code path."""
    by_file = {}
    for file, _, _, numbers in road:
        by_file.setdefault(file, set()).update(numbers)
    return len(by_file), len(road), sum(map(len, by_file.values()))


def as_list(road):
    """The code path as a Markdown list, files in the order of their first call."""
    by_file = {}
    for file, name, _, _ in road:
        functions = by_file.setdefault(file, [])
        if name not in functions:
            functions.append(name)
    files, functions, counted = size(road)
    rows = [f"1. `{file}`: {', '.join(f'`{n}`' for n in found)}" for file, found in by_file.items()]
    inner, method, _ = CASES["TopK"]
    head = f"`{method}` and `{inner}`: {files} files, {functions} functions, {counted} lines."
    return "\n".join([head, "", *rows, ""])


def in_document(text):
    """The code path between the page's markers."""
    return text.partition(BEGIN)[2].partition(END)[0]


def main(argv=None):
    """Prints the code path or writes it into the page."""
    import json

    from tests.distributed.cluster import run_workers

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write it to {DOCUMENT.name}")
    options = parser.parse_args(argv)
    (saved, _) = run_workers(walk, args=(["TopK"],))
    markdown = as_list(json.loads(saved["roads"])["TopK"])
    if not options.write:
        print(markdown, end="")
        return
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(text.replace(BEGIN + in_document(text), BEGIN + markdown))


if __name__ == "__main__":
    main()
