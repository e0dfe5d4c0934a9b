#include <vector>

#include "custom_ops/core/cpu/golomb.h"
#include "custom_ops/kernels/op_support.h"
#include "custom_ops/kernels/position_args.h"
#include "custom_ops/kernels/select_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpInputList;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

constexpr int64_t kPositionCost = 20;  // Cycles to code a position.

class GolombEncodeOp : public tensorflow::OpKernel {
 public:
  explicit GolombEncodeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
  }

  void Compute(OpKernelContext* context) override {
    OpInputList indices;
    const Tensor* counts;
    OP_REQUIRES_OK(context, ReadPositions(context, &indices, &counts));
    GolombLayout formats = attributes_;
    for (const Tensor& tensor : indices) formats.slots.push_back(tensor.NumElements());
    OP_REQUIRES_OK(context, formats.Lay());
    Tensor* message;
    OP_REQUIRES_OK(context,
                   context->allocate_output("message", TensorShape({formats.words}), &message));
    std::vector<CodecError> errors(indices.size());
    const int64_t cost = kPositionCost * formats.words;
    IntraOpThreads(context)(indices.size(), cost, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        GolombEncode(formats.of[i], Words(indices[i]), counts->flat<int32_t>()(i),
                     message->flat<int32_t>().data() + formats.at[i], &errors[i]);
        errors[i].tensor = i;
      }
    });
    OP_REQUIRES_OK(context, FirstError("indices", errors));
  }

 private:
  GolombLayout attributes_;
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
    std::vector<uint32_t*> positions;
    OP_REQUIRES_OK(context, context->input("messages", &messages));
    OP_REQUIRES_OK(context, CheckShape("messages", *messages, -1, formats_.words));
    const int64_t ranks = messages->dim_size(0), n = formats_.of.size();
    OP_REQUIRES_OK(context, AllocatePositions(context, ranks, formats_.slots, &positions, &counts));
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
  GolombLayout formats_;
};

REGISTER_KERNEL_BUILDER(Name("RedsyncGolombEncode").Device(tensorflow::DEVICE_CPU), GolombEncodeOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncGolombDecode").Device(tensorflow::DEVICE_CPU), GolombDecodeOp);

}  // namespace
}  // namespace redsync
