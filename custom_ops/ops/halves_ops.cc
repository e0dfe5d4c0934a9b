#include "custom_ops/core/cpu/halves.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace redsync {

using ::tensorflow::shape_inference::DimensionHandle;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

namespace {

tensorflow::Status HalfEncodeShape(InferenceContext* c) {
  int tensors;
  int64_t blocks, elements = 0;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &tensors));
  TF_RETURN_IF_ERROR(c->GetAttr("blocks", &blocks));
  for (int i = 0; i < tensors; ++i) {
    const DimensionHandle size = c->NumElements(c->input(i));
    elements = elements < 0 || !c->ValueKnown(size) ? -1 : elements + c->Value(size);
    c->set_output(1 + i, c->input(i));
  }
  const DimensionHandle words =
      elements < 0 ? c->UnknownDim() : c->MakeDim(HalfWords(HalfBlock(elements, blocks)));
  c->set_output(0, c->Matrix(blocks, words));
  return tensorflow::OkStatus();
}

tensorflow::Status HalfReduceShape(InferenceContext* c) {
  ShapeHandle messages, rank;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &messages));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(c->num_inputs() - 1), 0, &rank));
  c->set_output(0, c->Vector(c->Dim(messages, 1)));
  for (int i = 1; i + 1 < c->num_inputs(); ++i) c->set_output(i, c->input(i));
  return tensorflow::OkStatus();
}

tensorflow::Status HalfDecodeShape(InferenceContext* c) {
  ShapeHandle checked;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &checked));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &checked));
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->Vector(c->UnknownDim()));
  return tensorflow::OkStatus();
}

}  // namespace

REGISTER_OP("RedsyncHalfEncode")
    .Input("values: N * float")
    .Input("residuals: M * float")
    .Output("messages: int32")
    .Output("errors: N * float")
    .Attr("N: int >= 1")
    .Attr("M: int >= 0")
    .Attr("dtype: {half, bfloat16}")
    .Attr("blocks: int >= 1")
    .SetShapeFn(HalfEncodeShape)
    .Doc(R"doc(
Rounds the elements of all tensors to 16 bits.

values: N tensors of any shapes. Their concatenation is a vector, which is cut into blocks.
residuals: None, or tensors in the shapes of `values` that are added to them.
messages: [blocks, words]: flag, two 16-bit floats per word. All zero if a rounded element is not
  finite.
errors: The rounding errors, in the shapes of `values`.
dtype: The 16-bit dtype.
blocks: The number of blocks. All have the same even length; the last one is padded with zeros.
)doc");

REGISTER_OP("RedsyncHalfReduce")
    .Input("messages: int32")
    .Input("errors: N * float")
    .Input("block: int32")
    .Output("message: int32")
    .Output("new_errors: N * float")
    .Attr("N: int >= 1")
    .Attr("dtype: {half, bfloat16}")
    .SetShapeFn(HalfReduceShape)
    .Doc(R"doc(
Sums a block's messages and errors, and rounds the sum.

messages: [workers, words], messages of RedsyncHalfEncode for one block.
errors: Errors of RedsyncHalfEncode.
block: Index of the block.
message: [words], the rounded sum. All zero if an element of it is not finite.
new_errors: `errors`, replaced in this block by the rounding errors of the sum.
dtype: As given to RedsyncHalfEncode.
)doc");

REGISTER_OP("RedsyncHalfDecode")
    .Input("messages: int32")
    .Input("sizes: int64")
    .Output("values: N * float")
    .Attr("N: int >= 1")
    .Attr("dtype: {half, bfloat16}")
    .SetShapeFn(HalfDecodeShape)
    .Doc(R"doc(
Decodes the messages of all blocks.

messages: [blocks, words].
sizes: [N], the number of elements of each tensor.
values: N vectors of these sizes.
dtype: As given to RedsyncHalfEncode.
)doc");

}  // namespace redsync
