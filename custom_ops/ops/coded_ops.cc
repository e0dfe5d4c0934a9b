#include <vector>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace redsync {

using ::tensorflow::Status;
using ::tensorflow::errors::InvalidArgument;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

namespace {

constexpr int kMaxLevelBits = 4, kHalfBits = 16;  // As in core/cpu/levels.h.

Status SelectAndCodeShape(InferenceContext* c) {
  std::vector<ShapeHandle> grads, residuals, velocities;
  float momentum;
  std::vector<int64_t> k;
  int64_t code_words, bits;
  TF_RETURN_IF_ERROR(c->input("grads", &grads));
  TF_RETURN_IF_ERROR(c->input("residuals", &residuals));
  TF_RETURN_IF_ERROR(c->input("velocities", &velocities));
  TF_RETURN_IF_ERROR(c->GetAttr("momentum", &momentum));
  TF_RETURN_IF_ERROR(c->GetAttr("k", &k));
  TF_RETURN_IF_ERROR(c->GetAttr("code_words", &code_words));
  TF_RETURN_IF_ERROR(c->GetAttr("value_bits", &bits));
  if (k.size() != grads.size() || velocities.size() != (momentum == 0 ? 0 : grads.size())) {
    return InvalidArgument(
        "`k`, and `velocities` if momentum is used, must have one entry per gradient. Received: ",
        k.size(), " k, ", velocities.size(), " velocities, ", grads.size(),
        " grads, momentum=", momentum, ".");
  }
  for (size_t i = 0; i < grads.size(); ++i) {
    TF_RETURN_IF_ERROR(c->Merge(grads[i], residuals[i], &grads[i]));
    if (!velocities.empty()) TF_RETURN_IF_ERROR(c->Merge(grads[i], velocities[i], &grads[i]));
  }
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(c->num_inputs() - 1), 0, &unused));
  if (bits > kMaxLevelBits && bits != kHalfBits) {
    return InvalidArgument("`value_bits` must be in [1, ", kMaxLevelBits, "] or ", kHalfBits,
                           ". Received: value_bits=", bits, ".");
  }
  int64_t words = 3 + code_words, slots = 0;
  for (const int64_t of_tensor : k) {
    if (of_tensor < 0) return InvalidArgument("`k` must be >= 0. Received: ", of_tensor, ".");
    slots += of_tensor;
    words += bits == kHalfBits ? (of_tensor + 1) / 2 : int64_t{1} << (bits - 1);
  }
  if (bits != kHalfBits) words += (slots * bits + 31) / 32;
  TF_RETURN_IF_ERROR(c->set_output("message", {c->Vector(words)}));
  TF_RETURN_IF_ERROR(c->set_output("new_residuals", grads));
  if (velocities.empty()) grads.clear();
  return c->set_output("new_velocities", grads);
}

}  // namespace

REGISTER_OP("RedsyncSelectAndCode")
    .Input("grads: N * float")
    .Input("residuals: N * float")
    .Input("velocities: M * float")
    .Input("scale: float")
    .Output("message: int32")
    .Output("new_residuals: N * float")
    .Output("new_velocities: M * float")
    .Attr("N: int >= 1")
    .Attr("M: int >= 0")
    .Attr("k: list(int)")
    .Attr("rice: int >= 0")
    .Attr("code_words: int >= 0")
    .Attr("value_bits: int >= 1 = 1")
    .Attr("momentum: float = 0")
    .Attr("nesterov: bool = false")
    .Attr("masking: bool = true")
    .SetShapeFn(SelectAndCodeShape)
    .Doc(R"doc(
Adds gradients to residuals, and moves the largest elements, coded, into a message.

grads: Gradients, multiplied by `scale` before anything else. Their buffers are reused if nothing else
  needs them; so are those of `residuals` and `velocities`.
residuals: What earlier steps have not sent; of the shapes of `grads`.
velocities: Momentum; of the shapes of `grads`, or none if `momentum` is 0.
scale: Factor of the gradients.
message: Flag (1 finite, 0 not), then [positions, bits used, words] of one Golomb code for the
  positions in all tensors, then values: magnitudes for each tensor and a code of `value_bits` bits for
  each of k values, or for 16 bits, bfloat16 values of each tensor. All zero if anything is not finite.
new_residuals: Accumulated residuals, where selected without what the codes stand for.
new_velocities: Accumulated velocities, zero where selected if `masking`.
k: Elements to select; 1 <= k[i] <= elements of grads[i] (0 if it is empty).
rice: Bits of a gap between positions that are sent as they are.
code_words: Words for the code of the positions; those that do not fit wait in the residual.
value_bits: 1 to 4, a sign and one of 2^(value_bits - 1) magnitudes; or 16.
)doc");

}  // namespace redsync
