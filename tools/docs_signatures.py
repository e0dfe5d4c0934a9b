"""mkdocstrings extension: a class with `__new__` shows the arguments of that method."""

from __future__ import annotations

from typing import Any

import griffe


class NewSignatures(griffe.Extension):
    """Uses `__new__` as `__init__` for classes without `__init__`."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Called for each class that was read."""
        if "__new__" in cls.members and "__init__" not in cls.members:
            cls.members["__init__"] = cls.members["__new__"]
