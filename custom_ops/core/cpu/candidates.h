// Candidates: the few elements that pass a threshold, gathered by several threads.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_CPU_CANDIDATES_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_CPU_CANDIDATES_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

namespace redsync {

// Returns the key of a candidate: one word that sorts by magnitude and, among equals, puts the
// lower index higher. From the top, it has the bits of the magnitude (positive floats, whose bits
// sort like the floats), the inverted index, and the element's sign.
inline uint64_t MakeKey(int32_t magnitude, int64_t index, bool negative) {
  const uint64_t place = 0xffffffffu - static_cast<uint32_t>(index);
  return static_cast<uint64_t>(magnitude) << 33 | place << 1 | static_cast<uint64_t>(negative);
}
inline int32_t KeyMagnitude(uint64_t key) { return static_cast<int32_t>(key >> 33); }
inline uint32_t KeyIndex(uint64_t key) { return 0xffffffffu - static_cast<uint32_t>(key >> 1); }
// Returns the float bits of an element whose magnitude is its absolute value.
inline int32_t KeyValue(uint64_t key) {
  return static_cast<int32_t>(static_cast<uint32_t>(key) << 31) | KeyMagnitude(key);
}

// A buffer of bounded size to which threads append keys. Keys that do not fit are counted and
// dropped, so `used()` is the number of candidates for any number of threads. After an overflow
// threads may stop appending: the count is then only a lower bound.
class CandidatePool {
 public:
  // A run of keys with ascending indices, starting at `first_index`.
  struct Segment {
    int64_t first_index;
    int64_t offset;
    int64_t count;
  };

  static constexpr int64_t kFlush = 1024;  // Keys that a thread buffers before it appends them.

  static int64_t MaxSegments(int64_t capacity, int64_t blocks) {
    return blocks + capacity / kFlush + 1;
  }

  CandidatePool(uint64_t* keys, int64_t capacity, Segment* segments)
      : keys_(keys), capacity_(capacity), segments_(segments) {}

  void Clear() {
    used_ = 0;
    num_segments_ = 0;
  }

  // Appends keys of ascending indices. Thread-safe.
  void Append(const uint64_t* keys, int64_t count) {
    if (count == 0) return;
    const int64_t offset = used_.fetch_add(count, std::memory_order_relaxed);
    if (offset + count > capacity_) return;
    std::memcpy(keys_ + offset, keys, count * sizeof(uint64_t));
    segments_[num_segments_.fetch_add(1, std::memory_order_relaxed)] = {KeyIndex(keys[0]), offset,
                                                                        count};
  }

  int64_t used() const { return used_; }
  bool overflowed() const { return used_ > capacity_; }

  // Copies all keys to `out` in the order of their indices.
  void CopyInOrder(uint64_t* out) {
    const int64_t n = num_segments_;
    std::sort(segments_, segments_ + n,
              [](const Segment& a, const Segment& b) { return a.first_index < b.first_index; });
    for (int64_t i = 0; i < n; ++i) {
      std::memcpy(out, keys_ + segments_[i].offset, segments_[i].count * sizeof(uint64_t));
      out += segments_[i].count;
    }
  }

 private:
  uint64_t* keys_;
  int64_t capacity_;
  Segment* segments_;
  std::atomic<int64_t> used_{0};
  std::atomic<int64_t> num_segments_{0};
};

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_CPU_CANDIDATES_H_
