#include <algorithm>
#include <vector>

#include "custom_ops/core/cpu/select.h"
#include "custom_ops/core/cpu/topk_codec.h"
#include "custom_ops/kernels/call_op.h"
#include "custom_ops/kernels/op_support.h"
#include "custom_ops/kernels/position_args.h"
#include "custom_ops/kernels/select_args.h"
#include "custom_ops/kernels/topk_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

constexpr int64_t kSlotCost = 16;  // Cycles to decode one.

// Validates, allocates, and calls AccumulateAndSelect() for one tensor after the other, then
// EncodeTopK() for what they selected together.
class SelectAndCodeOp : public tensorflow::OpKernel {
 public:
  explicit SelectAndCodeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
  }

  void Compute(OpKernelContext* context) override {
    Call call;
    OP_REQUIRES_OK(context, call.Read(context, attributes_));
    OP_REQUIRES_OK(context, attributes_.Lay(call.grads, &call.format, &call.tensors));
    for (const TopKTensor& tensor : call.tensors) call.slots += tensor.slots;
    OP_REQUIRES_OK(context, Allocate(context, &call));
    bool finite = true;
    for (size_t i = 0; i < call.tensors.size(); ++i) {
      OP_REQUIRES_OK(context, Select(i, &call, &finite));
    }
    CodecError error;
    int32_t* message = call.message->flat<int32_t>().data();
    if (!finite) {
      std::fill(message, message + call.message->NumElements(), 0);
      return;
    }
    const Status status = EncodeTopK(call.format, call.tensors.data(), call.tensors.size(),
                                     reinterpret_cast<uint32_t*>(call.codes.flat<int32_t>().data()),
                                     message, &finite, &error);
    OP_REQUIRES(context, status == Status::kOk, Describe("indices", error));
  }

 private:
  // What one execution works on.
  struct Call : AccumulateInputs {
    TopKFormat format;
    std::vector<TopKTensor> tensors;
    int64_t slots = 0;  // Of all tensors.
    std::vector<Tensor*> new_residuals, new_velocities;
    Tensor *message, indices, values, codes, scratch;
    ParallelFor threads;
  };

  tensorflow::Status Allocate(OpKernelContext* context, Call* call) const {
    const int64_t n = call->tensors.size(), slots = call->slots;
    const int64_t words = call->format.words(call->tensors.data(), n);
    TF_RETURN_IF_ERROR(context->allocate_output("message", TensorShape({words}), &call->message));
    TF_RETURN_IF_ERROR(NewState(context, &call->new_residuals, &call->new_velocities));
    int64_t bytes = 0;
    for (const TopKTensor& tensor : call->tensors) {
      bytes = std::max(bytes, SelectScratchBytes(tensor.size, tensor.slots, Selector::kExact));
    }
    for (Tensor* buffer : {&call->indices, &call->values, &call->codes}) {
      TF_RETURN_IF_ERROR(
          context->allocate_temp(tensorflow::DT_INT32, TensorShape({slots}), buffer));
    }
    TF_RETURN_IF_ERROR(
        context->allocate_temp(tensorflow::DT_UINT8, TensorShape({bytes}), &call->scratch));
    call->threads = IntraOpThreads(context);
    int64_t first = 0;
    for (int64_t i = 0; i < n; ++i) {
      TopKTensor& tensor = call->tensors[i];
      tensor.indices = Words(&call->indices) + first;
      tensor.values = call->values.flat<int32_t>().data() + first;
      tensor.residual = call->new_residuals[i]->flat<float>().data();
      first += tensor.slots;
    }
    return tensorflow::OkStatus();
  }

  tensorflow::Status Select(int i, Call* call, bool* finite) const {
    TopKTensor& tensor = call->tensors[i];
    SelectOptions options;
    SelectBuffers buffers;
    call->Set(i, attributes_, call->new_residuals, call->new_velocities, &options, &buffers);
    options.k = tensor.slots;
    buffers.indices = const_cast<uint32_t*>(tensor.indices);
    buffers.values = const_cast<int32_t*>(tensor.values);
    SelectResult result;
    const Status status = AccumulateAndSelect(options, buffers, call->scratch.data(),
                                              call->scratch.TotalBytes(), call->threads, &result);
    if (status != Status::kOk) {
      return tensorflow::errors::Internal("Selection failed with status ", static_cast<int>(status),
                                          " on grads[", i, "] of shape ",
                                          call->grads[i].shape().DebugString(), ".");
    }
    tensor.count = result.count;
    *finite = *finite && result.finite;
    return tensorflow::OkStatus();
  }

  SelectAndCodeAttributes attributes_;
};

// DecodeTopK() for the messages of all workers.
tensorflow::Status Uncode(OpKernelContext* context, const DecodeTopKCall& call) {
  std::vector<CodecError> errors(call.ranks);
  IntraOpThreads(context)(call.ranks, kSlotCost * call.slots, [&](int64_t first, int64_t last) {
    std::vector<uint32_t> scratch(call.slots);
    for (int64_t rank = first; rank < last; ++rank) {
      DecodeTopK(call.format, call.tensors.data(), static_cast<int64_t>(call.tensors.size()),
                 call.messages + rank * call.words, scratch.data(),
                 call.plain + rank * call.plain_words, &errors[rank]);
      errors[rank].rank = rank;
    }
  });
  return FirstError("messages", errors);
}

REGISTER_KERNEL_BUILDER(Name("RedsyncSelectAndCode").Device(tensorflow::DEVICE_CPU),
                        SelectAndCodeOp);
REGISTER_KERNEL_BUILDER(
    Name("RedsyncUncode").Device(tensorflow::DEVICE_CPU),
    CallOp<DecodeTopKCall, &DecodeTopKCall::Read, &DecodeTopKCall::Prepare, Uncode>);

}  // namespace
}  // namespace redsync
