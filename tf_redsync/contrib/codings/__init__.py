"""Codings of papers beside those of `tf_redsync.codings`, for `rs.Coded`; no stable API either.

Bits of each position, of 2^22 elements, as `codings.compare` shows them:

| positions | 0.1 % | 1 % | 10 % | for each of k of n |
|---|---|---|---|---|
| `Bloom` | 19.17 | 14.38 | 9.59 | 1.44 log2(1 / e), and a share e of false positives |

| values | bits |
|---|---|
| `QSGDValues` | `ceil(log2(2 s + 1))` and a norm a bucket |
| `PolynomialFit`, `DoubleExponentialFit` | `ceil(log2 k)`, the place in the sorted order |
"""

from tf_redsync.contrib.codings.bloom import Bloom
from tf_redsync.contrib.codings.fitted_curves import DoubleExponentialFit, PolynomialFit
from tf_redsync.contrib.codings.quantized_values import QSGDValues

__all__ = ["Bloom", "DoubleExponentialFit", "PolynomialFit", "QSGDValues"]
