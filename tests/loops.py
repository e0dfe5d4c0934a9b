"""Many cases in one test.

A test of its own for each of a thousand seeds costs more than the seeds do: it is collected in
every process, set up and reported. A loop reports those that fail, with their tracebacks.
"""

import functools
import inspect
import traceback

import pytest

SHOWN = 3  # tracebacks; of the other cases that fail their names


def loop(names, cases):
    """As `pytest.mark.parametrize`, but of one test that runs all cases and names what fails.

    A fixture is set up once for all of them.

    Args:
        names: Parameters of the test, "a, b" or a tuple.
        cases: A value, or a tuple of them, for each case.
    """
    names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
    cases = [tuple(case) if len(names) > 1 else (case,) for case in cases]
    assert cases, "a loop over nothing tests nothing"
    marked = [v for case in cases for v in case if hasattr(v, "marks")]
    assert not marked, f"no case of a loop can have a mark: {marked}"

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
        del run.__wrapped__  # pytest would take its parameters for fixtures
        return run

    return decorate
