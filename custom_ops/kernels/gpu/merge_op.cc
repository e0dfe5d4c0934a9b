#include <vector>

#include "custom_ops/kernels/gpu/checked_op.h"
#include "custom_ops/kernels/merge_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

struct Merge {
  static constexpr const char* kWork = "The merge";
  static constexpr const char* kName = "blocks";
  static constexpr auto Bytes = redsync_gpu_merge_scratch_bytes;
  static constexpr auto Function = redsync_gpu_merge;
  static constexpr auto Explain = redsync_gpu_explain_merge;

  std::vector<RedsyncGpuBlocks> blocks;
  RedsyncGpuMerge call;

  tensorflow::Status Fill(const SparseMergeCall& from) {
    for (int i = 0; i < from.indices.size(); ++i) {
      const SparseOutput &kept = from.kept[i], &dropped = from.dropped[i];
      blocks.push_back({from.slots[i], from.sizes[i], from.k[i], Words(from.indices[i]),
                        from.values[i].flat<float>().data(), kept.indices, kept.values,
                        dropped.indices, dropped.values});
    }
    call = {blocks.data(), from.indices.size(),     from.counts,
            from.ranks,    from.kept.front().count, from.dropped.front().count};
    return tensorflow::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("RedsyncSparseMerge").Device(tensorflow::DEVICE_GPU),
                        CodecOp<SparseMergeCall, Merge>);

}  // namespace
}  // namespace redsync
