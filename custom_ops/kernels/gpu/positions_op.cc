// Golomb codes and Bloom filters: kernels of one shape, in one file since the headers cost more
// than they do.
#include <vector>

#include "custom_ops/kernels/gpu/checked_op.h"
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

int64_t Count(const std::vector<int64_t>& list) { return static_cast<int64_t>(list.size()); }

struct GolombEncodeWork {
  static constexpr const char* kWhat = "Golomb encoding";
  static constexpr const char* kName = "indices";
  static constexpr auto Explain = redsync_gpu_explain_golomb_encode;

  std::vector<RedsyncGpuPositions> tensors;
  RedsyncGpuGolombEncode call;
  RecordPair record;
};

class GpuGolombEncodeOp : public CheckedOp<GolombEncodeWork> {
 public:
  explicit GpuGolombEncodeOp(OpKernelConstruction* context) : CheckedOp(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
  }

 private:
  tensorflow::Status Queue(OpKernelContext* context, GolombEncodeWork* work) const override {
    OpInputList indices;
    const Tensor* counts;
    Tensor* message;
    TF_RETURN_IF_ERROR(ReadPositions(context, &indices, &counts));
    GolombLayout layout = attributes_;
    for (const Tensor& tensor : indices) layout.slots.push_back(tensor.NumElements());
    TF_RETURN_IF_ERROR(layout.Lay());
    TF_RETURN_IF_ERROR(context->allocate_output("message", TensorShape({layout.words}), &message));
    for (int i = 0; i < indices.size(); ++i) {
      work->tensors.push_back(
          {layout.sizes[i], layout.slots[i], layout.rice[i], Words(indices[i]), nullptr});
    }
    work->call = {work->tensors.data(), Count(layout.sizes), counts->flat<int32_t>().data(),
                  message->flat<int32_t>().data()};
    const int64_t bytes = redsync_gpu_golomb_encode_scratch_bytes(&work->call);
    return Run(context, work, bytes, redsync_gpu_golomb_encode);
  }

  GolombLayout attributes_;
};

struct GolombDecodeWork {
  static constexpr const char* kWhat = "Golomb decoding";
  static constexpr const char* kName = "messages";
  static constexpr auto Explain = redsync_gpu_explain_golomb_decode;

  std::vector<RedsyncGpuPositions> tensors;
  RedsyncGpuGolombDecode call;
  RecordPair record;
};

class GpuGolombDecodeOp : public CheckedOp<GolombDecodeWork> {
 public:
  explicit GpuGolombDecodeOp(OpKernelConstruction* context) : CheckedOp(context) {
    OP_REQUIRES_OK(context, layout_.Read(context));
    OP_REQUIRES_OK(context, context->GetAttr("slots", &layout_.slots));
    OP_REQUIRES_OK(context, layout_.Lay());
  }

 private:
  tensorflow::Status Queue(OpKernelContext* context, GolombDecodeWork* work) const override {
    const Tensor* messages;
    Tensor* counts;
    std::vector<uint32_t*> positions;
    TF_RETURN_IF_ERROR(context->input("messages", &messages));
    TF_RETURN_IF_ERROR(CheckShape("messages", *messages, -1, layout_.words));
    const int64_t ranks = messages->dim_size(0);
    TF_RETURN_IF_ERROR(AllocatePositions(context, ranks, layout_.slots, &positions, &counts));
    for (size_t i = 0; i < positions.size(); ++i) {
      work->tensors.push_back(
          {layout_.sizes[i], layout_.slots[i], layout_.rice[i], nullptr, positions[i]});
    }
    work->call = {
        work->tensors.data(), Count(layout_.sizes), messages->flat<int32_t>().data(), ranks,
        layout_.words,        layout_.words,        counts->flat<int32_t>().data()};
    const int64_t bytes = redsync_gpu_golomb_decode_scratch_bytes(&work->call);
    return Run(context, work, bytes, redsync_gpu_golomb_decode);
  }

  GolombLayout layout_;
};

struct BloomBuildWork {
  static constexpr const char* kWhat = "Building Bloom filters";
  static constexpr const char* kName = "indices";
  static constexpr auto Explain = redsync_gpu_explain_bloom_build;

  std::vector<RedsyncGpuFilter> tensors;
  RedsyncGpuBloomBuild call;
  RecordPair record;
};

class GpuBloomBuildOp : public CheckedOp<BloomBuildWork> {
 public:
  explicit GpuBloomBuildOp(OpKernelConstruction* context) : CheckedOp(context) {
    OP_REQUIRES_OK(context, layout_.Read(context));
  }

 private:
  tensorflow::Status Queue(OpKernelContext* context, BloomBuildWork* work) const override {
    OpInputList indices;
    const Tensor *counts, *seed;
    Tensor* filters;
    TF_RETURN_IF_ERROR(ReadPositions(context, &indices, &counts));
    TF_RETURN_IF_ERROR(Scalar(context, "seed", &seed));
    TF_RETURN_IF_ERROR(context->allocate_output("filters", TensorShape({layout_.words}), &filters));
    for (int i = 0; i < indices.size(); ++i) {
      const BloomFormat& format = layout_.of[i];
      work->tensors.push_back({format.size, indices[i].NumElements(), format.words, format.hashes,
                               Words(indices[i]), nullptr});
    }
    work->call = {work->tensors.data(), Count(layout_.at), counts->flat<int32_t>().data(),
                  seed->scalar<int32_t>().data(), filters->flat<int32_t>().data()};
    return Run(context, work, redsync_gpu_bloom_build);
  }

  BloomLayout layout_;
};

// Any filter is a good one: there is nothing to wait for.
class GpuBloomQueryOp : public tensorflow::OpKernel {
 public:
  explicit GpuBloomQueryOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, layout_.Read(context));
    OP_REQUIRES_OK(context, context->GetAttr("slots", &slots_));
    OP_REQUIRES_OK(context, CheckList("slots", slots_, layout_.of.size(), 0, INT32_MAX));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor *filters, *seed;
    Tensor *counts, scratch;
    std::vector<uint32_t*> positions;
    OP_REQUIRES_OK(context, context->input("filters", &filters));
    OP_REQUIRES_OK(context, Scalar(context, "seed", &seed));
    OP_REQUIRES_OK(context, CheckShape("filters", *filters, -1, layout_.words));
    const int64_t ranks = filters->dim_size(0);
    OP_REQUIRES_OK(context, AllocatePositions(context, ranks, slots_, &positions, &counts));
    std::vector<RedsyncGpuFilter> tensors;
    for (size_t i = 0; i < positions.size(); ++i) {
      const BloomFormat& format = layout_.of[i];
      tensors.push_back(
          {format.size, slots_[i], format.words, format.hashes, nullptr, positions[i]});
    }
    const RedsyncGpuBloomQuery call = {tensors.data(),
                                       Count(slots_),
                                       filters->flat<int32_t>().data(),
                                       ranks,
                                       layout_.words,
                                       seed->scalar<int32_t>().data(),
                                       counts->flat<int32_t>().data()};
    const int64_t bytes = redsync_gpu_bloom_query_scratch_bytes(&call);
    OP_REQUIRES_OK(context, AllocateScratch(context, bytes, &scratch));
    OP_REQUIRES_OK(
        context, FromCode(redsync_gpu_bloom_query(&call, scratch.data(), bytes, StreamOf(context)),
                          "Asking Bloom filters"));
  }

 private:
  BloomLayout layout_;
  std::vector<int64_t> slots_;
};

REGISTER_KERNEL_BUILDER(Name("RedsyncGolombEncode").Device(tensorflow::DEVICE_GPU),
                        GpuGolombEncodeOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncGolombDecode").Device(tensorflow::DEVICE_GPU),
                        GpuGolombDecodeOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncBloomBuild").Device(tensorflow::DEVICE_GPU), GpuBloomBuildOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncBloomQuery").Device(tensorflow::DEVICE_GPU), GpuBloomQueryOp);

}  // namespace
}  // namespace redsync
