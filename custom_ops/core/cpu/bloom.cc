#include "custom_ops/core/cpu/bloom.h"

#include <algorithm>

namespace redsync {
namespace {

constexpr int64_t kBlockWords = 512;  // Words of the map of positives in a thread's task.
constexpr int64_t kProbeCost = 8;     // Cycles to query a position.

struct Probes {
  uint32_t at;
  uint32_t step;

  Probes(const BloomFormat& format, int64_t position) {
    uint64_t h = static_cast<uint64_t>(position) +
                 (static_cast<uint64_t>(format.seed) + 1) * 0x9E3779B97F4A7C15u;
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
    h ^= h >> 31;
    at = static_cast<uint32_t>(h);
    step = static_cast<uint32_t>(h >> 32) | 1;
  }
  // Returns the bit of this probe, and advances to the next probe.
  uint64_t Next(uint64_t bits) {
    const uint64_t bit = at * bits >> 32;
    at += step;
    return bit;
  }
};

bool Holds(const BloomFormat& format, const uint32_t* filter, int64_t position) {
  Probes probes(format, position);
  const uint64_t bits = 32 * static_cast<uint64_t>(format.words);
  for (int t = 0; t < format.hashes; ++t) {
    const uint64_t bit = probes.Next(bits);
    if ((filter[bit / 32] >> (bit % 32) & 1) == 0) return false;
  }
  return true;
}

// Returns a mask of the positives among the 32 positions from `first` on.
uint32_t Positives(const BloomFormat& format, const uint32_t* filter, int64_t first) {
  uint32_t map = 0;
  const int64_t n = std::min<int64_t>(32, format.size - first);
  for (int64_t i = 0; i < n; ++i) {
    map |= static_cast<uint32_t>(Holds(format, filter, first + i)) << i;
  }
  return map;
}

}  // namespace

Status BloomBuild(const BloomFormat& format, const uint32_t* positions, int64_t slots,
                  int64_t count, int32_t* filter, CodecError* error) {
  if (count < 0 || count > slots) return Fail("count", 0, count, slots, nullptr, error);
  std::fill(filter, filter + format.words, 0);
  auto* words = reinterpret_cast<uint32_t*>(filter);
  const uint64_t bits = 32 * static_cast<uint64_t>(format.words);
  for (int64_t i = 0; i < count; ++i) {
    if (positions[i] >= format.size) {
      const auto shown = static_cast<double>(ReportedIndex(positions[i], format.size));
      return Fail("index", i, shown, format.size - 1, nullptr, error);
    }
    Probes probes(format, positions[i]);
    for (int t = 0; t < format.hashes; ++t) {
      const uint64_t bit = probes.Next(bits);
      words[bit / 32] |= 1u << (bit % 32);
    }
  }
  return Status::kOk;
}

int64_t BloomScratchBytes(int64_t size) {
  const int64_t words = CeilDiv(size, 32), blocks = CeilDiv(words, kBlockWords);
  return 8 * (blocks + 1) + 4 * words;
}

int64_t BloomQuery(const BloomFormat& format, const int32_t* filter, int64_t slots, void* scratch,
                   const ParallelFor& parallel_for, uint32_t* positions) {
  const int64_t words = CeilDiv(format.size, 32), blocks = CeilDiv(words, kBlockWords);
  auto* counts = static_cast<int64_t*>(scratch);  // Number of positives before each block.
  auto* map = reinterpret_cast<uint32_t*>(counts + blocks + 1);
  const auto* bits = reinterpret_cast<const uint32_t*>(filter);
  counts[0] = 0;
  parallel_for(blocks, 32 * kBlockWords * kProbeCost, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      int64_t count = 0;
      for (int64_t w = b * kBlockWords; w < std::min(words, (b + 1) * kBlockWords); ++w) {
        map[w] = Positives(format, bits, 32 * w);
        count += __builtin_popcount(map[w]);
      }
      counts[b + 1] = count;
    }
  });
  for (int64_t b = 0; b < blocks; ++b) counts[b + 1] += counts[b];
  parallel_for(blocks, 32 * kBlockWords, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      int64_t at = counts[b];
      for (int64_t w = b * kBlockWords; w < std::min(words, (b + 1) * kBlockWords); ++w) {
        for (uint32_t left = map[w]; left != 0 && at < slots; left &= left - 1) {
          positions[at++] = static_cast<uint32_t>(32 * w + __builtin_ctz(left));
        }
      }
    }
  });
  const int64_t listed = std::min(counts[blocks], slots);
  std::fill(positions + listed, positions + slots, 0);
  return listed;
}

}  // namespace redsync
