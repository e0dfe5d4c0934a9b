// Checksums of messages, with which a worker detects corruption.
//
// The checksum of words w[0], w[1], ... is the sum of w[i] * g^(i + 1) modulo the prime p = 2^32
// - 5. It detects a change of any single word, because p is a prime, unless both values are equal
// modulo p (as int32: -5 and 0, up to -1 and 4). By the choice of g it detects any two inverted
// bits in the first kChecksumReach words. It misses one in 2^32 of other changes. It needs no
// special CPU instructions, and a device may add the products in any order.
//
// The checksum replaces the message's finite flag, so messages do not get longer. The flag is one
// more term of the sum, after all words.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CHECKSUM_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CHECKSUM_H_

#include <cstdint>

namespace redsync {

constexpr uint64_t kChecksumPrime = 4294967291;  // 2^32 - 5
constexpr uint64_t kChecksumBase = 2300216400;   // g
constexpr int64_t kChecksumReach = int64_t{1} << 25;
constexpr uint64_t kNotFiniteTerm = 3272904604;  // g^(kChecksumReach + 1)
constexpr uint64_t kFiniteTerm = 2574963684;     // kNotFiniteTerm + g^kChecksumReach modulo p.

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CHECKSUM_H_
