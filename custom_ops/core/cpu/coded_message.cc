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

// Codes the values of a tensor that has the slots from `first` on.
void SendByMeans(const SelectedTensor& t, int bits, int64_t first, uint32_t* codes, float* levels,
                 uint32_t* words) {
  CodeByMeans(t.values, t.count, bits, levels, codes);
  BitWriter writer(words, first * bits);
  for (int64_t i = 0; i < t.count; ++i) {
    writer.Put(codes[i], bits);
    const float level = levels[codes[i] >> 1];
    Keep(t, i, codes[i] & 1 ? -level : level);
  }
  writer.Finish();
}

// The same for bfloat16, two in a word; returns whether all are finite.
bool SendHalves(const SelectedTensor& t, uint32_t* words) {
  bool finite = true;
  for (int64_t i = 0; i < t.count; ++i) {
    const uint32_t half = HalfOf(t.values[i]);
    words[i / 2] |= half << (16 * (i % 2));
    const float sent = FloatOf(static_cast<int32_t>(half << 16));
    finite = finite && std::isfinite(sent);
    Keep(t, i, sent);
  }
  return finite;
}

// Codes the positions of all tensors that share a stream.
Status SendPositions(const GolombFormat& format, int64_t stream, const SelectedTensor* tensors,
                     int64_t count, uint32_t* scratch, int32_t* part, CodecError* error) {
  int64_t start = 0, selected = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (tensors[i].stream != stream) continue;
    for (int64_t j = 0; j < tensors[i].count; ++j) {
      scratch[selected++] = static_cast<uint32_t>(start + tensors[i].indices[j]);
    }
    start += tensors[i].size;
  }
  return GolombEncode(format, scratch, selected, part, error);
}

}  // namespace

int64_t CodedFormat::position_words() const {
  int64_t words = 0;
  for (const GolombFormat& stream : streams) words += 2 + stream.words();
  return words;
}

int64_t CodedFormat::words(const SelectedTensor* tensors, int64_t count) const {
  int64_t words = 1 + position_words(), slots = 0;
  for (int64_t i = 0; i < count; ++i) {
    words += value_bits == kHalfBits ? CeilDiv(tensors[i].slots, 2) : LevelCount(value_bits);
    slots += tensors[i].slots;
  }
  return words + (value_bits == kHalfBits ? 0 : CeilDiv(slots * value_bits, 32));
}

Status EncodeSelected(const CodedFormat& format, const SelectedTensor* tensors, int64_t count,
                      uint32_t* scratch, int32_t* message, bool* finite, CodecError* error) {
  const ScopedFlushDenormals flush;
  const int64_t words = format.words(tensors, count);
  std::fill(message, message + words, 0);
  int32_t* part = message + 1;
  for (size_t s = 0; s < format.streams.size(); ++s) {
    const Status status = SendPositions(format.streams[s], s, tensors, count, scratch, part, error);
    if (status != Status::kOk) return status;
    part += 2 + format.streams[s].words();
  }

  const bool halves = format.value_bits == kHalfBits;
  const int64_t of_tensor = halves ? 0 : LevelCount(format.value_bits);
  uint32_t* out = reinterpret_cast<uint32_t*>(part);
  uint32_t* codes = out + count * of_tensor;
  int64_t first = 0;
  *finite = true;
  for (int64_t i = 0; i < count; ++i) {
    const SelectedTensor& t = tensors[i];
    if (halves) {
      *finite = SendHalves(t, out) && *finite;
      out += CeilDiv(t.slots, 2);
    } else {
      float levels[1 << (kMaxLevelBits - 1)];
      SendByMeans(t, format.value_bits, first, scratch, levels, codes);
      std::memcpy(out, levels, of_tensor * sizeof(float));
      out += of_tensor;
    }
    first += t.slots;
  }
  message[0] = 1;
  if (!*finite) std::fill(message, message + words, 0);
  return Status::kOk;
}

}  // namespace redsync
