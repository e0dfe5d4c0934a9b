// Runs AccumulateAndSelect() on the tensors of an op, for the CPU kernels.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_CPU_SELECT_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_CPU_SELECT_H_

#include <algorithm>

#include "custom_ops/core/cpu/select.h"
#include "custom_ops/kernels/op_support.h"
#include "custom_ops/kernels/select_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

// Accumulates and selects in the tensors of an op, one at a time.
class TensorSelector {
 public:
  TensorSelector(tensorflow::OpKernelContext* context, const AccumulateCall& call)
      : call_(call), threads_(IntraOpThreads(context)) {}

  // Allocates `bytes` of scratch memory, the maximum that a selection needs.
  tensorflow::Status Allocate(tensorflow::OpKernelContext* context, int64_t bytes) {
    return context->allocate_temp(tensorflow::DT_UINT8, tensorflow::TensorShape({bytes}),
                                  &scratch_);
  }

  // Selects in tensor `i`. The caller sets the selection in `options`, and the outputs of indices
  // and values in `buffers`.
  tensorflow::Status Select(int i, SelectOptions options, SelectBuffers buffers,
                            SelectResult* result) const {
    call_.Set(i, &options, &buffers);
    const Status status =
        AccumulateAndSelect(options, buffers, const_cast<void*>(scratch_.data()),
                            static_cast<int64_t>(scratch_.TotalBytes()), threads_, result);
    if (status == Status::kOk) return tensorflow::OkStatus();
    return tensorflow::errors::Internal("Selection failed with status ", static_cast<int>(status),
                                        " on grads[", i, "] of shape ",
                                        call_.grads[i].shape().DebugString(), ".");
  }

 private:
  const AccumulateCall& call_;
  ParallelFor threads_;
  tensorflow::Tensor scratch_;
};

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_CPU_SELECT_H_
