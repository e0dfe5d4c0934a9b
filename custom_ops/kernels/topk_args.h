// Attributes, inputs and outputs of RedsyncSelectAndCode and RedsyncUncode; see call_op.h.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_TOPK_ARGS_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_TOPK_ARGS_H_

#include <vector>

#include "custom_ops/core/cpu/topk_codec.h"
#include "custom_ops/kernels/select_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

// The attributes `k`, `streams`, `rice` and `value_bits`, and the resulting format.
struct TopKCall {
  std::vector<int64_t> k, streams, rice;
  int value_bits = 1;
  TopKFormat format;
  std::vector<TopKTensor> tensors;
  int64_t slots = 0;  // Slots of all tensors.
  int64_t words = 0;  // Words of a message.

  // Reads the attributes for `n` tensors.
  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction* context, size_t n);
  // Computes the format for tensors of these sizes; checks `k` and the limits of the format.
  tensorflow::Status ComputeFormat(const std::vector<int64_t>& sizes);
};

// RedsyncSelectAndCode.
struct SelectAndCodeCall : AccumulateCall, TopKCall {
  int32_t* message = nullptr;
  float epsilon = 0;                         // Of Adam; without it 0.
  const tensorflow::Tensor* adam = nullptr;  // [tensors, 3], or [0, 3] without Adam.

  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction* context);
  tensorflow::Status Prepare(tensorflow::OpKernelContext* context);
  // Returns Adam's factors for tensor `i`; `adam` must be in the CPU's memory.
  AdamFactors AdamOf(size_t i) const;
};

// RedsyncUncode.
struct DecodeTopKCall : TopKCall {
  int64_t ranks = 0, plain_words = 0;
  const int32_t* messages = nullptr;
  int32_t* plain = nullptr;

  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction* context);
  tensorflow::Status Prepare(tensorflow::OpKernelContext* context);
};

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_TOPK_ARGS_H_
