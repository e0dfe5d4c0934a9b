// Tests the codecs of core/cpu on tensors of more than 2^31 elements. (codecs_test.cc tests
// positions of such tensors without storing them.) It takes 9 GiB: the input is mapped memory that
// is hardly touched, the sums take 8 GiB, and the longest message 0.8 GiB.
#include <algorithm>
#include <string>
#include <vector>

#include "custom_ops/core/cpu/bloom.h"
#include "custom_ops/core/cpu/quantize.h"
#include "tests/kernels/core_testing.h"

namespace redsync {
namespace {

using testing::Check;

constexpr int64_t kSize = (int64_t{1} << 31) + 12345;
constexpr int64_t kHalf = int64_t{1} << 31;
// Nonzero elements before, around and after 2^31.
const std::vector<int64_t> kPlaces = {5, kHalf - 1, kHalf, kHalf + 1, kHalf + 9999, kSize - 1};

struct Sent {
  QuantizeFormat format;
  std::vector<int32_t> row;  // [flag, scale, words..]
  uint32_t Code(int64_t element) const {
    const int bits = format.bits();
    uint32_t code = 0;
    for (int b = 0; b < bits; ++b) {
      const int64_t at = element * bits + b;
      code |= (static_cast<uint32_t>(row[2 + at / 32]) >> (at % 32) & 1) << b;
    }
    return code;
  }
};

Sent Quantize(const QuantizeFormat& format, const float* x, const ParallelFor& threads) {
  Sent sent = {format, std::vector<int32_t>(2 + format.words(kSize))};
  const float scale = 2;
  sent.row[0] = 1;
  sent.row[1] = BitsOf(scale);
  Check(
      QuantizeTensor(format, x, &scale, kSize, {1, 2, 3}, 4, threads, sent.row.data() + 2, nullptr),
      "finite");
  return sent;
}

// `word` repeated is the code of zeros.
void CheckZeros(const Sent& sent, const std::vector<uint32_t>& word) {
  int64_t others = 0;
  const int64_t last = static_cast<int64_t>(sent.row.size()) - 3;  // Incomplete.
  for (int64_t w = 0; w < last; ++w) {
    others += static_cast<uint32_t>(sent.row[2 + w]) != word[w % word.size()];
  }
  Check(others <= 20, "all other elements have the code of zero");
}

void Decode(const Sent& sent, const ParallelFor& threads, float* total,
            const std::vector<float>& expected, float zero) {
  const QuantizedTensor coded = {
      sent.row.data(), 1, static_cast<int64_t>(sent.row.size()), 1, 2, kSize};
  CodecError error;
  Check(DequantizeSum(sent.format, coded, threads, total, &error) == Status::kOk, "decodes");
  for (size_t i = 0; i < kPlaces.size(); ++i) {
    Check(total[kPlaces[i]] == expected[i], "decoded " + std::to_string(kPlaces[i]));
  }
  for (int64_t at = 64; at < kSize; at += 999983) Check(total[at] == zero, "zeros");
}

void TestSign(float* x, const ParallelFor& threads, float* total) {
  const float values[] = {-1, -1, 1, -1, -3, -1};
  for (size_t i = 0; i < kPlaces.size(); ++i) x[kPlaces[i]] = values[i];
  const Sent sent = Quantize({Quantizer::kSign, 1, 0}, x, threads);
  CheckZeros(sent, {UINT32_MAX});
  for (size_t i = 0; i < kPlaces.size(); ++i) {
    Check(sent.Code(kPlaces[i]) == (values[i] >= 0), "sign");
  }
  Decode(sent, threads, total, {-2, -2, 2, -2, -2, -2}, 2);
}

// Bit i tells whether number kHalf + 100 + i of tests/oracle/quantization.py is below a half, for
// the stream (1, 2, 3) and tensor 4.
constexpr uint64_t kUp = 0x3f0d6fd7ff42718f;

// Codes of 3 bits, which cross words. Half the scale is one and a half levels.
void TestStochastic(float* x, const ParallelFor& threads, float* total) {
  const float values[] = {-2, 2, -2, 2, -2, 2};
  for (size_t i = 0; i < kPlaces.size(); ++i) x[kPlaces[i]] = values[i];
  const int64_t first = kHalf + 100;
  for (int64_t i = 0; i < 64; ++i) x[first + i] = 1;
  const Sent sent = Quantize({Quantizer::kStochastic, 3, 0}, x, threads);
  CheckZeros(sent, {0xdb6db6dbu, 0xb6db6db6u, 0x6db6db6du});
  for (size_t i = 0; i < kPlaces.size(); ++i) {
    Check(sent.Code(kPlaces[i]) == (values[i] < 0 ? 0 : 6), "stochastic");
  }
  uint64_t up = 0;
  for (int64_t i = 0; i < 64; ++i) up |= static_cast<uint64_t>(sent.Code(first + i) == 5) << i;
  Check(up == kUp, "random numbers beyond 2^31 elements");
  Decode(sent, threads, total, {-2, 2, -2, 2, -2, 2}, 0);
}

void TestBloomQuery(const ParallelFor& threads) {
  const BloomFormat format = {kSize, 100000, 4, 99};  // Enough words for no false positives.
  const std::vector<uint32_t> positions(kPlaces.begin(), kPlaces.end());
  std::vector<int32_t> filter(format.words);
  CodecError error;
  Check(BloomBuild(format, positions.data(), 6, 6, filter.data(), &error) == Status::kOk, "builds");
  std::vector<int64_t> scratch(BloomScratchBytes(kSize) / 8 + 1);
  std::vector<uint32_t> found(10, 7);
  const int64_t count =
      BloomQuery(format, filter.data(), 10, scratch.data(), threads, found.data());
  Check(
      count == 6 && std::equal(positions.begin(), positions.end(), found.begin()) && found[6] == 0,
      "the positions of a filter");
}

}  // namespace
}  // namespace redsync

int main() {
  using namespace redsync;
  const ParallelFor threads = testing::Threads(2);
  float *x = testing::Map<float>(kSize), *total = testing::Map<float>(kSize);
  TestSign(x, threads, total);
  TestStochastic(x, threads, total);
  TestBloomQuery(threads);
  return testing::Report("large");
}
