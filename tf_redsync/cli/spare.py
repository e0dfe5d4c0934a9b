"""Program of a spare process: imports TensorFlow, waits, and becomes a worker.

The command line is the worker's, without the interpreter. The input is one line of JSON with the
variables of the attempt; if it ends without a line, the process exits. The launcher's side is
`prewarm.py`. The top of the module imports only modules that Python has already loaded, because
the worker's modules need its own `sys.path`.
"""

import os
import sys


def _import() -> None:
    """Import TensorFlow, Keras and tf_redsync as the script's first lines would."""
    import importlib

    try:
        importlib.import_module("tf_redsync")
    except Exception:  # the script will raise the same error
        pass


def _receive() -> dict[str, str]:
    """Return the attempt's variables; then the input is /dev/null, as for other workers."""
    import json

    text = b""
    while not text.endswith(b"\n"):
        data = os.read(0, 1 << 16)
        if not data:
            os._exit(0)
        text += data
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    variables: dict[str, str] = json.loads(text)
    return variables


def _run_script(script: str) -> None:
    """Run a script in a new `__main__`, with the attributes that `python SCRIPT` sets."""
    import types
    from importlib.machinery import SourceFileLoader

    path = os.path.abspath(script)
    main = types.ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    main.__dict__.update(
        __file__=path, __cached__=None, __loader__=loader, __builtins__=__builtins__
    )
    sys.modules["__main__"] = main
    with open(path, "rb") as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _run_as_worker(words: list[str]) -> None:
    """Set the state of an interpreter that was started with `words`, import, wait and run them."""
    module = words[1] if words[0] == "-m" else None
    sys.orig_argv = [sys.executable, *words]
    sys.argv = ["-m", *words[2:]] if module else list(words)
    if not getattr(sys.flags, "safe_path", False):  # since Python 3.11
        sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(words[0]))
    _import()
    os.environ.update(_receive())
    if module:
        import runpy

        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        _run_script(words[0])


if __name__ == "__main__":
    _run_as_worker(sys.argv[1:])
