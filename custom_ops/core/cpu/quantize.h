// Quantization of tensors to codes of a few bits, and the sum of several workers' messages.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_QUANTIZE_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_QUANTIZE_H_

#include <cstdint>

#include "custom_ops/core/cpu/codec_error.h"
#include "custom_ops/core/cpu/common.h"
#include "custom_ops/core/cpu/simd.h"

namespace redsync {

// The code and the value of an element x, given its bucket's scale c (or scales c0, c1):
//   kSign        code 1 if x >= 0 else 0;           value c or -c
//   kTwoLevel    code 1 if x >= 0 else 0;           value c1 or c0
//   kThreshold   code 1 + [x >= c] - [x <= -c];     value (code - 1) * c
//   kStochastic  code s +- level, level = y rounded up with probability y - floor(y), else down,
//                y = (|x| / c) * s, at most s;      value (code - s) * (c / s)
//   kUniform     code y = (x / c + 1) * (s / 2), in [0, s], rounded up or down in the same way;
//                                                   value (2 * code - s) * (c / s)
//   kNatural     code 2 * exponent + sign of the float32 x, after 23 random bits have been added to
//                its mantissa;                      value 0 or the power of two of that exponent
// kNatural has no scale and no code for 2^128; elements that become 2^128 count as non-finite.
enum class Quantizer { kSign, kTwoLevel, kThreshold, kStochastic, kUniform, kNatural };

// Returns the largest s, limited by codes of 16 bits; 1 for modes without s.
int32_t MaxLevels(Quantizer quantizer);
bool IsStochastic(Quantizer quantizer);

constexpr int64_t kBucketUnit = 32;  // Bucket sizes are multiples, so that buckets start at words.
constexpr int64_t kMaxBucket = INT32_MAX;  // A size plus this fits int64.

struct QuantizeFormat {
  Quantizer quantizer = Quantizer::kSign;
  int32_t levels = 1;  // s, in [1, MaxLevels()].
  int64_t bucket =
      0;  // Elements that share a scale, a multiple of kBucketUnit; 0 for a whole tensor.

  int bits() const;                    // Bits of a code.
  int32_t max_code() const;            // Codes are in [0, max_code()].
  int64_t scales(int64_t size) const;  // Number of scales of a tensor.
  int64_t words(int64_t size) const;   // Number of words of a tensor's codes.
  int scales_per_bucket() const {
    return quantizer == Quantizer::kTwoLevel ? 2 : quantizer == Quantizer::kNatural ? 0 : 1;
  }
  int64_t bucket_of(int64_t element) const { return bucket == 0 ? 0 : element / bucket; }
};

// Random numbers of one step: Philox4x32-10 with key (seed, worker) and, for element j of tensor i,
// counter (j / 4 as 64 bits, i, step); element j gets word j % 4.
struct RandomStream {
  uint32_t seed = 0;
  uint32_t worker = 0;
  uint32_t step = 0;
};

// Checks the scales of a tensor: the error names one that is negative (or, in received messages,
// non-finite). Scales of buckets without elements are not checked.
Status CheckScales(const QuantizeFormat& format, const float* scales, int64_t size,
                   bool must_be_finite, CodecError* error);

// Writes format.words(size) words of codes and, if `errors` is not null, x - decoded (`errors` may
// be `x`). Bits beyond the last code are 0. Returns whether all elements and scales are finite and
// all elements have codes; otherwise the outputs are unspecified.
bool QuantizeTensor(const QuantizeFormat& format, const float* x, const float* scales, int64_t size,
                    const RandomStream& stream, int64_t tensor, const ParallelFor& parallel_for,
                    int32_t* words, float* errors);

// One tensor's part of a message of all ranks.
struct QuantizedTensor {
  const int32_t* messages;  // [ranks, stride]; rows whose word 0, the flag, is 0 are ignored.
  int64_t ranks;
  int64_t stride;
  int64_t scales_at;  // Offsets in a row.
  int64_t words_at;
  int64_t size;
};

// out = sum over ranks, in their order, of the decoded values. The caller has checked the scales.
// If a code is out of range, the error names it and `out` is unspecified.
Status DequantizeSum(const QuantizeFormat& format, const QuantizedTensor& coded,
                     const ParallelFor& parallel_for, float* out, CodecError* error);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_QUANTIZE_H_
