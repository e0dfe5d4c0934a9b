#include <vector>

#include "custom_ops/kernels/gpu/checked_op.h"
#include "custom_ops/kernels/merge_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;

struct MergeWork {
  static constexpr const char* kWhat = "The merge";
  static constexpr const char* kName = "blocks";
  static constexpr auto Explain = redsync_gpu_explain_merge;

  std::vector<RedsyncGpuBlocks> blocks;
  RedsyncGpuMerge call;
  RecordPair record;
};

class GpuSparseMergeOp : public CheckedOp<MergeWork> {
 public:
  explicit GpuSparseMergeOp(OpKernelConstruction* context) : CheckedOp(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
  }

 private:
  tensorflow::Status Queue(OpKernelContext* context, MergeWork* work) const override {
    MergeInputs in;
    TF_RETURN_IF_ERROR(in.Read(context));
    const int64_t n = in.indices.size();
    std::vector<int64_t> rest;
    for (const int64_t slots : in.slots) rest.push_back(in.ranks * slots);
    std::vector<SparseOutput> kept(n), dropped(n);
    TF_RETURN_IF_ERROR(AllocateSparse(context, "kept", attributes_.k, &kept));
    TF_RETURN_IF_ERROR(AllocateSparse(context, "dropped", rest, &dropped));
    for (int64_t i = 0; i < n; ++i) {
      work->blocks.push_back({in.slots[i], attributes_.sizes[i], attributes_.k[i],
                              Words(in.indices[i]), in.values[i].flat<float>().data(),
                              kept[i].indices, kept[i].values, dropped[i].indices,
                              dropped[i].values});
    }
    work->call = {
        work->blocks.data(), n, in.counts->flat<int32_t>().data(), in.ranks, kept[0].count,
        dropped[0].count};
    const int64_t bytes = redsync_gpu_merge_scratch_bytes(&work->call);
    return Run(context, work, bytes, redsync_gpu_merge);
  }

  MergeAttributes attributes_;
};

REGISTER_KERNEL_BUILDER(Name("RedsyncSparseMerge").Device(tensorflow::DEVICE_GPU),
                        GpuSparseMergeOp);

}  // namespace
}  // namespace redsync
