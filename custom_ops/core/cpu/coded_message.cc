#include "custom_ops/core/cpu/coded_message.h"

#include <algorithm>
#include <cmath>

#include "custom_ops/core/cpu/bits.h"

namespace redsync {
namespace {

// Leaves in the residual what a value and its code differ by.
void Keep(const SelectedTensor& t, int64_t i, float sent) {
  t.residual[t.indices[i]] = FloatOf(t.values[i]) - sent;
}

// Codes the first `count` values of a tensor that has the slots from `first` on.
void SendByMeans(const SelectedTensor& t, int64_t count, int bits, int64_t first, uint32_t* codes,
                 float* levels, uint32_t* words) {
  CodeByMeans(t.values, count, bits, levels, codes);
  BitWriter writer(words, first * bits);
  for (int64_t i = 0; i < count; ++i) {
    writer.Put(codes[i], bits);
    const float level = levels[codes[i] >> 1];
    Keep(t, i, codes[i] & 1 ? -level : level);
  }
  writer.Finish();
}

// The same for bfloat16, two in a word; returns whether all are finite.
bool SendHalves(const SelectedTensor& t, int64_t count, uint32_t* words) {
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t half = HalfOf(t.values[i]);
    words[i / 2] |= half << (16 * (i % 2));
    const float sent = FloatOf(static_cast<int32_t>(half << 16));
    finite = finite && std::isfinite(sent);
    Keep(t, i, sent);
  }
  return finite;
}

}  // namespace

int64_t CodedFormat::words(const SelectedTensor* tensors, int64_t count) const {
  int64_t words = 1 + 2 + code_words;
  for (int64_t i = 0; i < count; ++i) {
    words += value_bits == kHalfBits ? CeilDiv(tensors[i].slots, 2) : LevelCount(value_bits);
  }
  return words + (value_bits == kHalfBits ? 0 : CeilDiv(positions.slots * value_bits, 32));
}

Status EncodeSelected(const CodedFormat& format, const SelectedTensor* tensors, int64_t count,
                      uint32_t* scratch, int32_t* message, bool* finite, CodecError* error) {
  const ScopedFlushDenormals flush;
  const int64_t words = format.words(tensors, count), values_at = 3 + format.code_words;
  std::fill(message, message + words, 0);
  int64_t start = 0, selected = 0, sent = 0;
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t j = 0; j < tensors[i].count; ++j) {
      scratch[selected++] = static_cast<uint32_t>(start + tensors[i].indices[j]);
    }
    start += tensors[i].size;
  }
  const Status status = GolombEncodeFitting(format.positions, scratch, selected, format.code_words,
                                            message + 1, &sent, error);
  if (status != Status::kOk) return status;

  const bool halves = format.value_bits == kHalfBits;
  uint32_t* out = reinterpret_cast<uint32_t*>(message + values_at);
  int64_t first = 0;
  *finite = true;
  for (int64_t i = 0; i < count; ++i) {
    const SelectedTensor& t = tensors[i];
    const int64_t kept = std::min(sent, t.count);
    sent -= kept;
    if (halves) {
      *finite = SendHalves(t, kept, out) && *finite;
      out += CeilDiv(t.slots, 2);
    } else {
      const int64_t of_tensor = LevelCount(format.value_bits);
      uint32_t* codes = reinterpret_cast<uint32_t*>(message + values_at + count * of_tensor);
      float levels[1 << (kMaxLevelBits - 1)];
      SendByMeans(t, kept, format.value_bits, first, scratch, levels, codes);
      std::memcpy(out, levels, of_tensor * sizeof(float));
      out += of_tensor;
    }
    for (int64_t j = kept; j < t.count; ++j) Keep(t, j, 0);
    first += t.slots;
  }
  message[0] = 1;
  if (!*finite) std::fill(message, message + words, 0);
  return Status::kOk;
}

}  // namespace redsync
