"""Further methods from papers, without a stable API: `rs.contrib.SIDCo`.

They pass the same tests as the methods in `methods`, but their names, arguments and files may
change in any release. Every class with `@register` in a module of this folder becomes an attribute,
such as `rs.contrib.SIDCo`, without further declarations. No other folder imports this one. Saved
configs, the command line and `rs.methods.table()` find the classes by name; see
`config.registered`.

`codings` has codings of positions and values that only these methods use. `common` has building
blocks that several methods share.
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
