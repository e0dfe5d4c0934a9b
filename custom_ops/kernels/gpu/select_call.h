// Calls redsync_gpu_select() with the inputs and outputs of an op.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_GPU_SELECT_CALL_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_GPU_SELECT_CALL_H_

#include <atomic>
#include <vector>

#include "custom_ops/kernels/gpu/stream.h"
#include "custom_ops/kernels/select_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

struct GpuSelection {
  std::vector<RedsyncGpuTensor> tensors;  // All fields except k, selector and quantized.
  RedsyncGpuSelect call = {};             // All fields except ratios, side, search and message.

  explicit GpuSelection(const AccumulateCall& from) : tensors(from.grads.size()) {
    for (int i = 0; i < from.grads.size(); ++i) {
      RedsyncGpuTensor& t = tensors[i];
      t = {};
      t.size = from.grads[i].NumElements();
      t.grad = from.grads[i].data();
      t.bfloat16 = IsBfloat16(from.grads[i]);
      t.residual = from.residuals[i].flat<float>().data();
      t.new_residual = from.new_residuals[i]->flat<float>().data();
      if (from.momentum == Momentum::kNone) continue;
      t.velocity = from.velocities[i].flat<float>().data();
      if (Keeps(from.momentum)) t.new_velocity = from.new_velocities[i]->flat<float>().data();
    }
    call.tensors = tensors.data();
    call.count = static_cast<int64_t>(tensors.size());
    call.momentum = from.momentum == Momentum::kNone       ? REDSYNC_GPU_NO_MOMENTUM
                    : from.momentum == Momentum::kNesterov ? REDSYNC_GPU_NESTEROV
                                                           : REDSYNC_GPU_MOMENTUM;
    call.masking = from.masking;
    call.factor = from.factor;
    call.seed = NextSeed();
    call.scale = from.scale->scalar<float>().data();
  }
  GpuSelection(const GpuSelection&) = delete;
  GpuSelection& operator=(const GpuSelection&) = delete;

  tensorflow::Status Queue(tensorflow::OpKernelContext* context) const {
    return WithScratch(context, redsync_gpu_select_scratch_bytes(&call), "Selection",
                       [this](void* scratch, int64_t bytes, void* stream) {
                         return redsync_gpu_select(&call, scratch, bytes, stream);
                       });
  }

 private:
  // Returns a new seed for each call. Results do not depend on it.
  static uint32_t NextSeed() {
    static std::atomic<uint32_t> calls{0};
    return calls.fetch_add(1, std::memory_order_relaxed);
  }
};

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_GPU_SELECT_CALL_H_
