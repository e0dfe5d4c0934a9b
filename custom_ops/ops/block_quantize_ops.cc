#include "custom_ops/kernels/block_quantize_args.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace redsync {

using ::tensorflow::shape_inference::DimensionHandle;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

namespace {

// Sets `words` to the words of a row's message, or unknown if the row's size is.
tensorflow::Status BlockWords(InferenceContext* c, DimensionHandle size, DimensionHandle* words) {
  BlockFormat format;
  TF_RETURN_IF_ERROR(ReadBlockFormat(c, &format));
  *words = c->UnknownDim();
  if (!c->ValueKnown(size)) return ::tensorflow::OkStatus();
  TF_RETURN_IF_ERROR(CheckRowSize(c->Value(size)));
  *words = c->MakeDim(format.words(c->Value(size)));
  return ::tensorflow::OkStatus();
}

tensorflow::Status BlockQuantizeShape(InferenceContext* c) {
  ShapeHandle values;
  DimensionHandle words;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &values));
  TF_RETURN_IF_ERROR(BlockWords(c, c->Dim(values, 1), &words));
  TF_RETURN_IF_ERROR(c->set_output("messages", {c->Matrix(c->Dim(values, 0), words)}));
  return c->set_output("errors", {values});
}

tensorflow::Status BlockDequantizeShape(InferenceContext* c) {
  ShapeHandle messages, unused;
  DimensionHandle size, words;
  bool sum;
  TF_RETURN_IF_ERROR(c->GetAttr("sum", &sum));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &messages));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &unused));
  TF_RETURN_IF_ERROR(c->MakeDimForScalarInput(1, &size));
  TF_RETURN_IF_ERROR(BlockWords(c, size, &words));
  TF_RETURN_IF_ERROR(c->Merge(c->Dim(messages, 1), words, &words));
  return c->set_output("values", {sum ? c->Vector(size) : c->Matrix(c->Dim(messages, 0), size)});
}

}  // namespace

REGISTER_OP("RedsyncBlockQuantize")
    .Input("values: float")
    .Output("messages: int32")
    .Output("errors: float")
    .Attr("bits: int")
    .Attr("block: int")
    .SetShapeFn(BlockQuantizeShape)
    .Doc(R"doc(
Quantizes rows to numbers of a few bits with a shared scale per block.

values: [rows, size]; size is a multiple of 32.
messages: [rows, words]: flag, scales (two bfloat16 in a word), codes. All zero if an element is not
  finite or has a magnitude of 2^126 or more.
errors: values - decoded.
bits: 8, 4 or 2.
block: Elements that share a scale, a multiple of 32.
)doc");

REGISTER_OP("RedsyncBlockDequantize")
    .Input("messages: int32")
    .Input("size: int64")
    .Output("values: float")
    .Attr("bits: int")
    .Attr("block: int")
    .Attr("sum: bool")
    .SetShapeFn(BlockDequantizeShape)
    .Doc(R"doc(
Decodes messages of RedsyncBlockQuantize.

messages: [rows, words].
size: Elements of a row.
values: [rows, size]; with `sum` [size].
sum: Whether to sum the rows, in their order.
)doc");

}  // namespace redsync
