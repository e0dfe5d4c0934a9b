"""Codings: positions and values of selected elements in few bits, for any sparsifier.

`base.py` says what a coding is, `message.py` puts two of them together, and `rs.Coded` wraps a
method with them.

Bits of each position, of 2^22 elements, as `codings.compare` shows them:

| positions | 0.1 % | 1 % | 10 % | for each of k of n |
|---|---|---|---|---|
| what random ones need at least | 11.41 | 8.08 | 4.69 | log2(n over k) / k |
| `Golomb` | 11.97 | 8.55 | 5.13 | at most 2 + log2(n / k); a stream for each density |
| `EliasFano` | 11.97 | 8.56 | 5.25 | at most 2 + log2(n / k); not read in sequence |
| `RunLength` | 14.60 | 10.76 | 6.61 | fields of equal width |
| `DeltaPacking` | 16.21 | 12.72 | 9.41 | groups of 32 gaps |
| `Bloom` | 19.17 | 14.38 | 9.59 | 1.44 log2(1 / e), and a share e of false positives |
| `Huffman` | 28.01 | 28.00 | 28.00 | of the four bytes |
| `RawIndices` | 32 | 32 | 32 | 32 |
| `Bitmap` | 1000 | 100 | 10 | n / k |

`Cheapest` is the shortest lossless one of these for the density at hand.

| values | bits |
|---|---|
| `Float32`, `Half` | 32, 16 |
| `SignedLevels` | 1 to 4: a sign, and one of up to 8 magnitudes of a tensor |
| `QSGDValues` | `ceil(log2(2 s + 1))` and a norm a bucket |
| `PolynomialFit`, `DoubleExponentialFit` | `ceil(log2 k)`, the place in the sorted order |
"""

from tf_redsync.codings.base import Capacity, IndexCoding, ValueCoding
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
    "Capacity",
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
    "RunLength",
    "SignedLevels",
    "ValueCoding",
    "compare",
]
