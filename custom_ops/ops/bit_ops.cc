#include "custom_ops/core/cpu/bits.h"
#include "custom_ops/ops/shape_support.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace redsync {

using ::tensorflow::shape_inference::DimensionHandle;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

namespace {

constexpr int64_t kMaxLength = INT64_MAX / 64;

tensorflow::Status PackBitsShape(InferenceContext* c) {
  int64_t bits;
  ShapeHandle codes;
  TF_RETURN_IF_ERROR(GetIntAttr(c, "bits", kMaxCodeBits, &bits));
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &codes));
  const DimensionHandle count = c->Dim(codes, -1);
  const DimensionHandle words =
      c->ValueKnown(count) ? c->MakeDim(PackedWords(c->Value(count), bits)) : c->UnknownDim();
  TF_RETURN_IF_ERROR(c->ReplaceDim(codes, -1, words, &codes));
  return c->set_output("words", {codes});
}

tensorflow::Status UnpackBitsShape(InferenceContext* c) {
  int64_t bits, count;
  ShapeHandle words;
  TF_RETURN_IF_ERROR(GetIntAttr(c, "bits", kMaxCodeBits, &bits));
  TF_RETURN_IF_ERROR(GetIntAttr(c, "count", kMaxLength, &count));
  TF_RETURN_IF_ERROR(
      c->Merge(c->input(0), c->Matrix(c->UnknownDim(), PackedWords(count, bits)), &words));
  return c->set_output("codes", {c->Matrix(c->Dim(words, 0), count)});
}

tensorflow::Status WriteBitsShape(InferenceContext* c) {
  int64_t size;
  ShapeHandle codes;
  TF_RETURN_IF_ERROR(GetIntAttr(c, "size", kMaxLength, &size));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &codes));
  TF_RETURN_IF_ERROR(c->Merge(codes, c->input(1), &codes));
  return c->set_output("words", {c->Vector(size)});
}

tensorflow::Status BitmapShape(InferenceContext* c) {
  int64_t size;
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(GetIntAttr(c, "size", kMaxBitmapWords, &size));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &unused));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &unused));
  return c->set_output("words", {c->Vector(size)});
}

tensorflow::Status SetBitsShape(InferenceContext* c) {
  int64_t slots;
  ShapeHandle words;
  TF_RETURN_IF_ERROR(GetIntAttr(c, "slots", INT32_MAX, &slots));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &words));
  const DimensionHandle size = c->Dim(words, 1);
  if (c->ValueKnown(size) && c->Value(size) > kMaxListedWords) {
    return ::tensorflow::errors::InvalidArgument("`words` must have at most ", kMaxListedWords,
                                                 " words. Received: ", c->Value(size), ".");
  }
  TF_RETURN_IF_ERROR(c->set_output("positions", {c->Matrix(c->Dim(words, 0), slots)}));
  return c->set_output("counts", {c->Matrix(c->Dim(words, 0), 1)});
}

tensorflow::Status RiceEncodeShape(InferenceContext* c) {
  int64_t rice, bitmap;
  ShapeHandle numbers;
  TF_RETURN_IF_ERROR(GetIntAttr(c, "rice", kMaxRice, &rice));
  TF_RETURN_IF_ERROR(GetIntAttr(c, "bitmap_words", kMaxBitmapWords, &bitmap));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &numbers));
  const DimensionHandle count = c->Dim(numbers, 0);
  if (!c->ValueKnown(count)) return c->set_output("code", {c->Vector(c->UnknownDim())});
  return c->set_output("code", {c->Vector(PackedWords(c->Value(count), rice) + bitmap)});
}

tensorflow::Status RiceDecodeShape(InferenceContext* c) {
  int64_t rice, bitmap, count;
  ShapeHandle codes;
  TF_RETURN_IF_ERROR(GetIntAttr(c, "rice", kMaxRice, &rice));
  TF_RETURN_IF_ERROR(GetIntAttr(c, "bitmap_words", kMaxBitmapWords, &bitmap));
  TF_RETURN_IF_ERROR(GetIntAttr(c, "count", INT32_MAX, &count));
  TF_RETURN_IF_ERROR(
      c->Merge(c->input(0), c->Matrix(c->UnknownDim(), PackedWords(count, rice) + bitmap), &codes));
  return c->set_output("numbers", {c->Matrix(c->Dim(codes, 0), count)});
}

}  // namespace

REGISTER_OP("RedsyncPackBits")
    .Input("codes: int32")
    .Output("words: int32")
    .Attr("bits: int >= 0")
    .SetShapeFn(PackBitsShape)
    .Doc(R"doc(
Concatenates codes of a fixed number of bits, the low bit first.

codes: [..., count].
words: [..., ceil(count * bits / 32)].
bits: Number of low bits of a code to write, at most 32.
)doc");

REGISTER_OP("RedsyncUnpackBits")
    .Input("words: int32")
    .Output("codes: int32")
    .Attr("bits: int >= 0")
    .Attr("count: int >= 0")
    .SetShapeFn(UnpackBitsShape)
    .Doc(R"doc(
Inverse of RedsyncPackBits.

words: [rows, ceil(count * bits / 32)].
codes: [rows, count].
)doc");

REGISTER_OP("RedsyncWriteBits")
    .Input("codes: int64")
    .Input("lengths: int32")
    .Output("words: int32")
    .Attr("size: int >= 0")
    .SetShapeFn(WriteBitsShape)
    .Doc(R"doc(
Concatenates codes of variable length, the low bit first.

codes: [count].
lengths: Number of low bits of each code to write, in [0, 32].
words: [size]; bits beyond are dropped.
)doc");

REGISTER_OP("RedsyncBitmap")
    .Input("positions: int32")
    .Input("count: int32")
    .Output("words: int32")
    .Attr("size: int >= 0")
    .SetShapeFn(BitmapShape)
    .Doc(R"doc(
Returns a bitmap in which the bits at `positions` are set.

positions: [slots]; the first `count` ascend in [0, 32 * size).
count: Number of positions, a scalar.
words: [size]; bit t is bit t mod 32 of word t div 32.
)doc");

REGISTER_OP("RedsyncSetBits")
    .Input("words: int32")
    .Output("positions: int32")
    .Output("counts: int32")
    .Attr("slots: int >= 0")
    .SetShapeFn(SetBitsShape)
    .Doc(R"doc(
Returns the positions of set bits.

words: [rows, words].
positions: [rows, slots], the first `slots` positions, ascending; 0 after the last one.
counts: [rows, 1], the number of set bits, which may exceed `slots`.
)doc");

REGISTER_OP("RedsyncRiceEncode")
    .Input("numbers: int32")
    .Output("code: int32")
    .Attr("rice: int >= 0")
    .Attr("bitmap_words: int >= 0")
    .SetShapeFn(RiceEncodeShape)
    .Doc(R"doc(
Encodes signed integers by Rice codes: all low bits, then all high bits in unary.

numbers: [count]; their zigzag numbers z are 2 x if x >= 0, else -2 x - 1.
code: The low `rice` bits of each z; then a bitmap of z >> rice zeros and a one for each.
bitmap_words: Words of the bitmap.
)doc");

REGISTER_OP("RedsyncRiceDecode")
    .Input("codes: int32")
    .Output("numbers: int32")
    .Attr("rice: int >= 0")
    .Attr("bitmap_words: int >= 0")
    .Attr("count: int >= 0")
    .SetShapeFn(RiceDecodeShape)
    .Doc(R"doc(
Decodes RedsyncRiceEncode of all workers.

codes: [workers, words].
numbers: [workers, count]; zeros if the bitmap has no ones.
)doc");

}  // namespace redsync
