"""Codecs: ops that compress gradients into messages and decode them.

| family | functions | for |
|---|---|---|
| quantization | `quantize`, `dequantize_sum` | signs, few levels, uniform levels, powers of two |
| Golomb codes | `golomb_encode`, `golomb_decode` | ascending positions, lossless |
| Bloom filters | `bloom_build`, `bloom_query` | positions, with false positives |
| Rice codes | `rice_encode`, `rice_decode` | signed integers, lossless |
| sparse merge | `sparse_merge` | reduce-scatter of sparse blocks |

All workers can compute the length of a message; most messages hold a list of tensors. Decoders
validate their input. `ops.bits` has the bit-level ops.
"""

from tf_redsync.ops.bloom import bloom_build, bloom_parameters, bloom_query
from tf_redsync.ops.codec_checks import Positions
from tf_redsync.ops.golomb import golomb_decode, golomb_encode, golomb_parameter, golomb_words
from tf_redsync.ops.merging import Merged, sparse_merge
from tf_redsync.ops.quantization import Quantized, dequantize_sum, quantize
from tf_redsync.ops.quantized_format import code_bits, quantized_scales, quantized_words
from tf_redsync.ops.rice import rice_decode, rice_encode

__all__ = [
    "Merged",
    "Positions",
    "Quantized",
    "bloom_build",
    "bloom_parameters",
    "bloom_query",
    "code_bits",
    "dequantize_sum",
    "golomb_decode",
    "golomb_encode",
    "golomb_parameter",
    "golomb_words",
    "quantize",
    "quantized_scales",
    "quantized_words",
    "rice_decode",
    "rice_encode",
    "sparse_merge",
]
