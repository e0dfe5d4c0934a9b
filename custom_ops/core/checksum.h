// Checksums of messages, by which a worker detects a corrupted message.
//
// The checksum of words w[0], w[1], ... is the sum of w[i] * g^(i + 1) modulo the prime p = 2^32
// - 5. As p is a prime, a change of any single word changes it, unless both values are equal modulo
// p (as int32: -5 and 0, up to -1 and 4). And g is such that two inverted bits change it, wherever
// they are in the first kChecksumReach words. Other changes go unnoticed once in 2^32 times. It
// takes no instruction that a CPU may not have, and is a sum of products, which any device adds up
// in any order.
//
// It travels in the place of the message's finite flag, so no message gets longer: the flag is one
// more term, behind all words.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CHECKSUM_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CHECKSUM_H_

#include <cstdint>

namespace redsync {

constexpr uint64_t kChecksumPrime = 4294967291;  // 2^32 - 5
constexpr uint64_t kChecksumBase = 2300216400;   // g
constexpr int64_t kChecksumReach = int64_t{1} << 25;
constexpr uint64_t kNotFiniteTerm = 3272904604;  // g^(kChecksumReach + 1)
constexpr uint64_t kFiniteTerm = 2574963684;     // That, and g^kChecksumReach.

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CHECKSUM_H_
