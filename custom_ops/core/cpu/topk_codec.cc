#include "custom_ops/core/cpu/topk_codec.h"

#include <algorithm>
#include <vector>

#include "custom_ops/core/cpu/bits.h"
#include "custom_ops/core/message_layout.h"

namespace redsync {
namespace {

void StoreCodingError(const TopKTensor& t, int64_t i, float decoded) {
  constexpr int64_t kAhead = 16;
  if (i + kAhead < t.count) __builtin_prefetch(t.residual + t.indices[i + kAhead], 1);
  t.residual[t.indices[i]] = FloatOf(t.values[i]) - decoded;
}

// Encodes a tensor whose slots begin at `first`.
void EncodeLevels(const TopKTensor& t, int bits, int64_t first, uint32_t* codes, float* levels,
                  uint32_t* words) {
  CodeByMeans(t.values, t.count, bits, levels, codes);
  BitWriter writer(words, first * bits);
  for (int64_t i = 0; i < t.count; ++i) {
    writer.Put(codes[i], bits);
    const float level = levels[codes[i] >> 1];
    StoreCodingError(t, i, codes[i] & 1 ? -level : level);
  }
  writer.Finish();
}

// Writes two values per word.
void EncodeBfloat16(const TopKTensor& t, uint32_t* words) {
  for (int64_t i = 0; i < t.count; ++i) {
    const uint32_t half = HalfOf(t.values[i]);
    words[i / 2] |= half << (16 * (i % 2));
    StoreCodingError(t, i, FloatOf(static_cast<int32_t>(half << 16)));
  }
}

// Encodes all tensors that share a stream.
Status EncodePositions(const GolombFormat& format, int64_t stream, const TopKTensor* tensors,
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

// A tensor's range of positions in its stream.
struct Share {
  const uint32_t *begin, *end;
  uint32_t start;
};

// Reads the bits of `count` values that are coded by the tensor's levels.
void ReadLevels(const int32_t* levels, int bits, BitReader codes, int64_t count, int32_t* values) {
  int64_t i = 0;
  if (bits == 1) {  // Only signs, read 32 at a time.
    for (; i + 32 <= count; i += 32) {
      const uint32_t signs = codes.Take(32);
      for (int j = 0; j < 32; ++j) {
        values[i + j] = levels[0] ^ static_cast<int32_t>(signs >> j << 31);
      }
    }
  }
  for (; i < count; ++i) {
    const uint32_t code = codes.Take(bits);
    values[i] = levels[code >> 1] ^ static_cast<int32_t>(code << 31);
  }
}

// Reads the bits of `count` values that are coded as bfloat16.
void ReadHalves(BitReader halves, int64_t count, int32_t* values) {
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<int32_t>(halves.Take(16) << 16);
}

}  // namespace

int64_t TopKFormat::position_words() const {
  int64_t words = 0;
  for (const GolombFormat& stream : streams) words += stream.part_words();
  return words;
}

int64_t TopKFormat::words(const TopKTensor* tensors, int64_t count) const {
  int64_t words = kHeaderWords + position_words(), slots = 0;
  for (int64_t i = 0; i < count; ++i) {
    words += value_bits == kHalfBits ? CeilDiv(tensors[i].slots, 2) : LevelCount(value_bits);
    slots += tensors[i].slots;
  }
  return words + (value_bits == kHalfBits ? 0 : CeilDiv(slots * value_bits, 32));
}

Status EncodeTopK(const TopKFormat& format, const TopKTensor* tensors, int64_t count,
                  uint32_t* scratch, int32_t* message, CodecError* error) {
  const ScopedFlushDenormals flush;
  const int64_t words = format.words(tensors, count);
  std::fill(message, message + words, 0);
  int32_t* part = message + kHeaderWords;
  for (size_t s = 0; s < format.streams.size(); ++s) {
    const Status status =
        EncodePositions(format.streams[s], s, tensors, count, scratch, part, error);
    if (status != Status::kOk) return status;
    part += format.streams[s].part_words();
  }

  const bool halves = format.value_bits == kHalfBits;
  const int64_t of_tensor = halves ? 0 : LevelCount(format.value_bits);
  uint32_t* out = reinterpret_cast<uint32_t*>(part);
  uint32_t* codes = out + count * of_tensor;
  int64_t first = 0;
  for (int64_t i = 0; i < count; ++i) {
    const TopKTensor& t = tensors[i];
    if (halves) {
      EncodeBfloat16(t, out);
      out += CeilDiv(t.slots, 2);
    } else {
      float levels[1 << (kMaxLevelBits - 1)];
      EncodeLevels(t, format.value_bits, first, scratch, levels, codes);
      std::memcpy(out, levels, of_tensor * sizeof(float));
      out += of_tensor;
    }
    first += t.slots;
  }
  message[0] = 1;
  return Status::kOk;
}

Status DecodeTopK(const TopKFormat& format, const TopKTensor* tensors, int64_t count,
                  const int32_t* message, uint32_t* scratch, int32_t* plain, CodecError* error) {
  std::vector<Share> left;  // The remaining positions of each stream.
  const int32_t* part = message + kHeaderWords;
  for (size_t s = 0; s < format.streams.size(); ++s) {
    const GolombFormat& stream = format.streams[s];
    int32_t used;
    const Status status = GolombDecode(stream, part, scratch, &used, error);
    if (status != Status::kOk) return status;
    left.push_back({scratch, scratch + used, 0});
    scratch += stream.slots;
    part += stream.part_words();
  }
  const int bits = format.value_bits;
  const bool halves = bits == kHalfBits;
  const int64_t of_tensor = halves ? 0 : LevelCount(bits);
  const auto* codes = reinterpret_cast<const uint32_t*>(part + count * of_tensor);
  plain[0] = message[0];
  plain += kHeaderWords;
  int64_t first = 0;
  for (int64_t i = 0; i < count; ++i) {
    const TopKTensor& t = tensors[i];
    Share& share = left[t.stream];
    const auto end = static_cast<uint32_t>(share.start + t.size);
    const uint32_t* last = std::lower_bound(share.begin, share.end, end);
    const int64_t received = last - share.begin, used = std::min(received, t.slots);
    plain[0] = static_cast<int32_t>(received);
    int32_t *indices = plain + IndicesAt(false), *values = plain + ValuesAt(false, t.slots);
    for (int64_t j = 0; j < used; ++j) {
      indices[j] = static_cast<int32_t>(share.begin[j] - share.start);
    }
    if (halves) {
      ReadHalves(BitReader(reinterpret_cast<const uint32_t*>(part)), used, values);
    } else {
      ReadLevels(part, bits, BitReader(codes, first * bits), used, values);
    }
    std::fill(indices + used, indices + t.slots, 0);
    std::fill(values + used, values + t.slots, 0);
    share = {last, share.end, end};
    plain += PartWords(false, t.slots);
    part += halves ? CeilDiv(t.slots, 2) : of_tensor;
    first += t.slots;
  }
  return Status::kOk;
}

}  // namespace redsync
