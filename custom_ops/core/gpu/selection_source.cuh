// The two sources of selections, as keys: the tensor, from which the pool is filled again after a
// wrong prediction, and the pool, from which the message is filled.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_SELECTION_SOURCE_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_SELECTION_SOURCE_CUH_

#include "custom_ops/core/gpu/batch.cuh"
#include "custom_ops/core/message_layout.h"

namespace redsync {
namespace gpu {

// Selects from the tensor into the pool.
struct FromTensor {
  static constexpr Phase kPhase = kRefine;

  const Batch& batch;
  const Tensor& tensor;
  Magnitude magnitude;

  __device__ FromTensor(const Batch& b, const Tensor& t) : batch(b), tensor(t), magnitude(b, t) {}

  __device__ static bool IsActive(const Tensor& tensor) { return tensor.state->refine; }
  __device__ static bool NeedsDigits(const Tensor&, int) { return true; }
  __device__ uint32_t size() const { return tensor.size; }
  __device__ uint32_t groups() const { return tensor.groups(); }
  __device__ uint32_t rank() const { return tensor.need; }
  __device__ uint64_t operator[](uint32_t i) const {
    return MakeKey(magnitude(tensor.new_residual[i]), i);
  }
  __device__ Range Chunk(uint32_t chunk) const {
    const uint32_t begin = chunk * kChunk, left = tensor.size - begin;
    return {begin, left < kChunk ? left : kChunk};
  }

  // `cut` is the magnitude of the element of rank `need`.
  __device__ void Found(uint32_t equal, Digits* digits) const {
    const uint32_t total = digits->above + equal;
    digits->ties = 0;
    if (total <= tensor.pool_size) {
      digits->cut -= 1;  // Include all elements equal to it.
    } else if (digits->above < tensor.k) {
      digits->ties = tensor.k - digits->above;  // The pool cannot hold all ties: take the first.
    }
    tensor.state->floor = total;
  }
  // Fewer than `need` elements are eligible, so all are taken.
  __device__ void NotFound(uint32_t total, Digits* digits) const {
    digits->cut = 0;
    tensor.state->floor = total;
  }

  __device__ void Put(uint32_t place, uint64_t key) const {
    if (place < tensor.pool_size) tensor.pool[place] = key;
  }
  __device__ void EndChunk(uint32_t chunk, uint32_t begin, uint32_t count, double) const {
    tensor.segments[chunk] = {begin, count};
  }
  __device__ void End(uint32_t total, const Digits& digits) const {
    tensor.state->used = total;
    tensor.state->threshold = digits.cut;
  }
};

// Selects from the pool into the message.
struct FromPool {
  static constexpr Phase kPhase = kChoose;

  const Batch& batch;
  const Tensor& tensor;

  __device__ FromPool(const Batch& b, const Tensor& t) : batch(b), tensor(t) {}

  __device__ static bool IsActive(const Tensor& tensor) { return tensor.state->finite; }
  // False if the search has set the cut, all candidates are taken, or the pass has found the digit.
  __device__ static bool NeedsDigits(const Tensor& tensor, int level) {
    const State& state = *tensor.state;
    return !state.settled && state.used > tensor.k && (level > 0 || !state.counted);
  }
  __device__ uint32_t size() const { return tensor.state->used; }
  __device__ uint32_t groups() const { return tensor.groups_of_pool(); }
  __device__ uint32_t rank() const { return tensor.k; }
  __device__ uint64_t operator[](uint32_t i) const { return tensor.pool[i]; }
  __device__ Range Chunk(uint32_t chunk) const { return tensor.segments[chunk]; }

  __device__ void Found(uint32_t, Digits* digits) const { digits->ties = tensor.k - digits->above; }
  __device__ void NotFound(uint32_t, Digits*) const {}  // Not called: there are more than k.

  __device__ void Put(uint32_t place, uint64_t key) const {
    if (place >= tensor.k) return;
    const uint32_t index = KeyIndex(key);
    tensor.part[IndicesAt(tensor.quantized) + place] = static_cast<int32_t>(index);
    if (!tensor.quantized) {
      int32_t* values = tensor.part + ValuesAt(false, tensor.k);
      values[place] = __float_as_int(tensor.new_residual[index]);
    }
    tensor.new_residual[index] = 0;
    if (tensor.new_velocity != nullptr && batch.masking) tensor.new_velocity[index] = 0;
  }
  __device__ void EndChunk(uint32_t chunk, uint32_t, uint32_t, double sum) const {
    tensor.stats[chunk].sum = sum;
  }
  __device__ void End(uint32_t total, const Digits&) const {
    tensor.part[0] = static_cast<int32_t>(total);
    if (tensor.new_ratio != nullptr) *tensor.new_ratio = tensor.state->ratio;
  }
};

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_SELECTION_SOURCE_CUH_
