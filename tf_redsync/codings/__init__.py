"""Codings: compact codes for the positions and values of selected elements, for any sparsifier.

`base.py` defines the interfaces, `message.py` combines a coding of positions with one of values,
and `rs.Coded` wraps a method with them. `rs.contrib.codings` has more codings.

Bits per position, for 2^22 elements, from `codings.compare`:

| positions | 0.1 % | 1 % | 10 % | bits per position, of k among n |
|---|---|---|---|---|
| entropy of random positions | 11.41 | 8.08 | 4.69 | log2(n over k) / k |
| `Golomb` | 11.97 | 8.55 | 5.13 | at most 2 + log2(n / k); one stream per density |
| `EliasFano` | 11.97 | 8.56 | 5.25 | at most 2 + log2(n / k); random access |
| `RunLength` | 14.60 | 10.76 | 6.61 | fields of equal width |
| `DeltaPacking` | 16.21 | 12.72 | 9.41 | groups of 32 gaps |
| `Huffman` | 28.01 | 28.00 | 28.00 | codes of four bytes |
| `RawIndices` | 32 | 32 | 32 | 32 |
| `Bitmap` | 1000 | 100 | 10 | n / k |

`Cheapest` uses the shortest of these lossless codings at the given density.

| values | bits per value |
|---|---|
| `Float32`, `Half` | 32, 16 |
| `BlockValues` | 8, 4 or 2, and 16 per block of values for its scale |
| `SignedLevels` | 1 to 4: a sign, and one of up to 8 magnitudes per tensor |
"""

from tf_redsync.codings.base import Capacity, IndexCoding, ValueCoding
from tf_redsync.codings.block_values import BlockValues
from tf_redsync.codings.cheapest import Cheapest, Comparison, compare
from tf_redsync.codings.delta import DeltaPacking
from tf_redsync.codings.elias_fano import EliasFano
from tf_redsync.codings.golomb import Golomb
from tf_redsync.codings.huffman import Huffman
from tf_redsync.codings.plain import Bitmap, Float32, Half, RawIndices
from tf_redsync.codings.run_length import RunLength
from tf_redsync.codings.signed_levels import SignedLevels

__all__ = [
    "Bitmap",
    "BlockValues",
    "Capacity",
    "Cheapest",
    "Comparison",
    "DeltaPacking",
    "EliasFano",
    "Float32",
    "Golomb",
    "Half",
    "Huffman",
    "IndexCoding",
    "RawIndices",
    "RunLength",
    "SignedLevels",
    "ValueCoding",
    "compare",
]
