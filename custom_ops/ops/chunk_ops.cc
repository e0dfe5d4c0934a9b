#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace redsync {

using ::tensorflow::errors::InvalidArgument;
using ::tensorflow::shape_inference::DimensionHandle;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

namespace {

tensorflow::Status ChunkedTopKShape(InferenceContext* c) {
  int64_t k;
  ShapeHandle chunks;
  TF_RETURN_IF_ERROR(c->GetAttr("k", &k));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &chunks));
  const DimensionHandle size = c->Dim(chunks, 1);
  if (k < 0 || k > INT32_MAX || (c->ValueKnown(size) && k > c->Value(size))) {
    return InvalidArgument("`k` must be in [0, size of a chunk]. Received: k=", k, ", chunks of ",
                           c->DebugString(chunks), ".");
  }
  const ShapeHandle shape = c->Matrix(c->Dim(chunks, 0), k);
  TF_RETURN_IF_ERROR(c->set_output("positions", {shape}));
  return c->set_output("values", {shape});
}

}  // namespace

REGISTER_OP("RedsyncChunkedTopK")
    .Input("chunks: float")
    .Output("positions: int32")
    .Output("values: float")
    .Attr("k: int >= 0")
    .SetShapeFn(ChunkedTopKShape)
    .Doc(R"doc(
Selects the elements of largest magnitude of every chunk, the first ones among equals.

chunks: [chunks, size].
positions: [chunks, k], in the chunk, ascending.
values: [chunks, k].
)doc");

}  // namespace redsync
