#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace redsync {

using ::tensorflow::shape_inference::InferenceContext;

namespace {

tensorflow::Status AllFiniteShape(InferenceContext* context) {
  context->set_output(0, context->Vector(context->num_inputs()));
  return tensorflow::OkStatus();
}

}  // namespace

REGISTER_OP("RedsyncAllFinite")
    .Input("tensors: T")
    .Output("finite: bool")
    .Attr("T: list({float, double, half, bfloat16}) >= 1")
    .SetShapeFn(AllFiniteShape)
    .Doc(R"doc(
Returns which tensors have only finite elements.

tensors: N tensors of any shape.
finite: [N].
)doc");

}  // namespace redsync
