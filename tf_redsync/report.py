"""`tf_redsync.report(run_dir)`, and the command line: `python -m tf_redsync.report RUN_DIR`.

The code is in `tf_redsync.metrics.page` and `tf_redsync.cli.report`. `tf_redsync.report` is the
function; after an import of this module, which has the same name, it is the module, so that this
can be called as well.
"""

import sys
import types
from typing import Any

from tf_redsync.cli.report import main
from tf_redsync.metrics.page import ReportError, report

__all__ = ["ReportError", "main", "report"]


class _Callable(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return report(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable

if __name__ == "__main__":
    sys.exit(main())
