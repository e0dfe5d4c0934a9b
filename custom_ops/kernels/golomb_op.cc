#include <vector>

#include "custom_ops/core/cpu/golomb.h"
#include "custom_ops/kernels/codec.h"
#include "custom_ops/kernels/layout.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpInputList;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::OpOutputList;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::errors::InvalidArgument;

constexpr int kMaxRice = 30;
constexpr int64_t kPositionCost = 20;  // Cycles to code a position.

// The formats of the tensors and where their parts lie.
struct Formats {
  std::vector<int64_t> sizes, rice, slots;
  std::vector<GolombFormat> of;
  std::vector<int64_t> at;
  int64_t words = 0;

  tensorflow::Status Read(OpKernelConstruction* context) {
    int n;
    TF_RETURN_IF_ERROR(context->GetAttr("N", &n));
    TF_RETURN_IF_ERROR(context->GetAttr("sizes", &sizes));
    TF_RETURN_IF_ERROR(context->GetAttr("rice", &rice));
    TF_RETURN_IF_ERROR(CheckList("sizes", sizes, n, 0, INT32_MAX));
    return CheckList("rice", rice, n, 0, kMaxRice);
  }

  // Completes the formats with the numbers of slots.
  tensorflow::Status Lay() {
    TF_RETURN_IF_ERROR(CheckList("slots", slots, sizes.size(), 0, INT32_MAX));
    for (size_t i = 0; i < sizes.size(); ++i) {
      const GolombFormat format = {sizes[i], slots[i], static_cast<int>(rice[i])};
      if (slots[i] > sizes[i] || format.words() > kMaxGolombWords) {
        return InvalidArgument(
            "`slots` must be at most `sizes`, and the code of a tensor at most 2^31 bits. "
            "Received: slots[",
            i, "]=", slots[i], ", sizes[", i, "]=", sizes[i], ", rice[", i, "]=", rice[i], ".");
      }
      of.push_back(format);
      at.push_back(words);
      words += 2 + format.words();
    }
    return tensorflow::OkStatus();
  }
};

class GolombEncodeOp : public tensorflow::OpKernel {
 public:
  explicit GolombEncodeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
  }

  void Compute(OpKernelContext* context) override {
    OpInputList indices;
    const Tensor* counts;
    OP_REQUIRES_OK(context, ReadPositions(context, &indices, &counts));
    Formats formats = attributes_;
    for (const Tensor& tensor : indices) formats.slots.push_back(tensor.NumElements());
    OP_REQUIRES_OK(context, formats.Lay());
    Tensor* message;
    OP_REQUIRES_OK(context,
                   context->allocate_output("message", TensorShape({formats.words}), &message));
    std::vector<CodecError> errors(indices.size());
    const int64_t cost = kPositionCost * formats.words;
    IntraOpThreads(context)(indices.size(), cost, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        GolombEncode(formats.of[i], indices[i].flat<int32_t>().data(), counts->flat<int32_t>()(i),
                     message->flat<int32_t>().data() + formats.at[i], &errors[i]);
        errors[i].tensor = i;
      }
    });
    OP_REQUIRES_OK(context, FirstError("indices", errors));
  }

 private:
  Formats attributes_;
};

class GolombDecodeOp : public tensorflow::OpKernel {
 public:
  explicit GolombDecodeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, formats_.Read(context));
    OP_REQUIRES_OK(context, context->GetAttr("slots", &formats_.slots));
    OP_REQUIRES_OK(context, formats_.Lay());
  }

  void Compute(OpKernelContext* context) override {
    const Tensor* messages;
    Tensor* counts;
    OpOutputList indices;
    OP_REQUIRES_OK(context, context->input("messages", &messages));
    OP_REQUIRES_OK(context, CheckShape("messages", *messages, -1, formats_.words));
    const int64_t ranks = messages->dim_size(0), n = formats_.of.size();
    OP_REQUIRES_OK(context, context->output_list("indices", &indices));
    OP_REQUIRES_OK(context, context->allocate_output("counts", TensorShape({ranks, n}), &counts));
    std::vector<int32_t*> positions(n);
    for (int64_t i = 0; i < n; ++i) {
      Tensor* tensor;
      OP_REQUIRES_OK(context,
                     indices.allocate(i, TensorShape({ranks, formats_.of[i].slots}), &tensor));
      positions[i] = tensor->flat<int32_t>().data();
    }
    const int32_t* rows = messages->flat<int32_t>().data();
    int32_t* count = counts->flat<int32_t>().data();
    std::vector<CodecError> errors(ranks * n);
    const int64_t cost = kPositionCost * formats_.words;
    IntraOpThreads(context)(ranks * n, cost, [&](int64_t first, int64_t last) {
      for (int64_t item = first; item < last; ++item) {
        const int64_t rank = item / n, i = item % n;
        GolombDecode(formats_.of[i], rows + rank * formats_.words + formats_.at[i],
                     positions[i] + rank * formats_.of[i].slots, count + item, &errors[item]);
        errors[item].rank = rank;
        errors[item].tensor = i;
      }
    });
    OP_REQUIRES_OK(context, FirstError("messages", errors));
  }

 private:
  Formats formats_;
};

REGISTER_KERNEL_BUILDER(Name("RedsyncGolombEncode").Device(tensorflow::DEVICE_CPU), GolombEncodeOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncGolombDecode").Device(tensorflow::DEVICE_CPU), GolombDecodeOp);

}  // namespace
}  // namespace redsync
