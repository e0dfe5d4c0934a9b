#include "custom_ops/kernels/bits_args.h"

#include "custom_ops/kernels/op_support.h"
#include "custom_ops/kernels/select_args.h"

namespace redsync {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::errors::InvalidArgument;

namespace {

constexpr int64_t kMaxLength = INT64_MAX / 64;

// Allocates the output `name`.
template <class T>
tensorflow::Status Allocate(OpKernelContext* context, const char* name, const TensorShape& shape,
                            T** memory) {
  Tensor* output;
  TF_RETURN_IF_ERROR(context->allocate_output(name, shape, &output));
  *memory = reinterpret_cast<T*>(output->flat<int32_t>().data());
  return tensorflow::OkStatus();
}

tensorflow::Status ReadRice(OpKernelConstruction* context, RiceFormat* format) {
  int64_t rice;
  TF_RETURN_IF_ERROR(ReadInt(context, "rice", 0, kMaxRice, &rice));
  format->rice = static_cast<int>(rice);
  return ReadInt(context, "bitmap_words", 0, kMaxBitmapWords, &format->bitmap_words);
}

}  // namespace

tensorflow::Status PackedCodes::ReadToPack(OpKernelConstruction* context) {
  return ReadInt(context, "bits", 0, kMaxCodeBits, &bits);
}

tensorflow::Status PackedCodes::ReadToUnpack(OpKernelConstruction* context) {
  TF_RETURN_IF_ERROR(ReadToPack(context));
  return ReadInt(context, "count", 0, kMaxLength, &count);
}

tensorflow::Status PackedCodes::PrepareToPack(OpKernelContext* context) {
  const Tensor& codes = context->input(0);
  if (codes.dims() < 1)
    return InvalidArgument("`codes` must have a last axis. Received: a scalar.");
  const int last = codes.dims() - 1;
  count = codes.dim_size(last);
  rows = 1;
  for (int i = 0; i < last; ++i) rows *= codes.dim_size(i);
  TensorShape shape = codes.shape();
  shape.set_dim(last, words());
  in = Words(codes);
  return Allocate(context, "words", shape, &out);
}

tensorflow::Status PackedCodes::PrepareToUnpack(OpKernelContext* context) {
  const Tensor& given = context->input(0);
  TF_RETURN_IF_ERROR(CheckShape("words", given, -1, words()));
  rows = given.dim_size(0);
  in = Words(given);
  return Allocate(context, "codes", TensorShape({rows, count}), &out);
}

tensorflow::Status WrittenBits::Read(OpKernelConstruction* context) {
  return ReadInt(context, "size", 0, kMaxLength, &size);
}

tensorflow::Status WrittenBits::Prepare(OpKernelContext* context) {
  const Tensor &given = context->input(0), &of_each = context->input(1);
  count = given.NumElements();
  TF_RETURN_IF_ERROR(CheckShape("codes", given, -2, count));
  TF_RETURN_IF_ERROR(CheckShape("lengths", of_each, -2, count));
  codes = given.flat<int64_t>().data();
  lengths = of_each.flat<int32_t>().data();
  return Allocate(context, "words", TensorShape({size}), &words);
}

tensorflow::Status BitmapOfPositions::Read(OpKernelConstruction* context) {
  return ReadInt(context, "size", 0, kMaxBitmapWords, &size);
}

tensorflow::Status BitmapOfPositions::Prepare(OpKernelContext* context) {
  const Tensor &given = context->input(0), *number;
  slots = given.NumElements();
  TF_RETURN_IF_ERROR(CheckShape("positions", given, -2, slots));
  TF_RETURN_IF_ERROR(Scalar(context, "count", &number));
  positions = Words(given);
  count = number->flat<int32_t>().data();
  return Allocate(context, "words", TensorShape({size}), &words);
}

tensorflow::Status PositionsOfBits::Read(OpKernelConstruction* context) {
  return ReadInt(context, "slots", 0, INT32_MAX, &slots);
}

tensorflow::Status PositionsOfBits::Prepare(OpKernelContext* context) {
  const Tensor& given = context->input(0);
  if (given.dims() != 2 || given.dim_size(1) > kMaxBitmapWords) {
    return InvalidArgument("`words` must have shape [rows, words], with at most ", kMaxBitmapWords,
                           " words. Received: ", given.shape().DebugString(), ".");
  }
  rows = given.dim_size(0);
  size = given.dim_size(1);
  words = Words(given);
  TF_RETURN_IF_ERROR(Allocate(context, "positions", TensorShape({rows, slots}), &positions));
  return Allocate(context, "counts", TensorShape({rows, 1}), &counts);
}

tensorflow::Status RiceCodes::ReadToEncode(OpKernelConstruction* context) {
  return ReadRice(context, &format);
}

tensorflow::Status RiceCodes::ReadToDecode(OpKernelConstruction* context) {
  TF_RETURN_IF_ERROR(ReadRice(context, &format));
  return ReadInt(context, "count", 0, INT32_MAX, &format.count);
}

tensorflow::Status RiceCodes::PrepareToEncode(OpKernelContext* context) {
  const Tensor& numbers = context->input(0);
  format.count = numbers.NumElements();
  TF_RETURN_IF_ERROR(CheckShape("numbers", numbers, -2, format.count));
  in = numbers.flat<int32_t>().data();
  return Allocate(context, "code", TensorShape({format.words()}), &out);
}

tensorflow::Status RiceCodes::PrepareToDecode(OpKernelContext* context) {
  const Tensor& codes = context->input(0);
  TF_RETURN_IF_ERROR(CheckShape("codes", codes, -1, format.words()));
  rows = codes.dim_size(0);
  in = codes.flat<int32_t>().data();
  return Allocate(context, "numbers", TensorShape({rows, format.count}), &out);
}

}  // namespace redsync
