// Accumulate-and-select: checks, division of the scratch memory, and the order of the kernels.
#include <algorithm>
#include <cmath>

#include "custom_ops/core/gpu/batch.cuh"
#include "custom_ops/core/gpu/c_api.h"
#include "custom_ops/core/gpu/divider.cuh"
#include "custom_ops/core/gpu/records.cuh"
#include "custom_ops/core/gpu/vector_access.cuh"
#include "custom_ops/core/message_layout.h"

namespace redsync {
namespace gpu {
namespace {

constexpr int64_t kSmall = 4096;  // Tensors up to this size need no prediction.
constexpr int64_t kHeader = 256;  // Bytes before the first tensor's memory.

int64_t Words(const RedsyncGpuTensor& t) { return PartWords(t.quantized != 0, t.k); }

bool IsValid(const RedsyncGpuTensor& t) {
  return t.size >= 0 && t.size <= UINT32_MAX && t.k <= t.size && t.k <= INT32_MAX &&
         t.k >= std::min<int64_t>(t.size, 1) && t.selector >= REDSYNC_GPU_EXACT &&
         t.selector <= REDSYNC_GPU_FIXED;
}

// Computes a tensor's sizes from its size, k and selector alone.
Tensor Plan(const RedsyncGpuTensor& t) {
  Tensor plan = {};
  // k + 1 for the search: any threshold below those of k + 1 candidates selects too many.
  const int64_t need = t.selector == REDSYNC_GPU_THRESHOLD ? t.k + 1 : t.k;
  plan.size = static_cast<uint32_t>(t.size);
  plan.k = static_cast<uint32_t>(t.k);
  plan.need = static_cast<uint32_t>(need);
  // A trimmed selection runs as an exact one, because the prediction already saves the same work.
  plan.threshold = t.selector == REDSYNC_GPU_THRESHOLD;
  plan.fixed = t.selector == REDSYNC_GPU_FIXED;
  plan.quantized = t.quantized != 0;
  plan.pool_size = plan.size;
  if (t.size <= kSmall || need >= t.size) return plan;  // All eligible elements are candidates.
  if (plan.fixed) {                                     // The threshold is known.
    plan.pool_size = static_cast<uint32_t>(std::min(need + need / 2 + kSmall, t.size));
    return plan;
  }
  // About 24 samples above the threshold, so that a margin of four sigmas stays small.
  const int64_t samples = std::clamp<int64_t>(24 * t.size / need, 1024,
                                              std::clamp<int64_t>(t.size / 32, 1024, kMaxSamples));
  plan.samples = static_cast<uint32_t>(CeilDiv(samples, 16) * 16);
  const double expected = static_cast<double>(plan.samples) * need / t.size;
  plan.sample_rank =
      static_cast<uint32_t>(std::min<double>(expected + 4 * std::sqrt(expected) + 2, plan.samples));
  // Twice the expected number above the sample of that rank; unused memory is not touched.
  const double candidates = static_cast<double>(plan.sample_rank) / plan.samples * t.size;
  plan.pool_size = static_cast<uint32_t>(
      std::min<double>(std::max<double>(2 * candidates, 1.0 * need) + 4096, t.size));
  return plan;
}

void Divide(Tensor* t, Divider* divider) {
  t->pool = divider->Take<uint64_t>(t->pool_size);
  t->stats = divider->Take<Stats>(t->chunks());
  t->segments = divider->Take<Range>(t->chunks());
  t->before = divider->Take<Tally<2>>(t->chunks());
}

int64_t BatchBytes(const RedsyncGpuTensor* tensors, int64_t count) {
  Divider divider(nullptr);
  divider.Take<State>(count);
  for (int64_t i = 0; i < count; ++i) {
    Tensor plan = Plan(tensors[i]);
    Divide(&plan, &divider);
  }
  return divider.bytes();
}

// Returns whether the ratios and scalars that kernels read are given.
bool HasRatios(const RedsyncGpuSelect& call) {
  bool needs = false;
  for (int64_t i = 0; i < call.count; ++i) {
    const RedsyncGpuTensor& t = call.tensors[i];
    needs |= t.selector > REDSYNC_GPU_TRIMMED || t.quantized != 0;
  }
  return call.ratios != nullptr || !needs;
}

bool AllAligned(const RedsyncGpuTensor& t) {
  return IsAligned(t.grad) && IsAligned(t.residual) && IsAligned(t.velocity) &&
         IsAligned(t.new_residual) && IsAligned(t.new_velocity);
}

void Fill(const RedsyncGpuTensor& from, bool momentum, Tensor* t) {
  t->grad = from.grad;
  t->bfloat16 = from.bfloat16 != 0;
  t->residual = from.residual;
  t->new_residual = from.new_residual;
  t->velocity = momentum ? from.velocity : nullptr;
  t->new_velocity = momentum ? from.new_velocity : nullptr;
  t->aligned = AllAligned(from);
}

__global__ void Begin(int32_t* message, int64_t words, float* new_ratios, int64_t count,
                      int32_t* not_finite) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t i = first; i < words; i += stride) message[i] = 0;
  for (int64_t i = first; i < count; i += stride) new_ratios[i] = -1;
  if (first == 0) *not_finite = 0;
}

__global__ void End(int32_t* message, int64_t words, const float* ratios, float* new_ratios,
                    int64_t count, const int32_t* not_finite) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (*not_finite == 0) {
    if (first == 0) message[0] = 1;
    return;
  }
  for (int64_t i = first; i < words; i += stride) message[i] = 0;
  for (int64_t i = first; i < count; i += stride) new_ratios[i] = ratios[i];
}

// All kernels are launched at once: only the device knows which steps are needed after the pass,
// and reading that on the host would wait for the device.
void RunBatch(const Batch& batch, int mode, cudaStream_t stream) {
  bool predicts = false;
  for (int i = 0; i < batch.count; ++i) predicts |= batch.tensors[i].samples != 0;
  if (predicts) LaunchPredict(batch, mode, stream);
  LaunchAccumulate(batch, mode, stream);
  LaunchSelectCandidates(batch, stream);
}

// Runs tensors [first, last) of the call, whose parts begin at word `offset` of the message.
void RunTensors(const RedsyncGpuSelect& call, int64_t first, int64_t last, int64_t offset,
                char* scratch, cudaStream_t stream) {
  Batch batch = {};
  Divider divider(scratch + kHeader);
  State* states = divider.Take<State>(last - first);
  for (int64_t i = first; i < last; ++i) {
    const RedsyncGpuTensor& from = call.tensors[i];
    Tensor t = Plan(from);
    Divide(&t, &divider);
    if (from.size > 0) {
      Fill(from, call.momentum != REDSYNC_GPU_NO_MOMENTUM, &t);
      t.part = call.message + offset;
      if (call.ratios != nullptr) {
        t.ratio = call.ratios + i;
        t.new_ratio = call.new_ratios + i;
      }
      t.state = states + batch.count;
      batch.first_chunk[batch.count + 1] = batch.first_chunk[batch.count] + t.chunks();
      batch.first_group[batch.count + 1] = batch.first_group[batch.count] + t.groups();
      batch.tensors[batch.count++] = t;
    } else if (t.fixed) {  // A given threshold is returned unchanged.
      cudaMemcpyAsync(call.new_ratios + i, call.ratios + i, sizeof(float), cudaMemcpyDefault,
                      stream);
    }
    offset += Words(from);
  }
  if (batch.count == 0) return;
  batch.factor = call.factor;
  batch.seed = call.seed;
  batch.masking = call.masking != 0;
  batch.scale = call.scale;
  batch.side = call.side;
  batch.search = call.search;
  batch.not_finite = reinterpret_cast<int32_t*>(scratch);
  cudaMemsetAsync(states, 0, batch.count * sizeof(State), stream);
  RunBatch(batch, call.momentum, stream);
}

}  // namespace
}  // namespace gpu
}  // namespace redsync

using namespace redsync::gpu;  // NOLINT: the C interface below is this file's other half.

int64_t redsync_gpu_message_words(const RedsyncGpuSelect* call) {
  int64_t words = redsync::kHeaderWords;
  for (int64_t i = 0; i < call->count; ++i) {
    if (!IsValid(call->tensors[i])) return -1;
    words += Words(call->tensors[i]);
  }
  return words;
}

int64_t redsync_gpu_select_scratch_bytes(const RedsyncGpuSelect* call) {
  if (redsync_gpu_message_words(call) < 0) return -1;
  int64_t bytes = 0;  // Batches run sequentially in the same memory.
  for (int64_t i = 0; i < call->count; i += kMaxBatch) {
    const int64_t count = std::min<int64_t>(kMaxBatch, call->count - i);
    bytes = std::max(bytes, BatchBytes(call->tensors + i, count));
  }
  return kHeader + bytes;
}

int redsync_gpu_select(const RedsyncGpuSelect* call, void* scratch, int64_t scratch_bytes,
                       void* stream_pointer) {
  const int64_t words = redsync_gpu_message_words(call);
  if (words < 0 || call->momentum < REDSYNC_GPU_NO_MOMENTUM ||
      call->momentum > REDSYNC_GPU_NESTEROV || scratch == nullptr || !HasRatios(*call)) {
    return REDSYNC_GPU_INVALID_ARGUMENT;
  }
  if (scratch_bytes < redsync_gpu_select_scratch_bytes(call)) return REDSYNC_GPU_SCRATCH_TOO_SMALL;
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  int32_t* not_finite = static_cast<int32_t*>(scratch);
  const int64_t ratios = call->ratios == nullptr ? 0 : call->count;
  const uint32_t blocks = GridFor(std::max(words, ratios));
  REDSYNC_LAUNCH(Begin, blocks, kThreads, stream, call->message, words, call->new_ratios, ratios,
                 not_finite);
  int64_t offset = redsync::kHeaderWords;
  for (int64_t i = 0; i < call->count; i += kMaxBatch) {
    const int64_t last = std::min(i + kMaxBatch, call->count);
    RunTensors(*call, i, last, offset, static_cast<char*>(scratch), stream);
    for (int64_t j = i; j < last; ++j) offset += Words(call->tensors[j]);
  }
  REDSYNC_LAUNCH(End, blocks, kThreads, stream, call->message, words, call->ratios,
                 call->new_ratios, ratios, not_finite);
  return LaunchStatus();
}
