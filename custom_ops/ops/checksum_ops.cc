#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace redsync {

using ::tensorflow::shape_inference::DimensionHandle;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

namespace {

tensorflow::Status SealShape(InferenceContext* c) {
  ShapeHandle messages;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &messages));
  return c->set_output("sealed", {messages});
}

tensorflow::Status OpenShape(InferenceContext* c) {
  ShapeHandle sealed, senders, unused;
  DimensionHandle rows;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &sealed));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &senders));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 0, &unused));
  TF_RETURN_IF_ERROR(c->Merge(c->Dim(sealed, 0), c->Dim(senders, 0), &rows));
  TF_RETURN_IF_ERROR(c->ReplaceDim(sealed, 0, rows, &sealed));
  return c->set_output("messages", {sealed});
}

tensorflow::Status SealVariablesShape(InferenceContext* c) {
  c->set_output(0, c->Vector(c->num_inputs()));
  return tensorflow::OkStatus();
}

}  // namespace

REGISTER_OP("RedsyncSeal")
    .Input("messages: int32")
    .Output("sealed: int32")
    .SetShapeFn(SealShape)
    .Doc(R"doc(
Puts a checksum into the flag of each message.

messages: [rows, words]; word 0 is the finite flag, 0 or 1.
sealed: The same, but for word 0, the flag and the checksum of the other words in one.
)doc");

REGISTER_OP("RedsyncOpen")
    .Input("sealed: int32")
    .Input("senders: int32")
    .Input("receiver: int32")
    .Output("messages: int32")
    .SetShapeFn(OpenShape)
    .Doc(R"doc(
Undoes RedsyncSeal; InvalidArgument if a message is not what was sealed.

sealed: [rows, words].
senders: [rows], the rank of each one's sender, for the error. A row of a rank below 0 comes from
  nobody, and is left as it is.
receiver: Scalar, the rank of this worker.
messages: What was sealed.
)doc");

REGISTER_OP("RedsyncSealVariables")
    .Input("variables: N * resource")
    .Output("seals: int32")
    .Attr("N: int >= 1")
    .SetIsStateful()
    .SetShapeFn(SealVariablesShape)
    .Doc(R"doc(
Returns word 0 that RedsyncSeal gives to a message of flag 1 and the bits of a variable.

variables: N variables whose elements have 32 or 64 bits.
seals: [N].
)doc");

}  // namespace redsync
