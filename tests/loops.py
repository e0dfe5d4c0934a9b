"""Runs many cases in one test.

A thousand parametrized seeds cost more to collect, set up and report than to run. A loop reports
the failing cases with their tracebacks.
"""

import functools
import inspect
import traceback

import pytest

SHOWN = 3  # number of tracebacks; further failures are listed by name


def loop(names, cases):
    """Like `pytest.mark.parametrize`, but runs all cases in one test and names those that fail.

    A fixture is set up once for all cases.

    Args:
        names: Parameters of the test, "a, b" or a tuple.
        cases: One value, or one tuple of values, per case.
    """
    names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
    cases = [tuple(case) if len(names) > 1 else (case,) for case in cases]
    assert cases, "a loop needs at least one case"
    marked = [v for case in cases for v in case if hasattr(v, "marks")]
    assert not marked, f"cases of a loop cannot have marks: {marked}"

    def decorate(test):
        @functools.wraps(test)
        def run(*args, **kwargs):
            failed = []
            for case in cases:
                values = dict(zip(names, case, strict=True))
                try:
                    test(*args, **kwargs, **values)
                except (Exception, pytest.skip.Exception, pytest.fail.Exception):
                    failed.append((values, traceback.format_exc()))
            texts = [f"{v}\n{t}" for v, t in failed[:SHOWN]] + [str(v) for v, _ in failed[SHOWN:]]
            if failed:
                pytest.fail(f"{len(failed)} of {len(cases)} cases:\n" + "\n".join(texts), False)

        signature = inspect.signature(test)
        left = [p for n, p in signature.parameters.items() if n not in names]
        run.__signature__ = signature.replace(parameters=left)
        del run.__wrapped__  # otherwise pytest takes the parameters for fixtures
        return run

    return decorate
