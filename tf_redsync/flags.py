"""Absl flags for training scripts: the method of the exchange, and the directory of the records.

    from absl import app
    from tf_redsync import flags

    flags.define(exchange="CodedGMC(momentum=0.9)")

    def main(argv):
        with strategy.scope():
            optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), **flags.exchange())

    app.run(main)

Run `train.py --exchange="RedSync(density=0.01)"` or `--exchange=codedtopk --density=0.03`. Parsing
the command line validates the flags, before workers wait for each other. All workers need the same
flags: the first step compares their methods and raises if they differ.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from tf_redsync import checks, config, expressions
from tf_redsync.exchange.method import Method
from tf_redsync.policy import Policy

_NAMES = ("exchange", "exchange_config", "density")
flags.disclaim_key_flags()  # so that `--help` lists them among those of the script


def define(
    exchange: str | None = "Auto()",
    values: flags.FlagValues = flags.FLAGS,
    run_dir: str | None = None,
) -> None:
    """Define `--exchange`, `--exchange_config`, `--density` and `--run_dir`.

    Args:
        exchange: Default of `--exchange`; with `None` the user must set one of the flags.
        values: The container of the flags.
        run_dir: Default of `--run_dir`.
    """
    flags.DEFINE_string(
        "exchange",
        exchange,
        "Method or policy of the exchange as a Python expression, such as "
        "'RedSync(density=0.01, momentum=0.9)', optionally followed by keyword arguments of "
        "DistributedOptimizer; or the name of a method, in any case.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "exchange_config",
        None,
        "Replaces --exchange: the config of a method or policy from "
        "tf_redsync.methods.serialize, as JSON or as the path of a JSON file.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "density",
        None,
        "Overrides the density of the method: the fraction of the elements that is sent.",
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
    """Return the arguments of `DistributedOptimizer` that the flags specify.

    Args:
        values: The container of the flags.

    Returns:
        `method`, and the keyword arguments of `--exchange`, such as `warm_up`.

    Raises:
        ValueError: the flags do not describe a method.
    """
    return _arguments({name: getattr(values, name) for name in _NAMES})


def _check(values: dict[str, Any]) -> bool:
    try:
        _arguments(values)
    except ValueError as error:
        raise flags.ValidationError(str(error)) from error
    return True


def _arguments(values: dict[str, Any]) -> dict[str, Any]:
    if values["exchange_config"] is not None:
        method, options = _configured(values["exchange_config"]), {}
    elif values["exchange"] is None:
        raise ValueError("--exchange or --exchange_config is required. Received: exchange=None")
    else:
        evaluated = expressions.evaluate(_called(values["exchange"]))
        method, options = evaluated.method, evaluated.options
        _check_options(options, values["exchange"])
    if values["density"] is not None:
        method = _with_density(method, values["density"])
    return {"method": method, **options}


def _check_options(options: dict[str, Any], text: str) -> None:
    """Check the names of keyword arguments against those of `DistributedOptimizer`."""
    from tf_redsync.optimizer import DistributedOptimizer

    known = inspect.signature(DistributedOptimizer.__new__).parameters
    names = [name for name in known if name not in ("cls", "optimizer", "method")]
    for name in options:
        if name not in names:
            hint = checks.suggestion(name, names)
            raise ValueError(
                f"--exchange has an unknown argument `{name}`. {hint} Received: {text!r}"
            )


def _called(text: str) -> str:
    """Return an expression; for the name of a method in any case, a call of it."""
    if not text.isidentifier():
        return text
    from tf_redsync.auto import Auto

    names = [n for n, c in config.registered().items() if issubclass(c, (Method, Auto))]
    folded = {name.lower(): name for name in names}
    if text.lower() in folded:
        return f"{folded[text.lower()]}()"
    close = difflib.get_close_matches(text.lower(), folded, 1)
    hint = f" Did you mean {folded[close[0]]}?" if close else f" Methods: {', '.join(names)}."
    raise ValueError(f"unknown method {text!r}.{hint}")


def _configured(text: str) -> Any:
    from tf_redsync.auto import Auto

    try:
        made = config.from_config(_loaded(text))
    except (TypeError, ValueError) as error:
        raise ValueError(f"--exchange_config: {error} Received: {text!r}") from error
    if not isinstance(made, (Method, Policy, Auto)):
        raise ValueError(
            f"--exchange_config must be a method or a policy. Received: {made!r} from {text!r}"
        )
    return made


def _loaded(text: str) -> Any:
    inline = text.lstrip().startswith("{")
    try:
        return json.loads(text if inline else Path(text).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"it must be JSON, or the path of an existing JSON file ({error.strerror})."
        ) from error
    except (RecursionError, ValueError) as error:
        raise ValueError(f"invalid JSON ({error}).") from error


def _with_density(method: Any, density: float) -> Any:
    from tf_redsync.auto import Auto

    fixed = isinstance(method, Auto) and method.candidates is not None
    if fixed or "density" not in [f.name for f in dataclasses.fields(method)]:
        name = f"{type(method).__name__}(candidates=...)" if fixed else type(method).__name__
        raise ValueError(
            f"--density needs a method with a density. Received: {density} with {name}"
        )
    return dataclasses.replace(method, density=density)
