// The call of redsync_gpu_select() that the inputs and outputs of an op make.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_GPU_SELECT_CALL_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_GPU_SELECT_CALL_H_

#include <vector>

#include "custom_ops/kernels/gpu/checked_op.h"
#include "custom_ops/kernels/select_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

struct GpuSelection {
  std::vector<RedsyncGpuTensor> tensors;  // Without k, selector, and whether they are quantised.
  RedsyncGpuSelect call = {};             // Without ratios, side and search, and without message.

  GpuSelection(const AccumulateInputs& in, const MomentumAttributes& attributes,
               const std::vector<tensorflow::Tensor*>& new_residuals,
               const std::vector<tensorflow::Tensor*>& new_velocities, uint32_t seed)
      : tensors(in.grads.size()) {
    for (int i = 0; i < in.grads.size(); ++i) {
      RedsyncGpuTensor& t = tensors[i];
      t = {};
      t.size = in.grads[i].NumElements();
      t.grad = in.grads[i].data();
      t.bfloat16 = IsBfloat16(in.grads[i]);
      t.residual = in.residuals[i].flat<float>().data();
      t.new_residual = new_residuals[i]->flat<float>().data();
      if (attributes.momentum == Momentum::kNone) continue;
      t.velocity = in.velocities[i].flat<float>().data();
      t.new_velocity = new_velocities[i]->flat<float>().data();
    }
    call.tensors = tensors.data();
    call.count = static_cast<int64_t>(tensors.size());
    call.momentum = static_cast<int32_t>(attributes.momentum);
    call.masking = attributes.masking;
    call.factor = attributes.factor;
    call.seed = seed;
    call.scale = in.scale->scalar<float>().data();
  }
  GpuSelection(const GpuSelection&) = delete;
  GpuSelection& operator=(const GpuSelection&) = delete;

  tensorflow::Status Queue(tensorflow::OpKernelContext* context) const {
    tensorflow::Tensor scratch;  // Freed for work that is queued later on the same stream.
    const int64_t bytes = redsync_gpu_select_scratch_bytes(&call);
    TF_RETURN_IF_ERROR(AllocateScratch(context, bytes, &scratch));
    const int code = redsync_gpu_select(&call, scratch.data(), bytes, StreamOf(context));
    return FromCode(code, "Selection");
  }
};

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_GPU_SELECT_CALL_H_
