#include <algorithm>
#include <vector>

#include "custom_ops/core/cpu/bloom.h"
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

constexpr int64_t kInsertCost = 50;  // Cycles to add a position.

// The formats for the seed, which is an input.
tensorflow::Status Seeded(OpKernelContext* context, const BloomLayout& filters,
                          std::vector<BloomFormat>* formats) {
  const Tensor* seed;
  TF_RETURN_IF_ERROR(Scalar(context, "seed", &seed));
  *formats = filters.of;
  for (BloomFormat& format : *formats) {
    format.seed = static_cast<uint32_t>(seed->scalar<int32_t>()());
  }
  return tensorflow::OkStatus();
}

class BloomBuildOp : public tensorflow::OpKernel {
 public:
  explicit BloomBuildOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, filters_.Read(context));
  }

  void Compute(OpKernelContext* context) override {
    OpInputList indices;
    const Tensor* counts;
    std::vector<BloomFormat> formats;
    OP_REQUIRES_OK(context, ReadPositions(context, &indices, &counts));
    OP_REQUIRES_OK(context, Seeded(context, filters_, &formats));
    Tensor* message;
    OP_REQUIRES_OK(context,
                   context->allocate_output("filters", TensorShape({filters_.words}), &message));
    std::vector<CodecError> errors(indices.size());
    const int64_t cost = kInsertCost * filters_.words;
    IntraOpThreads(context)(indices.size(), cost, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        BloomBuild(formats[i], Words(indices[i]), indices[i].NumElements(),
                   counts->flat<int32_t>()(i), message->flat<int32_t>().data() + filters_.at[i],
                   &errors[i]);
        errors[i].tensor = i;
      }
    });
    OP_REQUIRES_OK(context, FirstError("indices", errors));
  }

 private:
  BloomLayout filters_;
};

class BloomQueryOp : public tensorflow::OpKernel {
 public:
  explicit BloomQueryOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, filters_.Read(context));
    OP_REQUIRES_OK(context, context->GetAttr("slots", &slots_));
    OP_REQUIRES_OK(context, CheckList("slots", slots_, filters_.of.size(), 0, INT32_MAX));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor* messages;
    Tensor *counts, scratch;
    std::vector<uint32_t*> positions;
    std::vector<BloomFormat> formats;
    OP_REQUIRES_OK(context, context->input("filters", &messages));
    OP_REQUIRES_OK(context, Seeded(context, filters_, &formats));
    OP_REQUIRES_OK(context, CheckShape("filters", *messages, -1, filters_.words));
    const int64_t ranks = messages->dim_size(0), n = formats.size();
    OP_REQUIRES_OK(context, AllocatePositions(context, ranks, slots_, &positions, &counts));
    int64_t bytes = 0;
    for (const BloomFormat& format : formats) {
      bytes = std::max(bytes, BloomScratchBytes(format.size));
    }
    OP_REQUIRES_OK(context,
                   context->allocate_temp(tensorflow::DT_UINT8, TensorShape({bytes}), &scratch));
    const ParallelFor threads = IntraOpThreads(context);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const int32_t* filter =
            messages->flat<int32_t>().data() + rank * filters_.words + filters_.at[i];
        counts->matrix<int32_t>()(rank, i) =
            static_cast<int32_t>(BloomQuery(formats[i], filter, slots_[i], scratch.data(), threads,
                                            positions[i] + rank * slots_[i]));
      }
    }
  }

 private:
  BloomLayout filters_;
  std::vector<int64_t> slots_;
};

REGISTER_KERNEL_BUILDER(Name("RedsyncBloomBuild").Device(tensorflow::DEVICE_CPU), BloomBuildOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncBloomQuery").Device(tensorflow::DEVICE_CPU), BloomQueryOp);

}  // namespace
}  // namespace redsync
