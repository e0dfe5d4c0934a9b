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
Replaces the flag of each message by a seal, the flag and a checksum in one word.

messages: [rows, words]; word 0 is the finite flag, 0 or 1.
sealed: [rows, words]; only word 0 differs, the seal of the flag and the other words.
)doc");

REGISTER_OP("RedsyncOpen")
    .Input("sealed: int32")
    .Input("senders: int32")
    .Input("receiver: int32")
    .Output("messages: int32")
    .SetShapeFn(OpenShape)
    .Doc(R"doc(
Inverse of RedsyncSeal; InvalidArgument if a message is corrupted.

sealed: [rows, words].
senders: [rows], the rank of each row's sender, for the error. A row with a negative rank has no
  sender and is not changed.
receiver: Scalar, the rank of this worker.
messages: [rows, words], the messages with their flags.
)doc");

REGISTER_OP("RedsyncSealVariables")
    .Input("variables: N * resource")
    .Output("seals: int32")
    .Attr("N: int >= 1")
    .SetIsStateful()
    .SetShapeFn(SealVariablesShape)
    .Doc(R"doc(
Returns the seal of a message with flag 1 and the bits of a variable, for each variable.

variables: N variables whose elements have 32 or 64 bits.
seals: [N].
)doc");

}  // namespace redsync
