#include "custom_ops/core/cpu/checksum.h"

#include <algorithm>

#include "custom_ops/core/cpu/simd.h"

namespace redsync {
namespace {

constexpr int kBlock = 1024;  // Words; the sums of the halves of their products fit 64 bits.

struct Powers {
  uint64_t of_base[kBlock];  // g^1 ... g^kBlock, 64 bits wide for the vector loop
  uint64_t block;            // g^kBlock
};

constexpr Powers MakePowers() {
  Powers powers{};
  uint64_t power = 1;
  for (uint64_t& p : powers.of_base) p = power = power * kChecksumBase % kChecksumPrime;
  powers.block = power;
  return powers;
}

constexpr Powers kPowers = MakePowers();

// Returns the polynomial of up to kBlock words. Compiled for several instruction sets.
inline __attribute__((always_inline)) uint64_t SumBlock(const uint32_t* words, int count) {
  uint64_t low = 0, high = 0;
  for (int i = 0; i < count; ++i) {
    const uint64_t product = words[i] * kPowers.of_base[i];
    low += product & 0xffffffffu;
    high += product >> 32;
  }
  return (low + 5 * high) % kChecksumPrime;  // 2^32 = 5 modulo p
}

uint64_t Plain(const uint32_t* words, int count) { return SumBlock(words, count); }

#ifdef REDSYNC_X86_VERSIONS
__attribute__((target("avx2"))) uint64_t Avx2(const uint32_t* words, int count) {
  return SumBlock(words, count);
}
__attribute__((target("avx512f,avx512vl,avx512dq,avx512bw"))) uint64_t Avx512(const uint32_t* words,
                                                                              int count) {
  return SumBlock(words, count);
}
#endif

using BlockFunction = uint64_t (*)(const uint32_t* words, int count);

BlockFunction Widest() {
#ifdef REDSYNC_X86_VERSIONS
  const Simd simd = WidestSimd();
  return simd == Simd::kAvx512 ? Avx512 : simd == Simd::kAvx2 ? Avx2 : Plain;
#else
  return Plain;
#endif
}

}  // namespace

uint32_t Checksum(const uint32_t* words, int64_t count) {
  const BlockFunction block = Widest();
  uint64_t sum = 0, power = 1;
  for (int64_t start = 0; start < count; start += kBlock) {
    const int length = static_cast<int>(std::min<int64_t>(kBlock, count - start));
    sum = (sum + block(words + start, length) * power) % kChecksumPrime;
    power = power * kPowers.block % kChecksumPrime;
  }
  return static_cast<uint32_t>(sum);
}

uint32_t Seal(bool finite, const uint32_t* words, int64_t count) {
  const uint64_t term = finite ? kFiniteTerm : kNotFiniteTerm;
  return static_cast<uint32_t>((Checksum(words, count) + term) % kChecksumPrime);
}

int OpenSeal(uint32_t seal, const uint32_t* words, int64_t count) {
  const uint64_t sum = Checksum(words, count);
  if (seal == (sum + kFiniteTerm) % kChecksumPrime) return 1;
  return seal == (sum + kNotFiniteTerm) % kChecksumPrime ? 0 : -1;
}

}  // namespace redsync
