#include <vector>

#include "custom_ops/core/cpu/sum_messages.h"
#include "custom_ops/kernels/select_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpInputList;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::errors::InvalidArgument;

// Validates the messages and calls SumMessages() for one tensor after the other.
class DecodeOp : public tensorflow::OpKernel {
 public:
  explicit DecodeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor *received, *k;
    OpInputList like;
    std::vector<Part> parts;
    OP_REQUIRES_OK(context, context->input("messages", &received));
    OP_REQUIRES_OK(context, context->input("k", &k));
    OP_REQUIRES_OK(context, context->input_list("like", &like));
    OP_REQUIRES_OK(context, MakeParts(attributes_, "like", like, *k, &parts));
    OP_REQUIRES(context, received->dims() == 2 && received->dim_size(1) == MessageWords(parts),
                InvalidArgument("`messages` must have shape [workers, ", MessageWords(parts),
                                "], the number of words that `k` implies. Received: ",
                                received->shape().DebugString(), "."));
    const Messages messages = {received->flat<int32_t>().data(), received->dim_size(0),
                               received->dim_size(1)};
    DecodeError error;
    const Status status = Validate(messages, parts.data(), parts.size(), &error);
    OP_REQUIRES(context, status == Status::kOk,
                InvalidMessage(error.field, error.tensor, error.rank, error.slot, error.value,
                               error.limit));
    const ParallelFor threads = IntraOpThreads(context);
    for (size_t i = 0; i < parts.size(); ++i) {
      Tensor* total;
      OP_REQUIRES_OK(context, context->forward_input_or_allocate_output(
                                  {2 + static_cast<int>(i)}, i, like[i].shape(), &total));
      SumMessages(messages, parts[i], threads, total->flat<float>().data());
    }
  }

 private:
  TensorAttributes attributes_;
};

REGISTER_KERNEL_BUILDER(Name("RedsyncDecode").Device(tensorflow::DEVICE_CPU), DecodeOp);

}  // namespace
}  // namespace redsync
