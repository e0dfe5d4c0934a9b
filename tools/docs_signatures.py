"""For mkdocstrings: a class that is made by `__new__` has that method's arguments."""

from __future__ import annotations

from typing import Any

import griffe


class NewSignatures(griffe.Extension):
    """Takes `__new__` for `__init__` in classes that have no other."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Is called for each class that was read."""
        if "__new__" in cls.members and "__init__" not in cls.members:
            cls.members["__init__"] = cls.members["__new__"]
