// Division of the caller's scratch memory.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_DIVIDER_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_DIVIDER_CUH_

#include "custom_ops/core/gpu/platform.cuh"

namespace redsync {
namespace gpu {

// Divides memory; only counts bytes if it is null.
class Divider {
 public:
  explicit Divider(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <class T>
  T* Take(int64_t count) {
    T* part = reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += CeilDiv(count * static_cast<int64_t>(sizeof(T)), 256) * 256;
    return memory_ == nullptr ? nullptr : part;
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* memory_;
  int64_t bytes_ = 0;
};

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_DIVIDER_CUH_
