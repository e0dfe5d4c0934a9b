#include "custom_ops/core/cpu/halves.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace redsync {

using ::tensorflow::shape_inference::DimensionHandle;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

namespace {

tensorflow::Status HalfEncodeShape(InferenceContext* c) {
  ShapeHandle values;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &values));
  const DimensionHandle size = c->Dim(values, 1);
  const DimensionHandle words =
      c->ValueKnown(size) ? c->MakeDim(HalfWords(c->Value(size))) : c->UnknownDim();
  TF_RETURN_IF_ERROR(c->set_output("messages", {c->Matrix(c->Dim(values, 0), words)}));
  return c->set_output("errors", {values});
}

tensorflow::Status HalfDecodeShape(InferenceContext* c) {
  ShapeHandle messages;
  bool sum;
  TF_RETURN_IF_ERROR(c->GetAttr("sum", &sum));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &messages));
  const DimensionHandle words = c->Dim(messages, 1);
  const DimensionHandle size =
      c->ValueKnown(words) ? c->MakeDim(2 * (c->Value(words) - 1)) : c->UnknownDim();
  return c->set_output("values", {sum ? c->Vector(size) : c->Matrix(c->Dim(messages, 0), size)});
}

}  // namespace

REGISTER_OP("RedsyncHalfEncode")
    .Input("values: float")
    .Output("messages: int32")
    .Output("errors: float")
    .Attr("dtype: {half, bfloat16}")
    .SetShapeFn(HalfEncodeShape)
    .Doc(R"doc(
Rounds rows to numbers of 16 bits.

values: [rows, size]; size is even.
messages: [rows, words]: flag, two numbers in a word. All zero if a rounded element is not finite.
errors: values - decoded.
dtype: The type of the numbers.
)doc");

REGISTER_OP("RedsyncHalfDecode")
    .Input("messages: int32")
    .Output("values: float")
    .Attr("dtype: {half, bfloat16}")
    .Attr("sum: bool")
    .SetShapeFn(HalfDecodeShape)
    .Doc(R"doc(
Decodes messages of RedsyncHalfEncode.

messages: [rows, words].
values: [rows, size]; or their sums over the rows, [size].
dtype: As given to RedsyncHalfEncode.
sum: Whether rows are added up, in their order.
)doc");

}  // namespace redsync
