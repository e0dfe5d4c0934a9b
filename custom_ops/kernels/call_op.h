// The kernel class of most ops. An op has a struct, which all devices share, and a function per
// device:
//
//   struct PackCall {
//     // Reads and checks attributes. Called once.
//     tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction* context);
//     // Reads inputs, checks shapes and allocates outputs. Called in every step, on a copy of what
//     // ReadAttributes() has filled. Inputs and outputs may be on a GPU: it keeps their pointers.
//     tensorflow::Status Prepare(tensorflow::OpKernelContext* context);
//   };
//   tensorflow::Status Pack(tensorflow::OpKernelContext* context, PackCall& call);
//
//   REGISTER_KERNEL_BUILDER(Name("RedsyncPackBits").Device(DEVICE_CPU), CallOp<PackCall, Pack>);
//
// GPU kernels that check their input on the device are a CheckedOp, see gpu/checked_op.h.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_CALL_OP_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_CALL_OP_H_

#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

template <class Call, auto kRun>
class CallOp : public tensorflow::OpKernel {
 public:
  explicit CallOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.ReadAttributes(context));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    Call call = attributes_;
    OP_REQUIRES_OK(context, call.Prepare(context));
    OP_REQUIRES_OK(context, kRun(context, call));
  }

 private:
  Call attributes_;
};

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_CALL_OP_H_
