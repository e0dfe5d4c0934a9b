// Checksums of messages on CPUs.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_CHECKSUM_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_CHECKSUM_H_

#include <cstdint>

#include "custom_ops/core/checksum.h"

namespace redsync {

// The checksum of `count` words, in [0, kChecksumPrime).
uint32_t Checksum(const uint32_t* words, int64_t count);

// The word in front of a message's other words, which carries its flag and their checksum.
uint32_t Seal(bool finite, const uint32_t* words, int64_t count);

// The flag, 0 or 1, that a seal carries; -1 if it is not one of these words.
int OpenSeal(uint32_t seal, const uint32_t* words, int64_t count);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_CHECKSUM_H_
