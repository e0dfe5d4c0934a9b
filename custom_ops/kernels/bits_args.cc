#include "custom_ops/kernels/bits_args.h"

#include "custom_ops/kernels/op_support.h"

namespace redsync {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::errors::InvalidArgument;

namespace {

constexpr int64_t kMaxLength = INT64_MAX / 64;

tensorflow::Status ReadRice(OpKernelConstruction* context, RiceFormat* format) {
  int64_t rice;
  TF_RETURN_IF_ERROR(ReadInt(context, "rice", 0, kMaxRice, &rice));
  format->rice = static_cast<int>(rice);
  return ReadInt(context, "bitmap_words", 0, kMaxBitmapWords, &format->bitmap_words);
}

}  // namespace

tensorflow::Status PackCall::ReadAttributes(OpKernelConstruction* context) {
  return ReadInt(context, "bits", 0, kMaxCodeBits, &bits);
}

tensorflow::Status PackCall::Prepare(OpKernelContext* context) {
  const Tensor& codes = context->input(0);
  if (codes.dims() < 1) {
    return InvalidArgument("`codes` must have a last axis. Received: a scalar.");
  }
  const int last = codes.dims() - 1;
  count = codes.dim_size(last);
  rows = 1;
  for (int i = 0; i < last; ++i) rows *= codes.dim_size(i);
  TensorShape shape = codes.shape();
  shape.set_dim(last, words());
  in = Words(codes);
  return AllocateOutput(context, "words", shape, &out);
}

tensorflow::Status UnpackCall::ReadAttributes(OpKernelConstruction* context) {
  TF_RETURN_IF_ERROR(ReadInt(context, "bits", 0, kMaxCodeBits, &bits));
  return ReadInt(context, "count", 0, kMaxLength, &count);
}

tensorflow::Status UnpackCall::Prepare(OpKernelContext* context) {
  const Tensor& input = context->input(0);
  TF_RETURN_IF_ERROR(CheckMatrix("words", input, kAnyRows, words()));
  rows = input.dim_size(0);
  in = Words(input);
  return AllocateMatrix(context, "codes", rows, count, &out);
}

tensorflow::Status WriteBitsCall::ReadAttributes(OpKernelConstruction* context) {
  return ReadInt(context, "size", 0, kMaxLength, &size);
}

tensorflow::Status WriteBitsCall::Prepare(OpKernelContext* context) {
  const Tensor &input = context->input(0), &of_each = context->input(1);
  count = input.NumElements();
  TF_RETURN_IF_ERROR(CheckVector("codes", input, count));
  TF_RETURN_IF_ERROR(CheckVector("lengths", of_each, count));
  codes = input.flat<int64_t>().data();
  lengths = of_each.flat<int32_t>().data();
  return AllocateOutput(context, "words", TensorShape({size}), &words);
}

tensorflow::Status BitmapCall::ReadAttributes(OpKernelConstruction* context) {
  return ReadInt(context, "size", 0, kMaxBitmapWords, &size);
}

tensorflow::Status BitmapCall::Prepare(OpKernelContext* context) {
  const Tensor &input = context->input(0), *number;
  slots = input.NumElements();
  TF_RETURN_IF_ERROR(CheckVector("positions", input, slots));
  TF_RETURN_IF_ERROR(ReadScalar(context, "count", &number));
  positions = Words(input);
  count = number->flat<int32_t>().data();
  return AllocateOutput(context, "words", TensorShape({size}), &words);
}

tensorflow::Status SetBitsCall::ReadAttributes(OpKernelConstruction* context) {
  return ReadInt(context, "slots", 0, INT32_MAX, &slots);
}

tensorflow::Status SetBitsCall::Prepare(OpKernelContext* context) {
  const Tensor& input = context->input(0);
  if (input.dims() != 2 || input.dim_size(1) > kMaxListedWords) {
    return InvalidArgument("`words` must have shape [rows, words], with at most ", kMaxListedWords,
                           " words. Received: ", input.shape().DebugString(), ".");
  }
  rows = input.dim_size(0);
  size = input.dim_size(1);
  words = Words(input);
  TF_RETURN_IF_ERROR(AllocateMatrix(context, "positions", rows, slots, &positions));
  return AllocateMatrix(context, "counts", rows, 1, &counts);
}

tensorflow::Status RiceEncodeCall::ReadAttributes(OpKernelConstruction* context) {
  return ReadRice(context, &format);
}

tensorflow::Status RiceEncodeCall::Prepare(OpKernelContext* context) {
  const Tensor& input = context->input(0);
  format.count = input.NumElements();
  TF_RETURN_IF_ERROR(CheckVector("numbers", input, format.count));
  numbers = input.flat<int32_t>().data();
  return AllocateOutput(context, "code", TensorShape({format.words()}), &code);
}

tensorflow::Status RiceDecodeCall::ReadAttributes(OpKernelConstruction* context) {
  TF_RETURN_IF_ERROR(ReadRice(context, &format));
  return ReadInt(context, "count", 0, INT32_MAX, &format.count);
}

tensorflow::Status RiceDecodeCall::Prepare(OpKernelContext* context) {
  const Tensor& input = context->input(0);
  TF_RETURN_IF_ERROR(CheckMatrix("codes", input, kAnyRows, format.words()));
  rows = input.dim_size(0);
  codes = input.flat<int32_t>().data();
  return AllocateMatrix(context, "numbers", rows, format.count, &numbers);
}

}  // namespace redsync
