#include <vector>

#include "custom_ops/core/cpu/checksum.h"
#include "custom_ops/kernels/checksum_args.h"
#include "custom_ops/kernels/op_support.h"
#include "custom_ops/kernels/select_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;

constexpr int64_t kWordCost = 1;  // Cycles.

tensorflow::Status CopyMessages(OpKernelContext* context, Tensor** messages) {
  const Tensor& input = context->input(0);
  TF_RETURN_IF_ERROR(AllocateMessages(context, messages));
  if ((*messages)->data() != input.data()) {
    std::copy_n(Words(input), input.NumElements(), Words(*messages));
  }
  return tensorflow::OkStatus();
}

// Calls body(row, message) for each message; `words` are those behind the flag.
template <class Body>
void ForMessages(OpKernelContext* context, Tensor* messages, const Body& body) {
  const int64_t rows = messages->dim_size(0), words = messages->dim_size(1);
  IntraOpThreads(context)(rows, kWordCost * words, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) body(row, Words(messages) + row * words);
  });
}

class SealOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    Tensor* messages;
    OP_REQUIRES_OK(context, CopyMessages(context, &messages));
    const int64_t words = messages->dim_size(1) - kFlagWords;
    std::vector<CodecError> errors(messages->dim_size(0));
    ForMessages(context, messages, [&](int64_t row, uint32_t* message) {
      if (*message > 1) {
        Fail("flag", row, static_cast<int32_t>(*message), 1, nullptr, &errors[row]);
      }
      *message = Seal(*message == 1, message + kFlagWords, words);
    });
    OP_REQUIRES_OK(context, FirstError("messages", errors));
  }
};

class OpenOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor &senders = context->input(1), *receiver;
    Tensor* messages;
    OP_REQUIRES_OK(context, CopyMessages(context, &messages));
    const int64_t rows = messages->dim_size(0), words = messages->dim_size(1) - kFlagWords;
    OP_REQUIRES_OK(context, CheckShape("senders", senders, -2, rows));
    OP_REQUIRES_OK(context, Scalar(context, "receiver", &receiver));
    const int32_t* ranks = senders.flat<int32_t>().data();
    std::vector<char> changed(rows, 0);  // Not bool: threads write beside each other.
    ForMessages(context, messages, [&](int64_t row, uint32_t* message) {
      if (ranks[row] < 0) return;
      const int flag = OpenSeal(*message, message + kFlagWords, words);
      changed[row] = flag < 0;
      *message = flag;
    });
    for (int64_t row = 0; row < rows; ++row) {
      OP_REQUIRES(context, !changed[row],
                  ChangedMessage(words + kFlagWords, receiver->scalar<int32_t>()(), ranks[row]));
    }
  }
};

REGISTER_KERNEL_BUILDER(Name("RedsyncSeal").Device(tensorflow::DEVICE_CPU), SealOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncOpen").Device(tensorflow::DEVICE_CPU), OpenOp);

}  // namespace
}  // namespace redsync
