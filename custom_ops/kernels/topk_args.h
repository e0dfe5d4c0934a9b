// What the kernels for coded messages of selected elements do on every device.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_TOPK_ARGS_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_TOPK_ARGS_H_

#include <vector>

#include "custom_ops/core/cpu/topk_codec.h"
#include "custom_ops/kernels/select_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

// The attributes `k`, `streams`, `rice` and `value_bits`.
struct TopKAttributes {
  std::vector<int64_t> k, streams, rice;
  int value_bits = 1;

  // For `n` tensors.
  tensorflow::Status Read(tensorflow::OpKernelConstruction* context, size_t n);

  // The format for tensors of these sizes, which are sizes and slots of `tensors` then; checks
  // them.
  tensorflow::Status Lay(const std::vector<int64_t>& sizes, TopKFormat* format,
                         std::vector<TopKTensor>* tensors) const;
};

// The attributes of RedsyncSelectAndCode.
struct SelectAndCodeAttributes : MomentumAttributes, TopKAttributes {
  tensorflow::Status Read(tensorflow::OpKernelConstruction* context);
  tensorflow::Status Lay(const tensorflow::OpInputList& grads, TopKFormat* format,
                         std::vector<TopKTensor>* tensors) const;
};

// The inputs and the output of RedsyncUncode.
struct DecodeTopKCall {
  TopKFormat format;
  std::vector<TopKTensor> tensors;
  int64_t ranks = 0, words = 0, plain_words = 0;
  int64_t slots = 0;  // Of all tensors.
  const int32_t* messages;
  int32_t* plain;

  tensorflow::Status Read(tensorflow::OpKernelConstruction* context);
  tensorflow::Status Prepare(tensorflow::OpKernelContext* context);
};

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_TOPK_ARGS_H_
