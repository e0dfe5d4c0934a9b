// Golomb codes and Bloom filters; one file, because TensorFlow's headers dominate the compile time.
#include <vector>

#include "custom_ops/kernels/call_op.h"
#include "custom_ops/kernels/gpu/checked_op.h"
#include "custom_ops/kernels/position_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelContext;

template <class T>
int64_t Count(const std::vector<T>& list) {
  return static_cast<int64_t>(list.size());
}

struct EncodeGolomb {
  static constexpr const char* kWork = "Golomb encoding";
  static constexpr const char* kName = "indices";
  static constexpr auto Bytes = redsync_gpu_golomb_encode_scratch_bytes;
  static constexpr auto Function = redsync_gpu_golomb_encode;
  static constexpr auto Explain = redsync_gpu_explain_golomb_encode;

  std::vector<RedsyncGpuPositions> tensors;
  RedsyncGpuGolombEncode call;

  tensorflow::Status Fill(const GolombEncodeCall& from) {
    for (int i = 0; i < from.indices.size(); ++i) {
      tensors.push_back(
          {from.sizes[i], from.slots[i], from.rice[i], Words(from.indices[i]), nullptr});
    }
    call = {tensors.data(), Count(tensors), from.counts, from.message};
    return tensorflow::OkStatus();
  }
};

struct DecodeGolomb {
  static constexpr const char* kWork = "Golomb decoding";
  static constexpr const char* kName = "messages";
  static constexpr auto Bytes = redsync_gpu_golomb_decode_scratch_bytes;
  static constexpr auto Function = redsync_gpu_golomb_decode;
  static constexpr auto Explain = redsync_gpu_explain_golomb_decode;

  std::vector<RedsyncGpuPositions> tensors;
  RedsyncGpuGolombDecode call;

  tensorflow::Status Fill(const GolombDecodeCall& from) {
    for (size_t i = 0; i < from.sizes.size(); ++i) {
      tensors.push_back(
          {from.sizes[i], from.slots[i], from.rice[i], nullptr, from.out.positions[i]});
    }
    call = {tensors.data(), Count(tensors), from.messages,  from.ranks,
            from.words,     from.words,     from.out.counts};
    return tensorflow::OkStatus();
  }
};

struct BuildBloom {
  static constexpr const char* kWork = "Building Bloom filters";
  static constexpr const char* kName = "indices";
  static constexpr auto Bytes = nullptr;
  static constexpr auto Function = redsync_gpu_bloom_build;
  static constexpr auto Explain = redsync_gpu_explain_bloom_build;

  std::vector<RedsyncGpuFilter> tensors;
  RedsyncGpuBloomBuild call;

  tensorflow::Status Fill(const BloomBuildCall& from) {
    for (int i = 0; i < from.indices.size(); ++i) {
      const BloomFormat& format = from.formats[i];
      tensors.push_back({format.size, from.indices[i].NumElements(), format.words, format.hashes,
                         Words(from.indices[i]), nullptr});
    }
    call = {tensors.data(), Count(tensors), from.counts, from.seed, from.filters};
    return tensorflow::OkStatus();
  }
};

// Any words are a valid filter, so there is no check.
tensorflow::Status QueryBloom(OpKernelContext* context, const BloomQueryCall& from) {
  std::vector<RedsyncGpuFilter> tensors;
  for (size_t i = 0; i < from.formats.size(); ++i) {
    const BloomFormat& format = from.formats[i];
    tensors.push_back(
        {format.size, from.slots[i], format.words, format.hashes, nullptr, from.out.positions[i]});
  }
  const RedsyncGpuBloomQuery call = {tensors.data(), Count(tensors), from.filters,   from.ranks,
                                     from.words,     from.seed,      from.out.counts};
  return WithScratch(context, redsync_gpu_bloom_query_scratch_bytes(&call),
                     "Querying Bloom filters", [&](void* scratch, int64_t bytes, void* stream) {
                       return redsync_gpu_bloom_query(&call, scratch, bytes, stream);
                     });
}

REGISTER_KERNEL_BUILDER(Name("RedsyncGolombEncode").Device(tensorflow::DEVICE_GPU),
                        CodecOp<GolombEncodeCall, EncodeGolomb>);
REGISTER_KERNEL_BUILDER(Name("RedsyncGolombDecode").Device(tensorflow::DEVICE_GPU),
                        CodecOp<GolombDecodeCall, DecodeGolomb>);
REGISTER_KERNEL_BUILDER(Name("RedsyncBloomBuild").Device(tensorflow::DEVICE_GPU),
                        CodecOp<BloomBuildCall, BuildBloom>);
REGISTER_KERNEL_BUILDER(Name("RedsyncBloomQuery").Device(tensorflow::DEVICE_GPU),
                        CallOp<BloomQueryCall, QueryBloom>);

}  // namespace
}  // namespace redsync
