"""Further codings from papers for `rs.Coded`, without a stable API.

Bits per position for 2^22 elements, as `codings.compare` shows them:

| positions | 0.1 % | 1 % | 10 % | bits per position |
|---|---|---|---|---|
| `Bloom` | 19.17 | 14.38 | 9.59 | 1.44 log2(1 / e), with a false positive rate e |

| values | bits per value |
|---|---|
| `QSGDValues` | `ceil(log2(2 s + 1))`, and a norm per bucket |
| `PolynomialFit`, `DoubleExponentialFit` | `ceil(log2 k)` for the place in sorted order |
"""

from tf_redsync.contrib.codings.bloom import Bloom
from tf_redsync.contrib.codings.fitted_curves import DoubleExponentialFit, PolynomialFit
from tf_redsync.contrib.codings.quantized_values import QSGDValues

__all__ = ["Bloom", "DoubleExponentialFit", "PolynomialFit", "QSGDValues"]
