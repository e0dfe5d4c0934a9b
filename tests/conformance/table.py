"""The table: every public method, in its variants; the entries are in `families/`, one file each.

A new method needs one entry; `test_laws.test_table_covers_every_public_method` says so.
"""

import importlib
import pkgutil

from tests.conformance import families

TABLE = {}
for module in pkgutil.iter_modules(families.__path__, families.__name__ + "."):
    entries = importlib.import_module(module.name).TABLE
    assert not set(entries) & set(TABLE), f"{module.name} repeats a name"
    TABLE.update(entries)
