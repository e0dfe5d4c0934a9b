"""Flags of absl for scripts: what the workers exchange, and where a run is recorded.

    from absl import app
    from tf_redsync import flags

    flags.define(exchange="CodedGMC(momentum=0.9)")

    def main(argv):
        with strategy.scope():
            optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), **flags.exchange())

    app.run(main)

`train.py --exchange="RedSync(density=0.01)"`, `--exchange=codedtopk --density=0.03`, and so on. The
flags are checked while the command line is read, before a worker waits for another one. All workers
have to get the same ones: the first step compares what they have made of them.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from tf_redsync import config, expressions
from tf_redsync.exchange.method import Method

_NAMES = ("exchange", "exchange_config", "density")


def define(
    exchange: str = "Auto()", values: flags.FlagValues = flags.FLAGS, run_dir: str | None = None
) -> None:
    """Define `--exchange`, `--exchange_config`, `--density` and `--run_dir`.

    Args:
        exchange: Default of `--exchange`.
        values: Where to define them.
        run_dir: Default of `--run_dir`.
    """
    flags.DEFINE_string(
        "exchange",
        exchange,
        "What the workers exchange: a method or a policy as in a program, such as "
        "'RedSync(density=0.01, momentum=0.9)', also with named arguments of "
        "DistributedOptimizer behind it, or a method's name alone, in any case.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "exchange_config",
        None,
        "In place of --exchange: a config of a method or policy as JSON, as "
        "tf_redsync.config.serialize makes it, or a file with one.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "density",
        None,
        "Density of the method, in place of its own: fraction of the elements that is sent.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "run_dir",
        run_dir,
        "Directory for tf_redsync.callbacks.CompressionMetrics and tf-redsync report.",
        flag_values=values,
    )
    register: Callable[..., None] = flags.register_multi_flags_validator  # untyped
    register(_NAMES, _check, flag_values=values)


def exchange(values: flags.FlagValues = flags.FLAGS) -> dict[str, Any]:
    """Return what the flags say, as arguments of `DistributedOptimizer`.

    Args:
        values: Where they were defined.

    Returns:
        `method`, and what else `--exchange` names, `warm_up` for example.

    Raises:
        ValueError: for flags that do not describe a method.
    """
    return _arguments({name: getattr(values, name) for name in _NAMES})


def _check(values: dict[str, Any]) -> bool:
    try:
        _arguments(values)
    except ValueError as error:
        raise flags.ValidationError(str(error)) from error
    return True


def _arguments(values: dict[str, Any]) -> dict[str, Any]:
    if values["exchange_config"] is None:
        found = expressions.evaluate(_called(values["exchange"]))
        method, options = found.method, found.options
    else:
        method, options = _configured(values["exchange_config"]), {}
    if values["density"] is not None:
        method = _with_density(method, values["density"])
    return {"method": method, **options}


def _called(text: str) -> str:
    """An expression for a name alone."""
    if not text.isidentifier():
        return text
    from tf_redsync.auto import Auto

    names = [n for n, c in config.registered().items() if issubclass(c, (Method, Auto))]
    folded = {name.lower(): name for name in names}
    if text.lower() in folded:
        return f"{folded[text.lower()]}()"
    close = difflib.get_close_matches(text.lower(), folded, 1)
    hint = f" Did you mean {folded[close[0]]}?" if close else f" Methods: {', '.join(names)}."
    raise ValueError(f"there is no method {text!r}.{hint}")


def _configured(text: str) -> Any:
    path = Path(text)
    inline = text.lstrip().startswith("{")
    if not inline and not path.is_file():
        raise ValueError(
            f"--exchange_config must be JSON, or a file with JSON. Received: {text!r}, which is "
            "no file"
        )
    try:
        found = json.loads(text if inline else path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--exchange_config is no JSON: {error}. Received: {text!r}") from error
    return config.from_config(found)


def _with_density(method: Any, density: float) -> Any:
    if "density" not in [f.name for f in dataclasses.fields(method)]:
        name = type(method).__name__
        raise ValueError(f"--density is for methods that have one. Received: {density} with {name}")
    return dataclasses.replace(method, density=density)
