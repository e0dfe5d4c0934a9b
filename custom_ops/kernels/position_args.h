// Attributes, inputs and outputs of Golomb codes and Bloom filters; see call_op.h.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_POSITION_ARGS_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_POSITION_ARGS_H_

#include <vector>

#include "custom_ops/core/cpu/bloom.h"
#include "custom_ops/core/cpu/golomb.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

// The Golomb codes of several tensors in a message.
struct GolombLayout {
  std::vector<int64_t> sizes, rice, slots;
  std::vector<GolombFormat> formats;
  std::vector<int64_t> offsets;  // Offset of each tensor's code.
  int64_t words = 0;

  // Reads `sizes` and `rice`.
  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction* context);
  // Computes formats and offsets once `slots` is filled.
  tensorflow::Status ComputeOffsets();
};

// Positions of several tensors, on each of several workers.
struct PositionsOutput {
  std::vector<uint32_t*> positions;  // Positions of each tensor, [ranks, slots].
  int32_t* counts = nullptr;         // [ranks, tensors]

  // Allocates the outputs `indices` and `counts`.
  tensorflow::Status Allocate(tensorflow::OpKernelContext* context, int64_t ranks,
                              const std::vector<int64_t>& slots);
};

struct GolombEncodeCall : GolombLayout {
  tensorflow::OpInputList indices;
  const int32_t* counts = nullptr;
  int32_t* message = nullptr;

  tensorflow::Status Prepare(tensorflow::OpKernelContext* context);
};

struct GolombDecodeCall : GolombLayout {
  const int32_t* messages = nullptr;
  int64_t ranks = 0;
  PositionsOutput out;

  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction* context);
  tensorflow::Status Prepare(tensorflow::OpKernelContext* context);
};

// The concatenated Bloom filters of several tensors.
struct BloomLayout {
  std::vector<BloomFormat> formats;  // Without the seed, which is an input.
  std::vector<int64_t> offsets;      // Offset of each filter.
  int64_t words = 0;
  const int32_t* seed = nullptr;

  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction* context);
  tensorflow::Status ReadSeed(tensorflow::OpKernelContext* context);
};

struct BloomBuildCall : BloomLayout {
  tensorflow::OpInputList indices;
  const int32_t* counts = nullptr;
  int32_t* filters = nullptr;

  tensorflow::Status Prepare(tensorflow::OpKernelContext* context);
};

struct BloomQueryCall : BloomLayout {
  std::vector<int64_t> slots;
  const int32_t* filters = nullptr;
  int64_t ranks = 0;
  PositionsOutput out;

  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction* context);
  tensorflow::Status Prepare(tensorflow::OpKernelContext* context);
};

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_POSITION_ARGS_H_
