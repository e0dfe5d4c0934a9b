#include "custom_ops/core/cpu/sum_messages.h"

#include <algorithm>

namespace redsync {
namespace {

// Elements that a thread zeroes and adds to at a time, which stay in its cache.
constexpr int64_t kShard = 65536;
constexpr int64_t kMaxShards = 64;

bool IsFinite(int32_t bits) { return (bits & 0x7f800000) != 0x7f800000; }

// Returns whether indices ascend below `size` and values are finite; a branch-free vector loop.
bool IsValidPart(const uint32_t* indices, const int32_t* values, int64_t count, int64_t size) {
  uint32_t wrong = count > 0 && indices[count - 1] >= size;
  for (int64_t i = 1; i < count; ++i) wrong |= uint32_t{indices[i] <= indices[i - 1]};
  for (int64_t i = 0; i < count; ++i) wrong |= uint32_t{!IsFinite(values[i])};
  return wrong == 0;
}

Status ValidatePart(const int32_t* row, const Part& part, DecodeError* error) {
  auto fail = [error](const char* field, int64_t slot, int64_t value, int64_t limit) {
    error->field = field;
    error->slot = slot;
    error->value = value;
    error->limit = limit;
    return Status::kInvalidMessage;
  };
  const int32_t count = row[part.offset];
  if (count < 0 || count > part.capacity) return fail("count", 0, count, part.capacity);
  const uint32_t* indices = part.indices(row);
  const int32_t* values = part.values(row);
  if (!part.quantized && IsValidPart(indices, values, count, part.size)) return Status::kOk;
  int64_t last = -1;
  for (int32_t slot = 0; slot < count; ++slot) {
    if (indices[slot] <= last || indices[slot] >= part.size) {
      return fail("index", slot, ReportedIndex(indices[slot], part.size), part.size);
    }
    last = indices[slot];
  }
  const int32_t used = part.quantized ? 1 : count;
  for (int32_t slot = 0; slot < used; ++slot) {
    if (!IsFinite(values[slot]))
      return fail(part.quantized ? "mean" : "value", slot, values[slot], 0);
  }
  return Status::kOk;
}

void AddRank(const int32_t* row, const Part& part, const uint32_t* first, const uint32_t* last,
             float* out) {
  const int32_t* values = part.values(row);
  if (part.quantized) {
    const float mean = FloatOf(values[0]);
    for (; first < last; ++first) out[*first] += mean;
    return;
  }
  values += first - part.indices(row);
  for (; first < last; ++first) out[*first] += FloatOf(*values++);
}

}  // namespace

Status Validate(const Messages& messages, const Part* parts, int64_t tensors, DecodeError* error) {
  for (int64_t rank = 0; rank < messages.ranks; ++rank) {
    const int32_t* row = messages.row(rank);
    error->rank = rank;
    if (row[0] != 0 && row[0] != 1) {
      error->field = "flag";
      error->value = row[0];
      error->limit = 1;
      return Status::kInvalidMessage;
    }
    for (int64_t i = 0; i < tensors && row[0] == 1; ++i) {
      error->tensor = i;
      const Status status = ValidatePart(row, parts[i], error);
      if (status != Status::kOk) return status;
    }
    error->tensor = -1;
  }
  return Status::kOk;
}

void SumMessages(const Messages& messages, const Part& part, const ParallelFor& parallel_for,
                 float* out) {
  // Indices ascend, so they can be split at the boundaries of shards.
  const int64_t shard = std::max(kShard, CeilDiv(part.size, kMaxShards));
  const int64_t shards = CeilDiv(part.size, shard);
  const int64_t cost = shard / 4 + messages.ranks * (part.capacity / std::max<int64_t>(shards, 1));
  parallel_for(shards, cost, [&](int64_t first, int64_t last) {
    ScopedFlushDenormals flush;
    for (int64_t s = first; s < last; ++s) {
      const int64_t begin = s * shard, end = std::min(part.size, begin + shard);
      std::fill(out + begin, out + end, 0.0f);
      for (int64_t rank = 0; rank < messages.ranks; ++rank) {
        const int32_t* row = messages.row(rank);
        if (row[0] == 0) continue;
        const uint32_t* from = part.indices(row);
        const uint32_t* to = from + row[part.offset];
        if (shards > 1) {
          from = std::lower_bound(from, to, static_cast<uint32_t>(begin));
          to = std::lower_bound(from, to, end, [](uint32_t a, int64_t b) { return a < b; });
        }
        AddRank(row, part, from, to, out);
      }
    }
  });
}

}  // namespace redsync
