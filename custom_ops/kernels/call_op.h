// Kernels whose attributes, inputs and outputs a structure reads: all that is left is a function.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_CALL_OP_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_CALL_OP_H_

#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

// kRead, of the attributes, and kPrepare, of inputs and outputs, are members of `Call`; kRun takes
// the context and the call. All return a Status.
template <class Call, auto kRead, auto kPrepare, auto kRun>
class CallOp : public tensorflow::OpKernel {
 public:
  explicit CallOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, (attributes_.*kRead)(context));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    Call call = attributes_;
    OP_REQUIRES_OK(context, (call.*kPrepare)(context));
    OP_REQUIRES_OK(context, kRun(context, call));
  }

 private:
  Call attributes_;
};

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_CALL_OP_H_
