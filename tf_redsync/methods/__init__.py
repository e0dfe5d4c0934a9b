"""The stable methods, one file per family, named after their papers.

`table()` lists these and the methods of `contrib`. A class with `@register` in a module of this
folder is exported as `rs.TopK` and `rs.methods.TopK` without further declarations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tf_redsync.config import from_config, register, serialize
from tf_redsync.exchange.method import Method
from tf_redsync.exchange.sync_schedule import SyncSchedule
from tf_redsync.exchange.traits import Traits
from tf_redsync.methods.catalogue import methods_in, table

__all__ = ["SyncSchedule", "Traits", "Method", "from_config", "register", "serialize", "table"]

_METHODS = methods_in(__name__)
globals().update(_METHODS)
__all__ += sorted(_METHODS)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
