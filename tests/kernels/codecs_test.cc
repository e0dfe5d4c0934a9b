// Tests the codecs of core/cpu without TensorFlow: round trips, brute force, random and mutated
// messages, misaligned and exactly sized buffers. Prints a digest of all results, which must not
// depend on the number of threads (argument 1) or on TF_REDSYNC_SIMD.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "custom_ops/core/cpu/bits.h"
#include "custom_ops/core/cpu/bloom.h"
#include "custom_ops/core/cpu/checksum.h"
#include "custom_ops/core/cpu/golomb.h"
#include "custom_ops/core/cpu/halves.h"
#include "custom_ops/core/cpu/levels.h"
#include "custom_ops/core/cpu/merge.h"
#include "custom_ops/core/cpu/quantize.h"
#include "custom_ops/core/cpu/rice.h"
#include "custom_ops/core/cpu/simd.h"
#include "custom_ops/core/cpu/topk_codec.h"
#include "tests/kernels/core_testing.h"

namespace redsync {
namespace {

using testing::Check;
using testing::Mix;

// Memory of exactly the given size, filled with garbage and aligned to one element only: the
// sanitizer detects an access beyond it, or one that assumes more alignment.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t size) : size_(size), memory_(new char[(size + 1) * sizeof(T)]) {
    std::fill(memory_, memory_ + (size + 1) * sizeof(T), 0x5a);
  }
  ~Buffer() { delete[] memory_; }
  Buffer(const Buffer&) = delete;
  void operator=(const Buffer&) = delete;
  T* data() { return reinterpret_cast<T*>(memory_) + 1; }
  T* begin() { return data(); }
  T* end() { return data() + size_; }
  int64_t size() const { return size_; }
  T& operator[](int64_t i) { return data()[i]; }
  void MixAll() { Mix(data(), size_ * sizeof(T)); }

 private:
  int64_t size_;
  char* memory_;
};

std::vector<uint32_t> Choose(int64_t size, int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint32_t> chosen;
  for (int64_t i = 0; i < size;
       ++i) {  // each with the probability of being one of the remaining ones
    const int64_t missing = count - static_cast<int64_t>(chosen.size());
    if (static_cast<int64_t>(random() % (size - i)) < missing) chosen.push_back(i);
  }
  return chosen;
}

// ------------------------------------------------------------------------------- quantization

void TestQuantize(const ParallelFor& threads) {
  struct Mode {
    Quantizer quantizer;
    int32_t levels;
  };
  const Mode modes[] = {{Quantizer::kSign, 1},
                        {Quantizer::kTwoLevel, 1},
                        {Quantizer::kThreshold, 1},
                        {Quantizer::kStochastic, 1},
                        {Quantizer::kStochastic, 5},
                        {Quantizer::kStochastic, 127},
                        {Quantizer::kStochastic, MaxLevels(Quantizer::kStochastic)},
                        {Quantizer::kUniform, 1},
                        {Quantizer::kUniform, 10},
                        {Quantizer::kUniform, 63},
                        {Quantizer::kUniform, MaxLevels(Quantizer::kUniform)},
                        {Quantizer::kNatural, 1}};
  for (const Mode& mode : modes) {
    for (int64_t bucket : {0, 32, 480, 1024}) {
      for (int64_t size : {0, 1, 31, 32, 1000, 40000}) {
        QuantizeFormat format = {mode.quantizer, mode.levels, bucket};
        std::mt19937 random(7);
        std::normal_distribution<float> normal;
        Buffer<float> x(size), errors(size), total(size), scales(format.scales(size));
        Buffer<int32_t> words(format.words(size));
        for (float& v : x) v = normal(random);
        for (float& c : scales) c = std::fabs(normal(random));
        if (scales.size() > 1) scales[1] = 0;
        const RandomStream stream = {1, 2, 3};
        const std::string name = "quantizer " + std::to_string(static_cast<int>(mode.quantizer)) +
                                 " levels " + std::to_string(mode.levels) + " size " +
                                 std::to_string(size);
        Check(QuantizeTensor(format, x.data(), scales.data(), size, stream, 4, threads,
                             words.data(), errors.data()),
              name + ": finite");
        words.MixAll();
        errors.MixAll();
        // Two ranks that sent equal entries: decoded and dropped entries sum to the whole.
        const int64_t stride = 1 + scales.size() + words.size();
        Buffer<int32_t> messages(2 * stride);
        for (int rank = 0; rank < 2; ++rank) {
          int32_t* row = messages.data() + rank * stride;
          row[0] = 1;
          std::memcpy(row + 1, scales.data(), scales.size() * sizeof(float));
          std::copy(words.begin(), words.end(), row + 1 + scales.size());
        }
        const QuantizedTensor coded = {messages.data(), 2, stride, 1, 1 + scales.size(), size};
        CodecError error;
        Check(DequantizeSum(format, coded, threads, total.data(), &error) == Status::kOk,
              name + ": decodes");
        total.MixAll();
        int exponent;
        for (int64_t i = 0; i < size; ++i) {
          const float decoded = total[i] / 2;
          Check(errors[i] == x[i] - decoded, name + ": error");
          if (mode.quantizer == Quantizer::kNatural) {
            const float share = decoded / x[i];
            Check(std::frexp(std::fabs(decoded), &exponent) == 0.5f && share > 0.5f && share <= 2,
                  name + ": a power of two next to it");
            continue;
          }
          const float c = scales[format.bucket_of(i) * format.scales_per_bucket()];
          if (mode.quantizer == Quantizer::kSign) {
            Check(decoded == (x[i] >= 0 ? c : -c), name + ": sign");
          }
          if (mode.quantizer == Quantizer::kStochastic && std::fabs(x[i]) <= c) {
            Check(std::fabs(errors[i]) <= 1.0001f * c / mode.levels, name + ": within a level");
          }
          if (mode.quantizer == Quantizer::kUniform && std::fabs(x[i]) <= c) {
            Check(std::fabs(errors[i]) <= 2.0001f * c / mode.levels, name + ": within a step");
          }
        }
        // In place, and a message without a sender.
        Check(QuantizeTensor(format, x.data(), scales.data(), size, stream, 4, threads,
                             words.data(), x.data()) &&
                  std::equal(x.begin(), x.end(), errors.begin()),
              name + ": in place");
        messages[0] = messages[stride] = 0;
        Check(DequantizeSum(format, coded, threads, total.data(), &error) == Status::kOk &&
                  std::all_of(total.begin(), total.end(), [](float v) { return v == 0; }),
              name + ": flag 0");
      }
    }
  }
}

void TestQuantizeErrors(const ParallelFor& threads) {
  const QuantizeFormat ternary = {Quantizer::kThreshold, 1, 0};
  Buffer<int32_t> messages(3 * 66);
  std::fill(messages.begin(), messages.end(), 0x55555555);  // Codes 1: zero.
  for (int rank = 0; rank < 3; ++rank) {
    messages[66 * rank] = 1;
    messages[66 * rank + 1] = BitsOf(2.0f);
  }
  Buffer<float> total(1000);
  const QuantizedTensor coded = {messages.data(), 3, 66, 1, 2, 1000};
  CodecError error;
  Check(DequantizeSum(ternary, coded, threads, total.data(), &error) == Status::kOk, "ternary");
  messages[66 + 2 + 10] |= 3 << 6;
  messages[2 * 66 + 2] = -1;
  Check(DequantizeSum(ternary, coded, threads, total.data(), &error) == Status::kInvalidMessage &&
            std::string(error.field) == "code" && error.rank == 1 && error.slot == 163 &&
            error.value == 3 && error.limit == 2,
        "the first bad code is named");
  for (float bad : {NAN, INFINITY, -1.0f}) {
    const float scales[] = {1, bad};
    const QuantizeFormat format = {Quantizer::kStochastic, 3, 32};
    Check(CheckScales(format, scales, 64, true, &error) == Status::kInvalidMessage &&
              std::string(error.field) == "scale" && error.slot == 1,
          "bad scale");
    Check(CheckScales(format, scales, 32, true, &error) == Status::kOk, "scale of no element");
    Buffer<float> x(64);
    Buffer<int32_t> words(format.words(64));
    x[63] = bad;
    Check(QuantizeTensor(format, x.data(), total.data(), 64, {}, 0, threads, words.data(),
                         nullptr) == std::isfinite(bad),
          "not finite is noticed");
  }
}

// ------------------------------------------------------------------------------------- golomb

void TestGolomb() {
  for (int64_t size : {1, 31, 1000, 100000}) {
    for (int64_t slots : {int64_t{0}, int64_t{1}, size / 50, size / 2, size}) {
      const std::vector<uint32_t> positions = Choose(size, slots, 3);
      const int trials = size < 100000 ? 50 : 10;
      for (int rice : {0, 1, 5, 12, 30}) {
        const GolombFormat format = {size, slots, rice};
        Buffer<int32_t> part(format.part_words());
        Buffer<uint32_t> back(slots);
        CodecError error;
        int32_t count = -1;
        Check(GolombEncode(format, positions.data(), slots, part.data(), &error) == Status::kOk,
              "golomb: encodes");
        part.MixAll();
        Check(GolombDecode(format, part.data(), back.data(), &count, &error) == Status::kOk &&
                  count == slots && std::equal(back.begin(), back.end(), positions.begin()),
              "golomb: round trip");
        // Mutations give an error that names a field, or ascending positions in range.
        std::mt19937 random(size + rice);
        for (int trial = 0; trial < trials; ++trial) {
          Buffer<int32_t> broken(part.size());
          std::copy(part.begin(), part.end(), broken.begin());
          const int64_t at = trial % 3 == 0 ? 0 : random() % part.size();
          broken[at] = trial % 2 == 0 ? static_cast<int32_t>(random())
                                      : broken[at] ^ static_cast<int32_t>(1u << random() % 32);
          const Status status = GolombDecode(format, broken.data(), back.data(), &count, &error);
          if (status != Status::kOk) {
            Check(error.found(), "golomb: the error has a name");
            continue;
          }
          Check(count >= 0 && count <= slots, "golomb: count");
          for (int32_t i = 0; i < count; ++i) {
            Check(back[i] >= (i == 0 ? 0 : back[i - 1] + 1) && back[i] < size, "golomb: index");
          }
        }
      }
    }
  }
  const GolombFormat format = {10, 3, 1};
  Buffer<int32_t> part(format.part_words());
  CodecError error;
  const uint32_t descending[] = {5, 4, 3}, outside[] = {5, 10, 11};
  Check(GolombEncode(format, descending, 3, part.data(), &error) == Status::kInvalidMessage &&
            std::string(error.field) == "index" && error.slot == 1 && error.value == 4,
        "golomb: descending");
  Check(GolombEncode(format, outside, 3, part.data(), &error) == Status::kInvalidMessage &&
            error.slot == 1 && error.value == 10,
        "golomb: outside");
  Check(GolombEncode(format, outside, 4, part.data(), &error) == Status::kInvalidMessage &&
            std::string(error.field) == "count",
        "golomb: too many");
}

// The longest codes: one gap over everything, equal gaps, and every position at the end.
void TestGolombWorst() {
  for (int64_t slots : {1, 31, 500}) {
    for (int rice : {0, 4, 6, 12}) {
      const GolombFormat format = {20000, slots, rice};
      for (int64_t leap : {int64_t{1}, format.size / slots, int64_t{1} << rice}) {
        Buffer<uint32_t> positions(slots), back(slots);
        for (int64_t i = 0; i < slots; ++i) {
          positions[i] = std::min(format.size - slots + i, leap * (i + 1) - 1);
          if (leap == 1) positions[i] = format.size - slots + i;
        }
        Buffer<int32_t> part(format.part_words());
        CodecError error;
        int32_t count = -1;
        Check(GolombEncode(format, positions.data(), slots, part.data(), &error) == Status::kOk &&
                  part[0] == slots && (leap != 1 || part[format.part_words() - 1] != 0),
              "golomb: the worst positions fit");
        part.MixAll();
        Check(GolombDecode(format, part.data(), back.data(), &count, &error) == Status::kOk &&
                  count == slots && std::equal(back.begin(), back.end(), positions.begin()),
              "golomb: the worst positions come back");
      }
    }
  }
}

// ------------------------------------------------------------------------------------- halves

// A single worker with `blocks` blocks: sent values plus errors equal the values.
void TestHalves(const ParallelFor& threads) {
  for (const Half half : {Half::kFloat16, Half::kBfloat16}) {
    for (int64_t blocks : {1, 2, 5}) {
      for (int64_t size : {0, 1, 34, 70000}) {
        std::mt19937 random(size);
        std::normal_distribution<float> normal;
        const std::vector<int64_t> sizes{size, 0, 3, size / 2};
        const int64_t elements = size + 3 + size / 2, length = HalfBlock(elements, blocks);
        Buffer<float> x(elements), residual(elements), errors(elements), back(elements);
        Buffer<int32_t> messages(blocks * HalfWords(length)), sum(HalfWords(length));
        for (float& value : x) {
          const float significand = normal(random);  // first; arguments have no fixed order
          value = std::ldexp(significand, random() % 40 - 28);
        }
        for (float& value : residual) value = normal(random);
        std::vector<HalfTensor> tensors, results;
        int64_t at = 0;
        for (int64_t n : sizes) {
          tensors.push_back({n, x.data() + at, residual.data() + at, errors.data() + at});
          results.push_back({n, nullptr, nullptr, back.data() + at});
          at += n;
        }
        EncodeHalves(half, tensors, blocks, length, threads, messages.data());
        DecodeHalves(half, messages.data(), blocks, length, results, threads);
        for (Buffer<float>* buffer : {&errors, &back}) buffer->MixAll();
        for (int64_t i = 0; i < elements; ++i) {
          Check(back[i] + errors[i] == x[i] + residual[i], "halves: nothing is lost");
        }
        const std::vector<float> before(errors.begin(), errors.end());
        ReduceHalves(half, messages.data(), blocks, length, blocks - 1, tensors, threads,
                     sum.data());
        errors.MixAll();
        sum.MixAll();
        for (int64_t i = 0; i < std::min(elements, (blocks - 1) * length); ++i) {
          Check(errors[i] == before[i], "halves: other blocks are as before");
        }
        if (size == 0) continue;
        for (HalfTensor& tensor : tensors) tensor.residual = nullptr;
        x[x.size() - 1] = std::numeric_limits<float>::infinity();
        EncodeHalves(half, tensors, blocks, length, threads, messages.data());
        Check(std::count(messages.begin(), messages.end(), 0) == messages.size(),
              "halves: nothing is sent");
      }
    }
  }
}

// ------------------------------------------------------------------------------------- levels

void TestLevels() {
  for (int bits : {1, 2, 3, 4}) {
    for (int64_t count : {0, 1, 2, 100, 5000}) {
      for (float size : {1.0f, 1e-30f, 1e36f}) {
        std::mt19937 random(count);
        std::normal_distribution<float> normal;
        Buffer<int32_t> values(count);
        Buffer<uint32_t> codes(count);
        Buffer<float> levels(LevelCount(bits));
        for (int32_t& v : values) {
          const float x = normal(random);
          v = BitsOf((x + std::copysign(2.0f, x)) * size);
        }
        CodeByMeans(values.data(), count, bits, levels.data(), codes.data());
        codes.MixAll();
        levels.MixAll();
        std::vector<double> sum(levels.size()), members(levels.size());
        for (int64_t i = 0; i < count; ++i) {
          Check(codes[i] < 2 * levels.size() && (codes[i] & 1) == (FloatOf(values[i]) < 0),
                "levels: sign");
          sum[codes[i] >> 1] += std::fabs(FloatOf(values[i]));
          ++members[codes[i] >> 1];
        }
        float last = 0;
        for (int64_t c = 0; c < levels.size(); ++c) {
          const double mean = members[c] > 0 ? sum[c] / members[c] : 0;
          Check(std::fabs(levels[c] - mean) <= 1e-6 * mean, "levels: conditional mean");
          if (members[c] == 0) continue;
          Check(levels[c] >= last, "levels: ascend");
          last = levels[c];
        }
      }
    }
  }
  for (float x : {1.0f, -1.00390625f, 1.01171875f, 3.3e38f, 2e-38f}) {
    const float half = FloatOf(static_cast<int32_t>(uint32_t{HalfOf(BitsOf(x))} << 16));
    Check(std::fabs(half - x) <= std::fabs(x) / 256, "halves: near");
  }
  Check(HalfOf(BitsOf(1.00390625f)) == 0x3f80 && HalfOf(BitsOf(1.01171875f)) == 0x3f82,
        "halves: ties to even");
}

// ------------------------------------------------------------------------------ coded messages

// The positions in a message's codes are those of the tensors, stream by stream.
void CheckPositions(const TopKFormat& format, const std::vector<TopKTensor>& tensors,
                    const int32_t* part) {
  for (size_t s = 0; s < format.streams.size(); ++s) {
    Buffer<uint32_t> found(format.streams[s].slots);
    CodecError error;
    int32_t count = -1;
    Check(GolombDecode(format.streams[s], part, found.data(), &count, &error) == Status::kOk,
          "coded: positions");
    int64_t start = 0, next = 0;
    for (const TopKTensor& t : tensors) {
      if (t.stream != static_cast<int64_t>(s)) continue;
      for (int64_t j = 0; j < t.count; ++j) {
        Check(next < count && found[next++] == start + t.indices[j], "coded: a position");
      }
      start += t.size;
    }
    Check(next == count, "coded: no more positions");
    part += format.streams[s].part_words();
  }
}

void TestCodedMessage() {
  const int64_t sizes[] = {0, 1, 3000, 70, 5000}, slots[] = {0, 1, 100, 70, 33};
  for (int bits : {1, 2, 3, 4, kHalfBits}) {
    for (int streams : {1, 2, 3}) {  // Tensor i is in stream i % streams.
      TopKFormat format;
      format.streams.assign(streams, {0, 0, 5});
      format.value_bits = bits;
      for (int i = 0; i < 5; ++i) {
        format.streams[i % streams].size += sizes[i];
        format.streams[i % streams].slots += slots[i];
      }
      std::mt19937 random(bits);
      std::normal_distribution<float> normal;
      std::vector<TopKTensor> tensors(5);
      std::vector<std::vector<uint32_t>> indices;
      std::vector<std::vector<int32_t>> values(5);
      std::vector<std::vector<float>> residuals(5);
      for (int i = 0; i < 5; ++i) {
        const int64_t count = slots[i] - (i == 4 ? 3 : 0);  // A slot may stay empty.
        indices.push_back(sizes[i] == 0 ? std::vector<uint32_t>() : Choose(sizes[i], count, i));
        for (int64_t j = 0; j < count; ++j) values[i].push_back(BitsOf(normal(random)));
        residuals[i].assign(sizes[i], 0.25f);
        tensors[i] = {sizes[i],          slots[i],         count,
                      indices[i].data(), values[i].data(), residuals[i].data(),
                      i % streams};
      }
      Buffer<uint32_t> scratch(204);
      Buffer<int32_t> message(format.words(tensors.data(), 5));
      CodecError error;
      Check(EncodeTopK(format, tensors.data(), 5, scratch.data(), message.data(), &error) ==
                    Status::kOk &&
                message[0] == 1,
            "coded: status");
      message.MixAll();
      int64_t first = 0, words = 1 + format.position_words();
      CheckPositions(format, tensors, message.data() + 1);
      const int32_t* out = message.data() + words;
      const int64_t levels = bits == kHalfBits ? 0 : LevelCount(bits);
      for (int i = 0; i < 5; ++i) {
        const int64_t kept = tensors[i].count;
        for (int64_t j = 0; j < tensors[i].count; ++j) {
          float value = 0;
          if (j < kept && bits == kHalfBits) {
            value = FloatOf(
                static_cast<int32_t>((static_cast<uint32_t>(out[j / 2]) >> (16 * (j % 2))) << 16));
          } else if (j < kept) {
            uint32_t code = 0;
            for (int b = 0; b < bits; ++b) {
              const int64_t at = (first + j) * bits + b;
              code |= (message[words + 5 * levels + at / 32] >> (at % 32) & 1) << b;
            }
            const float level = FloatOf(out[code >> 1]);
            value = code & 1 ? -level : level;
          }
          Check(residuals[i][indices[i][j]] == FloatOf(values[i][j]) - value, "coded: residual");
        }
        int64_t changed = 0;
        for (float r : residuals[i]) changed += r != 0.25f;
        Check(changed <= tensors[i].count, "coded: other residuals stay");
        out += bits == kHalfBits ? CeilDiv(slots[i], 2) : levels;
        first += slots[i];
      }
    }
  }
}

void TestCodedMessageErrors() {
  const uint32_t good[] = {3, 7}, descending[] = {7, 3};
  const int32_t values[] = {BitsOf(1), BitsOf(-2)};
  float residual[10];
  uint32_t scratch[2];
  for (int bits : {1, kHalfBits}) {
    TopKFormat format;
    format.streams = {{10, 2, 1}};
    format.value_bits = bits;
    TopKTensor tensor = {10, 2, 2, good, values, residual, 0};
    Buffer<int32_t> message(format.words(&tensor, 1));
    CodecError error;
    Check(EncodeTopK(format, &tensor, 1, scratch, message.data(), &error) == Status::kOk &&
              message[0] == 1,
          "coded: ascending");
    tensor.indices = descending;
    Check(EncodeTopK(format, &tensor, 1, scratch, message.data(), &error) ==
                  Status::kInvalidMessage &&
              std::string(error.field) == "index",
          "coded: descending");
  }
}

// -------------------------------------------------------------------------------------- bloom

void TestBloom(const ParallelFor& threads) {
  for (int64_t size : {1, 32, 5000, 70000}) {
    for (int64_t words : {1, 7, 100}) {
      for (int hashes : {1, 4, kMaxHashes}) {
        const BloomFormat format = {size, words, hashes, 99};
        const int64_t count = std::min<int64_t>(size, 40);
        const std::vector<uint32_t> positions = Choose(size, count, 5);
        Buffer<int32_t> filter(words);
        CodecError error;
        Check(BloomBuild(format, positions.data(), count, count, filter.data(), &error) ==
                  Status::kOk,
              "bloom: builds");
        filter.MixAll();
        Buffer<double> scratch(CeilDiv(BloomScratchBytes(size), 8));
        Buffer<uint32_t> all(size);
        const int64_t found =
            BloomQuery(format, filter.data(), size, scratch.data(), threads, all.data());
        Mix(all.data(), found * sizeof(int32_t));
        Check(
            std::is_sorted(all.begin(), all.begin() + found) &&
                std::includes(all.begin(), all.begin() + found, positions.begin(), positions.end()),
            "bloom: all positions are found");
        for (int64_t slots : {int64_t{0}, found / 2, found}) {
          Buffer<uint32_t> first(slots);
          Check(BloomQuery(format, filter.data(), slots, scratch.data(), threads, first.data()) ==
                        slots &&
                    std::equal(first.begin(), first.end(), all.begin()),
                "bloom: the first positives");
        }
      }
    }
  }
  const BloomFormat format = {10, 1, 2, 0};
  const uint32_t outside[] = {3, 10};
  int32_t filter;
  CodecError error;
  Check(BloomBuild(format, outside, 2, 2, &filter, &error) == Status::kInvalidMessage &&
            std::string(error.field) == "index" && error.slot == 1,
        "bloom: outside");
  Check(BloomBuild(format, outside, 2, 3, &filter, &error) == Status::kInvalidMessage &&
            std::string(error.field) == "count",
        "bloom: too many");
}

// ------------------------------------------------------------------------------ packed bits

void TestFixedBits() {
  std::mt19937 random(1);
  for (int bits = 0; bits <= kMaxCodeBits; ++bits) {
    for (const int64_t count : {0, 1, 31, 32, 33, 100}) {
      Buffer<uint32_t> codes(count), words(PackedWords(count, bits)), back(count);
      for (uint32_t& code : codes) code = random();
      PackBits(codes.data(), count, bits, words.data());
      UnpackBits(words.data(), count, bits, back.data());
      bool same = true;
      for (int64_t i = 0; i < count; ++i) {
        same = same && back[i] == Low(codes[i], bits);
        for (int64_t t = i * bits; t < (i + 1) * bits; ++t) {
          same = same && (words[t / 32] >> (t % 32) & 1) == (codes[i] >> (t - i * bits) & 1);
        }
      }
      Check(same, "bits: round trip");
      words.MixAll();
    }
  }
}

void TestVaryingBits() {
  std::mt19937 random(2);
  const int64_t count = 50;
  Buffer<int64_t> codes(count);
  Buffer<int32_t> lengths(count);
  int64_t bits = 0;
  for (int64_t i = 0; i < count; ++i) {
    codes[i] = static_cast<int64_t>(random()) << 20 ^ random();
    lengths[i] = random() % 33;
    bits += lengths[i];
  }
  CodecError error;
  for (int64_t size = 0; size <= CeilDiv(bits, 32) + 2; ++size) {
    Buffer<uint32_t> words(size);
    Check(WriteBits(codes.data(), lengths.data(), count, size, words.data(), &error) == Status::kOk,
          "bits: written");
    int64_t t = 0;
    bool same = true;
    for (int64_t i = 0; i < count; ++i) {
      for (int b = 0; b < lengths[i] && t < 32 * size; ++b, ++t) {
        same = same && (words[t / 32] >> (t % 32) & 1) == (codes[i] >> b & 1);
      }
    }
    for (; t < 32 * size; ++t) same = same && (words[t / 32] >> (t % 32) & 1) == 0;
    Check(same, "bits: what was written");
  }
  lengths[7] = 33;
  Buffer<uint32_t> words(1);
  Check(WriteBits(codes.data(), lengths.data(), count, 1, words.data(), &error) ==
                Status::kInvalidMessage &&
            error.slot == 7 && error.value == 33,
        "bits: a length that no code has");
}

void TestBitmap() {
  for (const int64_t count : {0, 1, 40, 320}) {
    const std::vector<uint32_t> positions = Choose(320, count, 3);
    Buffer<uint32_t> words(10), all(320), first(5);
    CodecError error;
    Check(MakeBitmap(positions.data(), count, count, 10, words.data(), &error) == Status::kOk,
          "bitmap: made");
    FindBits(words.data(), 10, 320, all.data());
    FindBits(words.data(), 10, 5, first.data());
    Check(CountBits(words.data(), 10) == count &&
              std::equal(positions.begin(), positions.end(), all.begin()) &&
              std::all_of(all.begin() + count, all.end(), [](uint32_t p) { return p == 0; }) &&
              std::equal(first.begin(), first.end(), all.begin()),
          "bitmap: found");
    words.MixAll();
    if (count < 2) continue;
    std::vector<uint32_t> bad = positions;
    bad[1] = bad[0];
    Check(
        MakeBitmap(bad.data(), count, count, 10, words.data(), &error) == Status::kInvalidMessage &&
            error.slot == 1,
        "bitmap: positions that do not ascend");
    bad[1] = 320;
    Check(
        MakeBitmap(bad.data(), count, count, 10, words.data(), &error) == Status::kInvalidMessage &&
            error.value == 320,
        "bitmap: a position beyond it");
    Check(MakeBitmap(bad.data(), count, count + 1, 10, words.data(), &error) ==
              Status::kInvalidMessage,
          "bitmap: a count beyond the slots");
  }
}

void TestRice() {
  std::mt19937 random(4);
  for (const int rice : {0, 1, 5, 30}) {
    for (const int64_t count : {0, 1, 33, 500}) {
      Buffer<int32_t> numbers(count), back(count);
      int64_t bits = count;
      for (int32_t& x : numbers) {
        x = rice == 30 ? static_cast<int32_t>(random()) : static_cast<int32_t>(random() % 60) - 30;
        const int64_t wide = x;
        bits += (wide < 0 ? -2 * wide - 1 : 2 * wide) >> rice;
      }
      const RiceFormat format = {count, CeilDiv(bits, 32), rice};
      Buffer<int32_t> code(format.words());
      CodecError error;
      Check(RiceEncode(format, numbers.data(), code.data(), &error) == Status::kOk &&
                RiceDecode(format, code.data(), back.data(), &error) == Status::kOk &&
                std::equal(numbers.begin(), numbers.end(), back.begin()),
            "rice: round trip");
      code.MixAll();
      if (format.bitmap_words == 0) continue;
      const RiceFormat shorter = {count, format.bitmap_words - 1, rice};
      Buffer<int32_t> less(shorter.words());
      Check(RiceEncode(shorter, numbers.data(), less.data(), &error) == Status::kInvalidMessage,
            "rice: no room");
    }
  }
}

void TestRiceErrors() {
  std::mt19937 random(5);
  const RiceFormat format = {20, 4, 3};
  Buffer<int32_t> numbers(20), code(format.words()), back(20);
  for (int round = 0; round < 5000; ++round) {
    for (int32_t& x : numbers) x = static_cast<int32_t>(random() % 40) - 20;
    CodecError error;
    Check(RiceEncode(format, numbers.data(), code.data(), &error) == Status::kOk, "rice: encodes");
    for (unsigned n = random() % 3; n > 0; --n) code[random() % code.size()] ^= 1 << random() % 32;
    const auto* bitmap = reinterpret_cast<uint32_t*>(code.data()) + format.low_words();
    const bool good = CountBits(bitmap, 4) == 20;
    Check((RiceDecode(format, code.data(), back.data(), &error) == Status::kOk) == good,
          "rice: mutated");
    if (good) back.MixAll();
  }
  std::fill(code.begin(), code.end(), 0);
  CodecError error;
  Check(RiceDecode(format, code.data(), back.data(), &error) == Status::kOk &&
            std::all_of(back.begin(), back.end(), [](int32_t x) { return x == 0; }),
        "rice: nobody's message");
}

// -------------------------------------------------------------------------------------- merge

struct Blocks {
  Buffer<uint32_t> indices;
  Buffer<float> values;
  Buffer<int32_t> counts;
  SparseBlocks blocks;

  Blocks(int64_t ranks, int64_t slots, int64_t size)
      : indices(ranks * slots), values(ranks * slots), counts(ranks) {
    blocks = {indices.data(), values.data(), counts.data(), 1, ranks, slots, size};
    std::mt19937 random(ranks);
    for (int64_t r = 0; r < ranks; ++r) {
      const auto chosen = Choose(size, slots, 11 + r);
      std::copy(chosen.begin(), chosen.end(), indices.data() + r * slots);
      counts[r] = slots - r % 2;
      for (int64_t i = 0; i < slots; ++i) {
        values[r * slots + i] = static_cast<float>(random() % 9) / 4 - 1;
      }
    }
  }
};

void TestMerge() {
  for (int64_t ranks : {0, 1, 2, 3, 8}) {
    for (int64_t slots : {1, 2, 50}) {
      for (int64_t k : {int64_t{0}, int64_t{1}, slots, ranks * slots}) {
        const int64_t size = 90;
        Blocks b(ranks, slots, size);
        const int64_t bytes = MergeScratchBytes(ranks, slots);
        Buffer<double> scratch(CeilDiv(bytes, 8));
        Buffer<uint32_t> kept_at(k), dropped_at(ranks * slots);
        Buffer<float> kept(k), dropped(ranks * slots);
        int32_t keep = -1, drop = -1;
        const SparseOutput to_kept = {kept_at.data(), kept.data(), &keep};
        const SparseOutput to_dropped = {dropped_at.data(), dropped.data(), &drop};
        CodecError error;
        Check(SparseMerge(b.blocks, k, scratch.data(), bytes - 1, to_kept, to_dropped, &error) ==
                  Status::kScratchTooSmall,
              "merge: too little scratch memory is noticed");
        Check(SparseMerge(b.blocks, k, scratch.data(), bytes, to_kept, to_dropped, &error) ==
                  Status::kOk,
              "merge: status");
        kept_at.MixAll();
        kept.MixAll();
        std::map<uint32_t, float> sums;
        for (int64_t r = 0; r < ranks; ++r) {
          for (int32_t i = 0; i < b.counts[r]; ++i) {
            sums[b.indices[r * slots + i]] += b.values[r * slots + i];
          }
        }
        std::vector<std::pair<float, uint32_t>> order;  // The largest first, then the lower index.
        for (const auto& [index, sum] : sums) {
          if (sum != 0) order.push_back({-std::fabs(sum), index});
        }
        std::sort(order.begin(), order.end());
        const int64_t expected = std::min<int64_t>(k, order.size());
        Check(keep == expected && keep + drop == static_cast<int64_t>(order.size()),
              "merge: count");
        std::set<uint32_t> largest;
        for (int64_t i = 0; i < expected; ++i) largest.insert(order[i].second);
        Check(std::equal(largest.begin(), largest.end(), kept_at.begin()), "merge: kept");
        for (int32_t i = 0; i < keep; ++i) Check(kept[i] == sums[kept_at[i]], "merge: sum");
        for (int32_t i = 0; i < drop; ++i) {
          Check(dropped[i] == sums[dropped_at[i]] && largest.count(dropped_at[i]) == 0 &&
                    (i == 0 || dropped_at[i] > dropped_at[i - 1]),
                "merge: dropped");
        }
        Check(std::all_of(kept.begin() + keep, kept.end(), [](float v) { return v == 0; }) &&
                  std::all_of(dropped_at.begin() + drop, dropped_at.end(),
                              [](uint32_t v) { return v == 0; }),
              "merge: unused slots are 0");
      }
    }
  }
}

void TestMergeErrors() {
  auto refused = [](const char* field, int64_t slot, auto change) {
    Blocks b(3, 20, 90);
    change(&b);
    const int64_t bytes = MergeScratchBytes(3, 20);
    Buffer<double> scratch(CeilDiv(bytes, 8));
    Buffer<uint32_t> kept_at(5), dropped_at(60);
    Buffer<float> kept(5), dropped(60);
    int32_t keep, drop;
    CodecError error;
    const Status status =
        SparseMerge(b.blocks, 5, scratch.data(), bytes, {kept_at.data(), kept.data(), &keep},
                    {dropped_at.data(), dropped.data(), &drop}, &error);
    Check(status == Status::kInvalidMessage && error.found() && error.field == std::string(field) &&
              error.rank == 1 && error.slot == slot,
          std::string("merge refuses a bad ") + field);
  };
  refused("count", 0, [](Blocks* b) { b->counts[1] = 21; });
  refused("count", 0, [](Blocks* b) { b->counts[1] = -1; });
  refused("index", 7, [](Blocks* b) { b->indices[27] = 90; });
  refused("index", 0, [](Blocks* b) { b->indices[20] = UINT32_MAX; });
  refused("index", 6, [](Blocks* b) { b->indices[26] = b->indices[25]; });
  refused("value", 3, [](Blocks* b) { b->values[23] = NAN; });
  refused("value", 3, [](Blocks* b) { b->values[23] = -INFINITY; });
}

// --------------------------------------------------------------- unsigned 32-bit positions

// Few positions of a tensor of `size` elements; the last one is its last element.
std::vector<uint32_t> Far(int64_t size) {
  return {3, 2147483646u, 2147483647u, 2147483648u, 3000000000u, static_cast<uint32_t>(size - 1)};
}

void TestFarGolomb(int64_t size) {
  const std::vector<uint32_t> far = Far(size);
  const int64_t slots = 8, count = 6;
  for (int rice : {8, 27, 30}) {
    const GolombFormat format = {size, slots, rice};
    Buffer<int32_t> part(format.part_words());
    Buffer<uint32_t> back(slots);
    CodecError error;
    int32_t got = -1;
    Check(GolombEncode(format, far.data(), count, part.data(), &error) == Status::kOk &&
              GolombDecode(format, part.data(), back.data(), &got, &error) == Status::kOk &&
              got == count && std::equal(far.begin(), far.end(), back.begin()) && back[7] == 0,
          "golomb: far positions");
    part.MixAll();
    // For a tensor that is one element shorter, the last position is out of range.
    const GolombFormat shorter = {size - 1, slots, rice};
    if (shorter.words() != format.words()) continue;
    Check(
        GolombDecode(shorter, part.data(), back.data(), &got, &error) == Status::kInvalidMessage &&
            error.field == std::string("index") && error.slot == 5 && error.value == size - 1,
        "golomb: beyond a large tensor");
    Check(
        GolombEncode(shorter, far.data(), count, part.data(), &error) == Status::kInvalidMessage &&
            error.slot == 5 && error.value == size - 1 && error.limit == size - 2,
        "golomb: a position beyond a large tensor");
  }
}

void TestFarBloom(int64_t size) {
  const std::vector<uint32_t> far = Far(size);
  const BloomFormat format = {size, 100, 12, 7};
  Buffer<int32_t> filter(100), alone(100);
  CodecError error;
  Check(BloomBuild(format, far.data(), 6, 6, filter.data(), &error) == Status::kOk, "bloom: far");
  filter.MixAll();
  const std::vector<int32_t> together(filter.begin(), filter.end());
  std::vector<int32_t> joined(100);
  for (const uint32_t position : far) {  // All bits, and no others, are from one of them.
    BloomBuild(format, &position, 1, 1, alone.data(), &error);
    for (int w = 0; w < 100; ++w) joined[w] |= alone[w];
  }
  Check(joined == together, "bloom: the bits of far positions");
  const BloomFormat shorter = {size - 1, 100, 12, 7};
  Check(BloomBuild(shorter, far.data(), 6, 6, filter.data(), &error) == Status::kInvalidMessage &&
            error.slot == 5 && error.value == size - 1 && error.limit == size - 2,
        "bloom: a position beyond a large tensor");
}

void TestFarMerge(int64_t size) {
  const uint32_t last = static_cast<uint32_t>(size - 1);
  Buffer<uint32_t> indices(6), kept_at(2), dropped_at(6);
  Buffer<float> values(6), kept(2), dropped(6);
  const uint32_t sent[] = {7, 2147483648u, last, 2147483647u, 2147483648u, last};
  const float of_sent[] = {1, 2, 3, 4, 5, -9};
  std::copy(sent, sent + 6, indices.begin());
  std::copy(of_sent, of_sent + 6, values.begin());
  const int32_t counts[] = {3, 3};
  SparseBlocks blocks = {indices.data(), values.data(), counts, 1, 2, 3, size};
  const int64_t bytes = MergeScratchBytes(2, 3);
  Buffer<double> scratch(CeilDiv(bytes, 8));
  int32_t keep, drop;
  const SparseOutput to_kept = {kept_at.data(), kept.data(), &keep};
  const SparseOutput to_dropped = {dropped_at.data(), dropped.data(), &drop};
  CodecError error;
  Check(SparseMerge(blocks, 2, scratch.data(), bytes, to_kept, to_dropped, &error) == Status::kOk &&
            keep == 2 && drop == 2 && kept_at[0] == 2147483648u && kept_at[1] == last &&
            kept[0] == 7 && kept[1] == -6 && dropped_at[0] == 7 && dropped_at[1] == 2147483647u &&
            dropped[0] == 1 && dropped[1] == 4,
        "merge: far positions");
  blocks.size = size - 1;
  Check(SparseMerge(blocks, 2, scratch.data(), bytes, to_kept, to_dropped, &error) ==
                Status::kInvalidMessage &&
            error.rank == 0 && error.slot == 2 && error.value == last && error.limit == size - 2,
        "merge: a position beyond a large tensor");
}

void TestFarPositions() {
  for (const int64_t size : {(int64_t{1} << 31) + 1000000001, kMaxElements}) {
    TestFarGolomb(size);
    TestFarBloom(size);
    TestFarMerge(size);
  }
}

// Checksums, also of whole blocks, against Horner's rule; a sealed message opens to its flag, a
// changed one fails to open.
void TestChecksums() {
  std::mt19937 random(11);
  for (const int64_t count : {0, 1, 2, 1023, 1024, 1025, 5000}) {
    std::vector<uint32_t> words(count);
    for (uint32_t& word : words) word = static_cast<uint32_t>(random());
    uint64_t expected = 0;
    for (int64_t i = count - 1; i >= 0; --i) {
      expected = (expected + words[i]) % kChecksumPrime * kChecksumBase % kChecksumPrime;
    }
    const uint32_t sum = Checksum(words.data(), count);
    Check(sum == expected, "checksum of " + std::to_string(count) + " words");
    Mix(&sum, sizeof(sum));
    for (const bool finite : {false, true}) {
      const uint32_t seal = Seal(finite, words.data(), count);
      Check(OpenSeal(seal, words.data(), count) == finite, "seal: flag");
      Check(OpenSeal(seal ^ 1, words.data(), count) == -1, "seal: changed");
      if (count == 0) continue;
      words[count - 1] ^= 1u << 31;
      Check(OpenSeal(seal, words.data(), count) == -1, "seal: changed word");
      words[count - 1] ^= 1u << 31;
    }
  }
}

}  // namespace
}  // namespace redsync

int main(int argc, char** argv) {
  const auto threads = redsync::testing::Threads(argc > 1 ? std::atoi(argv[1]) : 1);
  redsync::TestQuantize(threads);
  redsync::TestQuantizeErrors(threads);
  redsync::TestGolomb();
  redsync::TestGolombWorst();
  redsync::TestHalves(threads);
  redsync::TestLevels();
  redsync::TestCodedMessage();
  redsync::TestCodedMessageErrors();
  redsync::TestBloom(threads);
  redsync::TestFixedBits();
  redsync::TestVaryingBits();
  redsync::TestBitmap();
  redsync::TestRice();
  redsync::TestRiceErrors();
  redsync::TestMerge();
  redsync::TestMergeErrors();
  redsync::TestFarPositions();
  redsync::TestChecksums();
  const char* const names[] = {"plain", "avx2", "avx512"};
  return redsync::testing::Report(names[static_cast<int>(redsync::WidestSimd())]);
}
