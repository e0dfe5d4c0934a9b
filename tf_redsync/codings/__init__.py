"""Codings: positions and values of selected elements in few bits, for any sparsifier.

`base.py` says what a coding is, `message.py` puts two of them together. `rs.Coded` wraps a method
with them.
"""

from tf_redsync.codings.base import IndexCoding, Room, ValueCoding
from tf_redsync.codings.golomb import Golomb
from tf_redsync.codings.message import MessageCoding
from tf_redsync.codings.plain import Float32, Half, RawIndices

__all__ = [
    "Float32",
    "Golomb",
    "Half",
    "IndexCoding",
    "MessageCoding",
    "RawIndices",
    "Room",
    "ValueCoding",
]
