"""Methods of papers beside those that we recommend: `rs.contrib.SIDCo`.

They pass the same tests as those of `methods`, but their names, arguments and files may change in
any release. A class with `@register` in a module of this folder is `rs.contrib.SIDCo`; nothing else
names it. No other folder imports this one: saved configs, the command line and `rs.methods.table()`
find its classes by name, see `config.registered`.

`codings`: those that only these methods use; `common`: what several of them share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tf_redsync.methods.catalogue import methods_in

_METHODS = methods_in(__name__)
globals().update(_METHODS)
__all__ = ["codings"]  # noqa: F822  a folder
__all__ += sorted(_METHODS)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
