#include <algorithm>
#include <vector>

#include "custom_ops/core/cpu/checksum.h"
#include "custom_ops/kernels/call_op.h"
#include "custom_ops/kernels/checksum_args.h"
#include "custom_ops/kernels/op_support.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;

constexpr int64_t kWordCost = 1;  // Cycles per word.
constexpr int64_t kWordBytes = sizeof(uint32_t);

// Copies the messages into the output and calls body(row, message) for each.
template <class Body>
void ForMessages(OpKernelContext* context, const SealCall& call, const Body& body) {
  if (call.out != call.in) std::copy_n(call.in, call.rows * call.words, call.out);
  IntraOpThreads(context)(call.rows, kWordCost * call.words, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) body(row, call.out + row * call.words);
  });
}

tensorflow::Status SealMessages(OpKernelContext* context, const SealCall& call) {
  const int64_t words = call.words - kHeaderWords;
  std::vector<CodecError> errors(call.rows);
  ForMessages(context, call, [&](int64_t row, uint32_t* message) {
    if (*message > 1) {
      Fail("flag", row, static_cast<int32_t>(*message), 1, nullptr, &errors[row]);
    }
    *message = Seal(*message == 1, message + kHeaderWords, words);
  });
  return FirstError("messages", errors);
}

tensorflow::Status OpenMessages(OpKernelContext* context, const OpenCall& call) {
  const int64_t words = call.words - kHeaderWords;
  std::vector<char> corrupted(call.rows, 0);  // Not bool: threads write neighbouring elements.
  ForMessages(context, call, [&](int64_t row, uint32_t* message) {
    if (call.senders[row] < 0) return;
    const int flag = OpenSeal(*message, message + kHeaderWords, words);
    corrupted[row] = flag < 0;
    *message = flag;
  });
  for (int64_t row = 0; row < call.rows; ++row) {
    if (corrupted[row]) return call.Corrupted(call.senders[row]);
  }
  return tensorflow::OkStatus();
}

// Seals variables in place. Separate read ops would be hundreds of ops in a large model.
class SealVariablesOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const int count = context->num_inputs();
    Tensor* output;
    OP_REQUIRES_OK(context, context->allocate_output(0, {count}, &output));
    uint32_t* seals = Words(output);
    std::vector<tensorflow::Status> errors(count);
    IntraOpThreads(context)(count, kVariableCost, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) errors[i] = SealVariable(context, i, seals + i);
    });
    for (const tensorflow::Status& error : errors) OP_REQUIRES_OK(context, error);
  }

 private:
  static constexpr int64_t kVariableCost = 100000;  // Cycles per variable.

  static tensorflow::Status SealVariable(OpKernelContext* context, int i, uint32_t* seal) {
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    TF_RETURN_IF_ERROR(
        tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, i), &variable));
    tensorflow::tf_shared_lock lock(*variable->mu());
    const Tensor& tensor = *variable->tensor();
    const int64_t size = tensorflow::DataTypeSize(tensor.dtype());  // 0 for strings and variants.
    if (!tensor.IsInitialized() || size == 0 || size % kWordBytes != 0) {
      return tensorflow::errors::InvalidArgument(
          "`variables` must be initialized, with elements of 32 or 64 bits. Received: variables[",
          i, "] of ", tensorflow::DataTypeString(tensor.dtype()), ".");
    }
    *seal =
        Seal(true, static_cast<const uint32_t*>(tensor.data()), tensor.TotalBytes() / kWordBytes);
    return tensorflow::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("RedsyncSeal").Device(tensorflow::DEVICE_CPU),
                        CallOp<SealCall, SealMessages>);
REGISTER_KERNEL_BUILDER(Name("RedsyncSealVariables").Device(tensorflow::DEVICE_CPU),
                        SealVariablesOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncOpen").Device(tensorflow::DEVICE_CPU),
                        CallOp<OpenCall, OpenMessages>);

}  // namespace
}  // namespace redsync
