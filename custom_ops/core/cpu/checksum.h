// Checksums of messages on CPUs.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_CHECKSUM_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_CHECKSUM_H_

#include <cstdint>

#include "custom_ops/core/checksum.h"

namespace redsync {

// Returns the checksum of `count` words, in [0, kChecksumPrime).
uint32_t Checksum(const uint32_t* words, int64_t count);

// Returns the seal: the first word of a message, which has its flag and the words' checksum.
uint32_t Seal(bool finite, const uint32_t* words, int64_t count);

// Returns the flag, 0 or 1, in a seal; -1 if the seal does not match the words.
int OpenSeal(uint32_t seal, const uint32_t* words, int64_t count);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_CHECKSUM_H_
