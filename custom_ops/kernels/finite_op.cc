#include "custom_ops/core/cpu/finite.h"
#include "custom_ops/kernels/op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;

class AllFiniteOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const int count = context->num_inputs();
    Tensor* output;
    OP_REQUIRES_OK(context, context->allocate_output(0, {count}, &output));
    const ParallelFor threads = IntraOpThreads(context);
    auto finite = output->vec<bool>();
    for (int i = 0; i < count; ++i) finite(i) = IsFinite(context->input(i), threads);
  }

 private:
  static bool IsFinite(const Tensor& tensor, const ParallelFor& threads) {
    const void* data = tensor.data();
    const int64_t n = tensor.NumElements();
    switch (tensor.dtype()) {
      case tensorflow::DT_DOUBLE:
        return AllFinite<uint64_t>(static_cast<const uint64_t*>(data), n, 0x7ff0000000000000u,
                                   threads);
      case tensorflow::DT_HALF:
        return AllFinite<uint16_t>(static_cast<const uint16_t*>(data), n, 0x7c00, threads);
      case tensorflow::DT_BFLOAT16:
        return AllFinite<uint16_t>(static_cast<const uint16_t*>(data), n, 0x7f80, threads);
      default:  // Float, the only other dtype of the op.
        return AllFinite<uint32_t>(static_cast<const uint32_t*>(data), n, 0x7f800000, threads);
    }
  }
};

REGISTER_KERNEL_BUILDER(Name("RedsyncAllFinite").Device(tensorflow::DEVICE_CPU), AllFiniteOp);

}  // namespace
}  // namespace redsync
