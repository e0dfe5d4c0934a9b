"""Codings: positions and values of selected elements in few bits, for any sparsifier.

`base.py` says what a coding is, `message.py` puts two of them together, and `rs.Coded` wraps a
method with them.

| positions | bits for each of k of n | |
|---|---|---|
| `RawIndices` | 32 | |
| `Bitmap` | n / k | |
| `RunLength`, `DeltaPacking`, `Huffman` | | fields of fixed width; groups; bytes |
| `EliasFano` | 2 + log2(n / k) | at most; nothing to be read in sequence |
| `Golomb` | 1.5 + log2(n / k) | 0.7 % above the entropy |
| `Bloom` | 1.44 log2(1 / e) | adds a share e of false positives |
| `Cheapest` | | of those without loss, for the density at hand |

| values | bits |
|---|---|
| `Float32`, `Half` | 32, 16 |
| `SignedLevels` | 1 to 4: a sign, and one of up to 8 magnitudes of a tensor |
| `QSGDValues` | `ceil(log2(2 s + 1))` and a norm a bucket |
| `PolynomialFit`, `DoubleExponentialFit` | `ceil(log2 k)`, the place in the sorted order |
"""

from tf_redsync.codings.base import IndexCoding, Room, ValueCoding
from tf_redsync.codings.bitmap import Bitmap
from tf_redsync.codings.bloom import Bloom
from tf_redsync.codings.choice import Cheapest, Comparison, compare
from tf_redsync.codings.delta import DeltaPacking
from tf_redsync.codings.double_exponential import DoubleExponentialFit
from tf_redsync.codings.elias_fano import EliasFano
from tf_redsync.codings.golomb import Golomb
from tf_redsync.codings.huffman import Huffman
from tf_redsync.codings.message import MessageCoding
from tf_redsync.codings.plain import Float32, Half, RawIndices
from tf_redsync.codings.polynomial import PolynomialFit
from tf_redsync.codings.quantized_values import QSGDValues
from tf_redsync.codings.run_length import RunLength
from tf_redsync.codings.signed_levels import SignedLevels

__all__ = [
    "Bitmap",
    "Bloom",
    "Cheapest",
    "Comparison",
    "DeltaPacking",
    "DoubleExponentialFit",
    "EliasFano",
    "Float32",
    "Golomb",
    "Half",
    "Huffman",
    "IndexCoding",
    "MessageCoding",
    "PolynomialFit",
    "QSGDValues",
    "RawIndices",
    "Room",
    "RunLength",
    "SignedLevels",
    "ValueCoding",
    "compare",
]
