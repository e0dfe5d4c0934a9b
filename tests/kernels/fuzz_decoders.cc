// Runs every decoder of core/cpu on mutated messages: argument 1 is their number per decoder. It is
// compiled with sanitizers. A decoder names an error, or gives a result within its bounds. Buffers
// have exactly the required length, so that an access beyond it is detected.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "custom_ops/core/cpu/bits.h"
#include "custom_ops/core/cpu/bloom.h"
#include "custom_ops/core/cpu/checksum.h"
#include "custom_ops/core/cpu/golomb.h"
#include "custom_ops/core/cpu/merge.h"
#include "custom_ops/core/cpu/quantize.h"
#include "custom_ops/core/cpu/rice.h"
#include "custom_ops/core/cpu/sum_messages.h"
#include "custom_ops/core/cpu/topk_codec.h"
#include "tests/kernels/core_testing.h"

namespace redsync {
namespace {

using testing::Check;

std::mt19937 random_words(1);
const ParallelFor alone = testing::Threads(1);

uint32_t Random(uint32_t below) { return random_words() % below; }

// Allocated on the heap with exactly its length, for the sanitizer.
template <class T>
using Heap = std::vector<T>;

std::vector<uint32_t> Ascending(int64_t size, int64_t count) {
  std::vector<uint32_t> all(size), chosen;
  for (int64_t i = 0; i < size; ++i) all[i] = i;
  std::sample(all.begin(), all.end(), std::back_inserter(chosen), count, random_words);
  return chosen;
}

// Overwrites up to four words with random, small and special ones, or inverts bits.
template <class T>
void Mutate(std::vector<T>* words) {
  static_assert(sizeof(T) == 4);
  const uint32_t special[] = {0,          1,          2,          0xffffffffu, 0x80000000u,
                              0x7fffffff, 0x7f800000, 0xff800000, 0x7fc00000,  0x00000001};
  for (uint32_t n = Random(4) + 1; n > 0 && !words->empty(); --n) {
    uint32_t word;
    T* at = &(*words)[Random(Random(2) ? 4 : words->size()) % words->size()];
    std::memcpy(&word, at, 4);
    switch (Random(4)) {
      case 0:
        word = random_words();
        break;
      case 1:
        word = Random(70) - 3;
        break;
      case 2:
        word = special[Random(10)];
        break;
      default:
        word ^= 1u << Random(32);
    }
    std::memcpy(at, &word, 4);
  }
}

// Counts rejections: a decoder that accepts or rejects every message has not been tested.
struct Outcomes {
  int64_t good = 0, bad = 0;
  void Note(Status status, const char* field) {
    (status == Status::kOk ? good : bad)++;
    Check(status == Status::kOk || field != nullptr, "the error has a name");
  }
};

void FuzzDecode(Outcomes* outcomes) {
  const int64_t sizes[] = {0, 1, 30, 90}, capacities[] = {0, 1, 5, 9}, ranks = 2;
  std::vector<Part> parts;
  int64_t words = kHeaderWords;
  for (int i = 0; i < 4; ++i) {
    parts.push_back({words, capacities[i], sizes[i], i % 2 == 1});
    words += parts.back().words();
  }
  Heap<int32_t> data(ranks * words);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    int32_t* row = data.data() + rank * words;
    row[0] = 1;
    for (const Part& part : parts) {
      const auto chosen = Ascending(part.size, part.capacity);
      row[part.offset] = chosen.size();
      std::copy(chosen.begin(), chosen.end(), row + part.offset + IndicesAt(part.quantized));
    }
  }
  Mutate(&data);
  const Messages messages = {data.data(), ranks, words};
  DecodeError error;
  const Status status = Validate(messages, parts.data(), 4, &error);
  outcomes->Note(status, error.field);
  if (status != Status::kOk) return;
  for (const Part& part : parts) {
    Heap<float> out(part.size);
    SumMessages(messages, part, alone, out.data());
  }
}

void FuzzDequantize(Outcomes* outcomes) {
  const QuantizeFormat formats[] = {{Quantizer::kSign, 1, 0},      {Quantizer::kTwoLevel, 1, 32},
                                    {Quantizer::kThreshold, 1, 0}, {Quantizer::kStochastic, 7, 32},
                                    {Quantizer::kUniform, 3, 0},   {Quantizer::kNatural, 1, 0}};
  const QuantizeFormat& format = formats[Random(6)];
  const int64_t size = Random(100), ranks = 2, scales = format.scales(size);
  const int64_t stride = 1 + scales + format.words(size);
  Heap<int32_t> data(ranks * stride);
  for (int32_t& word : data) word = 0x55555555;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    data[rank * stride] = 1;
    std::fill_n(data.data() + rank * stride + 1, scales, BitsOf(0.5f));
  }
  Mutate(&data);
  CodecError error;
  Status status = Status::kOk;
  for (int64_t rank = 0; rank < ranks && status == Status::kOk; ++rank) {
    Heap<float> own(scales);
    for (int64_t i = 0; i < scales; ++i) own[i] = FloatOf(data[rank * stride + 1 + i]);
    status = CheckScales(format, own.data(), size, true, &error);
  }
  Heap<float> out(size);
  const QuantizedTensor coded = {data.data(), ranks, stride, 1, 1 + scales, size};
  if (status == Status::kOk) status = DequantizeSum(format, coded, alone, out.data(), &error);
  outcomes->Note(status, error.field);
}

void FuzzGolomb(Outcomes* outcomes) {
  const int64_t size = 1 + Random(300), slots = Random(size + 1);
  const GolombFormat format = {size, slots, static_cast<int>(Random(6))};
  const auto positions = Ascending(size, Random(slots + 1));
  Heap<int32_t> part(format.part_words());
  CodecError error;
  Heap<uint32_t> padded(slots);
  std::copy(positions.begin(), positions.end(), padded.begin());
  Check(GolombEncode(format, padded.data(), positions.size(), part.data(), &error) == Status::kOk,
        "golomb: encodes");
  Mutate(&part);
  Heap<uint32_t> back(slots);
  int32_t count = -1;
  const Status status = GolombDecode(format, part.data(), back.data(), &count, &error);
  outcomes->Note(status, error.field);
  if (status != Status::kOk) return;
  Check(count >= 0 && count <= slots, "golomb: count");
  for (int32_t i = 0; i < count; ++i) {
    Check(back[i] >= (i == 0 ? 0 : back[i - 1] + 1) && back[i] < size, "golomb: index");
  }
}

void FuzzDecodeTopK(Outcomes* outcomes) {
  const int bits[] = {1, 2, 3, 4, kHalfBits};
  TopKFormat format;
  format.value_bits = bits[Random(5)];
  std::vector<TopKTensor> tensors(4);
  format.streams = {{0, 0, static_cast<int>(Random(5))}, {0, 0, static_cast<int>(Random(5))}};
  int64_t slots = 0, plain_words = kHeaderWords;
  for (TopKTensor& t : tensors) {
    t.size = Random(60);
    t.slots = Random(t.size + 1);
    t.stream = Random(2);
    format.streams[t.stream].size += t.size;
    format.streams[t.stream].slots += t.slots;
    slots += t.slots;
    plain_words += PartWords(false, t.slots);
  }
  Heap<int32_t> message(format.words(tensors.data(), 4)), plain(plain_words);
  message[0] = 1;
  CodecError error;
  int64_t at = kHeaderWords;
  for (const GolombFormat& stream : format.streams) {
    Heap<uint32_t> positions = Ascending(stream.size, stream.slots);
    GolombEncode(stream, positions.data(), stream.slots, message.data() + at, &error);
    at += stream.part_words();
  }
  if (Random(4)) Mutate(&message);
  Heap<uint32_t> scratch(slots);
  const Status status =
      DecodeTopK(format, tensors.data(), 4, message.data(), scratch.data(), plain.data(), &error);
  outcomes->Note(status, error.field);
}

void FuzzBloom(Outcomes* outcomes) {
  const int64_t size = 1 + Random(300), words = 1 + Random(9), slots = Random(size + 1);
  const BloomFormat format = {size, words, 1 + static_cast<int>(Random(kMaxHashes)), Random(99)};
  const auto positions = Ascending(size, std::min<int64_t>(size, 5));
  Heap<int32_t> filter(words);
  CodecError error;
  BloomBuild(format, positions.data(), positions.size(), positions.size(), filter.data(), &error);
  Mutate(&filter);
  Heap<double> scratch(CeilDiv(BloomScratchBytes(size), 8));
  Heap<uint32_t> found(slots);
  const int64_t count =
      BloomQuery(format, filter.data(), slots, scratch.data(), alone, found.data());
  Check(count >= 0 && count <= slots, "bloom: count");
  for (int64_t i = 0; i < count; ++i) Check(found[i] < size, "bloom: index");
  outcomes->Note(Status::kOk, "");
}

void FuzzRice(Outcomes* outcomes) {
  const RiceFormat format = {20, 7, static_cast<int>(Random(13))};
  Heap<int32_t> numbers(format.count), code(format.words());
  for (int32_t& x : numbers) x = static_cast<int32_t>(Random(9)) - 4;
  CodecError error;
  RiceEncode(format, numbers.data(), code.data(), &error);
  Mutate(&code);
  const Status status = RiceDecode(format, code.data(), numbers.data(), &error);
  outcomes->Note(status, error.field);
}

void FuzzBits(Outcomes* outcomes) {
  const int64_t count = Random(200), size = Random(6), slots = Random(70);
  const int bits = Random(33);
  Heap<uint32_t> words(PackedWords(count, bits)), codes(count), bitmap(size), found(slots);
  Mutate(&words);
  Mutate(&bitmap);
  UnpackBits(words.data(), count, bits, codes.data());
  for (uint32_t code : codes) Check(bits == 32 || code < (1ull << bits), "bits: code");
  Check(CountBits(bitmap.data(), size) <= 32 * size, "bits: count");
  FindBits(bitmap.data(), size, slots, found.data());
  for (uint32_t at : found) Check(at == 0 || at < 32 * size, "bits: position");
  CodecError error;
  Heap<uint32_t> positions = Ascending(64, 8), two(2);
  Mutate(&positions);
  Status status =
      MakeBitmap(positions.data(), 8, static_cast<int64_t>(Random(11)) - 1, 2, two.data(), &error);
  outcomes->Note(status, error.field);
  Heap<int64_t> long_codes(8);
  Heap<int32_t> lengths(8, 7);
  for (int64_t& code : long_codes) code = static_cast<int64_t>(random_words()) << Random(32);
  Mutate(&lengths);
  error = CodecError();
  status = WriteBits(long_codes.data(), lengths.data(), 8, size, bitmap.data(), &error);
  outcomes->Note(status, error.field);
}

void FuzzMerge(Outcomes* outcomes) {
  const int64_t ranks = 3, slots = 8, size = 50, k = Random(30);
  Heap<uint32_t> indices;
  Heap<float> values(ranks * slots, 1.5f);
  Heap<int32_t> counts(ranks, slots);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const auto chosen = Ascending(size, slots);
    indices.insert(indices.end(), chosen.begin(), chosen.end());
  }
  switch (Random(3)) {
    case 0:
      Mutate(&indices);
      break;
    case 1:
      Mutate(&values);
      break;
    default:
      Mutate(&counts);
  }
  const int64_t bytes = MergeScratchBytes(ranks, slots), most = ranks * slots;
  Heap<double> scratch(CeilDiv(bytes, 8));
  Heap<uint32_t> kept_at(k), dropped_at(most);
  Heap<float> kept(k), dropped(most);
  int32_t keep = -1, drop = -1;
  CodecError error;
  const SparseBlocks blocks = {indices.data(), values.data(), counts.data(), 1, ranks, slots, size};
  const Status status =
      SparseMerge(blocks, k, scratch.data(), bytes, {kept_at.data(), kept.data(), &keep},
                  {dropped_at.data(), dropped.data(), &drop}, &error);
  outcomes->Note(status, error.field);
  if (status != Status::kOk) return;
  Check(keep >= 0 && keep <= k && drop >= 0 && drop <= most, "merge: counts");
  for (int32_t i = 0; i < keep; ++i) Check(kept_at[i] < size, "merge: index");
}

// At most one in 2^32 of the changed messages may be accepted.
void FuzzSeal(Outcomes* outcomes) {
  Heap<uint32_t> message(1 + Random(60));
  for (uint32_t& word : message) word = random_words();
  message[0] = Seal(Random(2), message.data() + 1, message.size() - 1);
  const Heap<uint32_t> sent = message;
  if (Random(8) > 0) Mutate(&message);
  const int flag = OpenSeal(message[0], message.data() + 1, message.size() - 1);
  Check((flag >= 0) == (message == sent), "seal: a changed message");
  outcomes->Note(flag >= 0 ? Status::kOk : Status::kInvalidMessage, "checksum");
}

}  // namespace
}  // namespace redsync

int main(int argc, char** argv) {
  using redsync::Outcomes;
  const int64_t count = argc > 1 ? std::atoll(argv[1]) : 1000;
  const struct {
    const char* name;
    void (*fuzz)(Outcomes*);
  } decoders[] = {{"decode", redsync::FuzzDecode}, {"dequantize", redsync::FuzzDequantize},
                  {"golomb", redsync::FuzzGolomb}, {"decode_topk", redsync::FuzzDecodeTopK},
                  {"bloom", redsync::FuzzBloom},   {"rice", redsync::FuzzRice},
                  {"bits", redsync::FuzzBits},     {"merge", redsync::FuzzMerge},
                  {"seal", redsync::FuzzSeal}};
  for (const auto& decoder : decoders) {
    Outcomes outcomes;
    for (int64_t i = 0; i < count; ++i) decoder.fuzz(&outcomes);
    std::printf("%s: %lld good, %lld refused\n", decoder.name,
                static_cast<long long>(outcomes.good), static_cast<long long>(outcomes.bad));
    redsync::testing::Check(outcomes.good > 0, "some are good");
  }
  return redsync::testing::failures == 0 ? 0 : 1;
}
