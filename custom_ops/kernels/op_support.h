// What the kernels of the codecs share.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_OP_SUPPORT_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_OP_SUPPORT_H_

#include <string>
#include <vector>

#include "custom_ops/core/cpu/codec_error.h"
#include "custom_ops/core/cpu/common.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

// InvalidArgument that says what of the argument `name` is wrong, and where.
tensorflow::Status Describe(const char* name, const CodecError& error);

// That the argument has the shape [rows, columns], or [columns] if rows is -2; rows -1: any number.
tensorflow::Status CheckShape(const char* name, const tensorflow::Tensor& tensor, int64_t rows,
                              int64_t columns);

// That an attribute has `n` entries, all in [low, high].
tensorflow::Status CheckList(const char* name, const std::vector<int64_t>& values, size_t n,
                             int64_t low, int64_t high);

// The attribute `name`, in [low, high].
tensorflow::Status ReadInt(tensorflow::OpKernelConstruction* context, const char* name, int64_t low,
                           int64_t high, int64_t* value);

// The inputs `indices`, vectors, and `counts`, with one entry a vector.
tensorflow::Status ReadPositions(tensorflow::OpKernelContext* context,
                                 tensorflow::OpInputList* indices,
                                 const tensorflow::Tensor** counts);

// That so many entries of indices[i] can be counted in int32.
tensorflow::Status CheckEntries(int i, const tensorflow::Tensor& tensor, int64_t entries);

// The words of a tensor of int32, taken without a sign: positions, or codes.
inline uint32_t* Words(tensorflow::Tensor* tensor) {
  return reinterpret_cast<uint32_t*>(tensor->flat<int32_t>().data());
}
inline const uint32_t* Words(const tensorflow::Tensor& tensor) {
  return reinterpret_cast<const uint32_t*>(tensor.flat<int32_t>().data());
}

// Describes the first of the errors that was found, if any was.
tensorflow::Status FirstError(const char* name, const std::vector<CodecError>& errors);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_OP_SUPPORT_H_
