#include <algorithm>
#include <vector>

#include "custom_ops/core/cpu/coded_message.h"
#include "custom_ops/core/cpu/select.h"
#include "custom_ops/kernels/codec.h"
#include "custom_ops/kernels/layout.h"
#include "custom_ops/kernels/position_layouts.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::errors::InvalidArgument;

// Validates, allocates, and calls AccumulateAndSelect() for one tensor after the other, then
// EncodeSelected() for what they selected together.
class SelectAndCodeOp : public tensorflow::OpKernel {
 public:
  explicit SelectAndCodeOp(OpKernelConstruction* context) : OpKernel(context) {
    int n;
    std::vector<int64_t> rice;
    OP_REQUIRES_OK(context, attributes_.Read(context));
    OP_REQUIRES_OK(context, context->GetAttr("N", &n));
    OP_REQUIRES_OK(context, context->GetAttr("k", &k_));
    OP_REQUIRES_OK(context, context->GetAttr("streams", &streams_));
    OP_REQUIRES_OK(context, context->GetAttr("rice", &rice));
    OP_REQUIRES_OK(context, context->GetAttr("value_bits", &format_.value_bits));
    OP_REQUIRES_OK(context, CheckList("k", k_, n, 0, INT32_MAX));
    OP_REQUIRES_OK(context, CheckList("rice", rice, rice.size(), 0, kMaxRice));
    const int64_t last = static_cast<int64_t>(rice.size()) - 1;
    OP_REQUIRES_OK(context, CheckList("streams", streams_, n, 0, last));
    const int bits = format_.value_bits;
    OP_REQUIRES(context, (bits >= 1 && bits <= kMaxLevelBits) || bits == kHalfBits,
                InvalidArgument("`value_bits` must be in [1, ", kMaxLevelBits, "] or ", kHalfBits,
                                ". Received: value_bits=", bits, "."));
    for (const int64_t low_bits : rice) {
      format_.streams.push_back({0, 0, static_cast<int>(low_bits)});
    }
  }

  void Compute(OpKernelContext* context) override {
    Call call;
    OP_REQUIRES_OK(context, call.Read(context, attributes_));
    OP_REQUIRES_OK(context, Lay(&call));
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
    const Status status = EncodeSelected(
        call.format, call.tensors.data(), call.tensors.size(),
        reinterpret_cast<uint32_t*>(call.codes.flat<int32_t>().data()), message, &finite, &error);
    OP_REQUIRES(context, status == Status::kOk, Describe("indices", error));
  }

 private:
  // What one execution works on.
  struct Call : AccumulateInputs {
    CodedFormat format;
    std::vector<SelectedTensor> tensors;
    int64_t slots = 0;  // Of all tensors.
    std::vector<Tensor*> new_residuals, new_velocities;
    Tensor *message, indices, values, codes, scratch;
    ParallelFor threads;
  };

  // Sizes and slots; checks them.
  tensorflow::Status Lay(Call* call) const {
    call->format = format_;
    for (int i = 0; i < call->grads.size(); ++i) {
      SelectedTensor tensor;
      tensor.size = call->grads[i].NumElements();
      tensor.slots = k_[i];
      if (tensor.slots < std::min<int64_t>(tensor.size, 1) || tensor.slots > tensor.size) {
        return InvalidArgument("`k` must be in [1, size] (0 for an empty tensor). Received: k[", i,
                               "]=", k_[i], " for grads[", i, "] of shape ",
                               call->grads[i].shape().DebugString(), ".");
      }
      tensor.stream = streams_[i];
      GolombFormat& stream = call->format.streams[tensor.stream];
      stream.size += tensor.size;
      stream.slots += tensor.slots;
      call->slots += tensor.slots;
      call->tensors.push_back(tensor);
    }
    for (const GolombFormat& stream : call->format.streams) {
      if (stream.size <= INT32_MAX && stream.words() <= kMaxGolombWords) continue;
      return InvalidArgument("`grads` of a stream must have at most ", INT32_MAX,
                             " elements together, and the code of their positions 2^31 bits. "
                             "Received: ",
                             stream.size, " elements, of which ", stream.slots, " are selected.");
    }
    return tensorflow::OkStatus();
  }

  tensorflow::Status Allocate(OpKernelContext* context, Call* call) const {
    const int64_t n = call->tensors.size(), slots = call->slots;
    const int64_t words = call->format.words(call->tensors.data(), n);
    TF_RETURN_IF_ERROR(context->allocate_output("message", TensorShape({words}), &call->message));
    TF_RETURN_IF_ERROR(NewState(context, &call->new_residuals, &call->new_velocities));
    int64_t bytes = 0;
    for (const SelectedTensor& tensor : call->tensors) {
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
      SelectedTensor& tensor = call->tensors[i];
      tensor.indices = Words(&call->indices) + first;
      tensor.values = call->values.flat<int32_t>().data() + first;
      tensor.residual = call->new_residuals[i]->flat<float>().data();
      first += tensor.slots;
    }
    return tensorflow::OkStatus();
  }

  tensorflow::Status Select(int i, Call* call, bool* finite) const {
    SelectedTensor& tensor = call->tensors[i];
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

  MomentumAttributes attributes_;
  std::vector<int64_t> k_, streams_;
  CodedFormat format_;
};

REGISTER_KERNEL_BUILDER(Name("RedsyncSelectAndCode").Device(tensorflow::DEVICE_CPU),
                        SelectAndCodeOp);

}  // namespace
}  // namespace redsync
