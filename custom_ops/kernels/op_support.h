// Checks of attributes and shapes, outputs, threads and error messages, for the kernels of all ops.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_OP_SUPPORT_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_OP_SUPPORT_H_

#include <string>
#include <vector>

#include "custom_ops/core/cpu/codec_error.h"
#include "custom_ops/core/cpu/common.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

// ------------------------------------------------------------------------------------ attributes

// Reads the attribute `name`, an integer in [low, high].
tensorflow::Status ReadInt(tensorflow::OpKernelConstruction* context, const char* name, int64_t low,
                           int64_t high, int64_t* value);

// Checks that the list attribute `name` has one entry for each of `n` tensors.
tensorflow::Status CheckOnePerTensor(const char* name, size_t entries, size_t n);

// Checks that the list attribute `name` has `n` entries, all in [low, high].
tensorflow::Status CheckList(const char* name, const std::vector<int64_t>& values, size_t n,
                             int64_t low, int64_t high);

// Reads the list attribute `name` and checks it, see CheckList().
tensorflow::Status ReadList(tensorflow::OpKernelConstruction* context, const char* name, size_t n,
                            int64_t low, int64_t high, std::vector<int64_t>* values);

// ---------------------------------------------------------------------------------------- inputs

constexpr int64_t kAnyRows = -1;

// Checks that the input `name` has the shape [columns].
tensorflow::Status CheckVector(const char* name, const tensorflow::Tensor& tensor, int64_t columns);

// Checks that the input `name` has the shape [rows, columns]; `rows` may be kAnyRows.
tensorflow::Status CheckMatrix(const char* name, const tensorflow::Tensor& tensor, int64_t rows,
                               int64_t columns);

// Reads the input `name`, a scalar.
tensorflow::Status ReadScalar(tensorflow::OpKernelContext* context, const char* name,
                              const tensorflow::Tensor** tensor);

// Reads the inputs `indices`, a list of vectors, and `counts`, which has one entry per vector.
tensorflow::Status ReadPositions(tensorflow::OpKernelContext* context,
                                 tensorflow::OpInputList* indices,
                                 const tensorflow::Tensor** counts);

// Checks that an int32 can count the entries of indices[i].
tensorflow::Status CheckEntries(int i, const tensorflow::Tensor& tensor, int64_t entries);

// Returns the words of an int32 tensor, positions or codes, as unsigned integers.
inline uint32_t* Words(tensorflow::Tensor* tensor) {
  return reinterpret_cast<uint32_t*>(tensor->flat<int32_t>().data());
}
inline const uint32_t* Words(const tensorflow::Tensor& tensor) {
  return reinterpret_cast<const uint32_t*>(tensor.flat<int32_t>().data());
}

// --------------------------------------------------------------------------------------- outputs

// Allocates the output `name`; T is a 32-bit type.
template <class T>
tensorflow::Status AllocateOutput(tensorflow::OpKernelContext* context, const std::string& name,
                                  const tensorflow::TensorShape& shape, T** memory) {
  static_assert(sizeof(T) == 4, "a word");
  tensorflow::Tensor* output;
  TF_RETURN_IF_ERROR(context->allocate_output(name, shape, &output));
  *memory = static_cast<T*>(output->data());
  return tensorflow::OkStatus();
}

// Allocates the output `name` in the shape [rows, columns]; fails if that is too large.
template <class T>
tensorflow::Status AllocateMatrix(tensorflow::OpKernelContext* context, const std::string& name,
                                  int64_t rows, int64_t columns, T** memory) {
  tensorflow::TensorShape shape;  // Its constructor ends the process for sizes that overflow.
  TF_RETURN_IF_ERROR(tensorflow::TensorShape::BuildTensorShape({rows, columns}, &shape));
  return AllocateOutput(context, name, shape, memory);
}

// Allocates output number `output` as float32 in the shape of input number `input`, in that input's
// buffer if no other op needs it.
tensorflow::Status ForwardOrAllocate(tensorflow::OpKernelContext* context, int input, int output,
                                     float** memory);

// --------------------------------------------------------------------------------------- running

// Returns a parallel loop on TensorFlow's intra-op threads.
ParallelFor IntraOpThreads(tensorflow::OpKernelContext* context);

// Returns InvalidArgument with the invalid field of the argument `name` and its position.
tensorflow::Status Describe(const char* name, const CodecError& error);

// Describes `error` if `status` is a failure.
inline tensorflow::Status StatusOf(Status status, const char* name, const CodecError& error) {
  return status == Status::kOk ? tensorflow::OkStatus() : Describe(name, error);
}

// Describes the first error, if any.
tensorflow::Status FirstError(const char* name, const std::vector<CodecError>& errors);

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_OP_SUPPORT_H_
