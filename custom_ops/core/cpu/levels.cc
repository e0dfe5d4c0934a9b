#include "custom_ops/core/cpu/levels.h"

#include <algorithm>

namespace redsync {
namespace {

constexpr int kMaxCells = 1 << (kMaxLevelBits - 1);

// 2^exponent.
double PowerOfTwo(int exponent) {
  const int64_t bits = (int64_t{1023} + exponent) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof(power));
  return power;
}

float MagnitudeOf(int32_t bits) { return FloatOf(bits & 0x7fffffff); }

// Writes the mean magnitude of each of `cells` sets; 0 for an empty set.
void Means(const int32_t* values, int64_t count, const uint32_t* cell, int cells, int shift,
           float* means) {
  const double unit = PowerOfTwo(shift);
  auto scaled = [=](int64_t i) {
    return static_cast<int64_t>(static_cast<double>(MagnitudeOf(values[i])) * unit);
  };
  int64_t sums[kMaxCells] = {}, members[kMaxCells] = {};
  if (cells == 1) {  // A register: a sum in memory would wait for the previous store.
    int64_t sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += scaled(i);
    sums[0] = sum;
    members[0] = count;
  } else {
    for (int64_t i = 0; i < count; ++i) {
      sums[cell[i]] += scaled(i);
      ++members[cell[i]];
    }
  }
  for (int c = 0; c < cells; ++c) {
    const double mean =
        static_cast<double>(sums[c]) / static_cast<double>(std::max<int64_t>(members[c], 1));
    means[c] = static_cast<float>(mean * PowerOfTwo(-shift));
  }
}

}  // namespace

void CodeByMeans(const int32_t* values, int64_t count, int bits, float* levels, uint32_t* codes) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, values[i] & 0x7fffffff);
  const int shift = 157 - (largest >> 23);  // Magnitudes are below 2^(31 - shift).
  std::fill(codes, codes + count, 0);
  for (int depth = 1; depth < bits; ++depth) {
    float means[kMaxCells];
    Means(values, count, codes, 1 << (depth - 1), shift, means);
    for (int64_t i = 0; i < count; ++i) {
      codes[i] = 2 * codes[i] + (MagnitudeOf(values[i]) > means[codes[i]] ? 1 : 0);
    }
  }
  Means(values, count, codes, 1 << (bits - 1), shift, levels);
  for (int64_t i = 0; i < count; ++i) codes[i] = 2 * codes[i] + (values[i] < 0 ? 1 : 0);
}

}  // namespace redsync
