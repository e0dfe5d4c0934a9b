#include "custom_ops/core/message_layout.h"
#include "custom_ops/kernels/select_args.h"
#include "custom_ops/ops/shape_support.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"

namespace redsync {

using ::tensorflow::shape_inference::DimensionHandle;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

namespace {

// Sets `words` to the words of the message, or unknown if `k` or a size is.
tensorflow::Status MessageWords(InferenceContext* c, const ::tensorflow::Tensor* k,
                                const std::vector<ShapeHandle>& shapes, DimensionHandle* words) {
  std::vector<bool> quantized;
  TF_RETURN_IF_ERROR(GetListAttr(c, "quantized", shapes.size(), &quantized));
  *words = c->UnknownDim();
  if (k == nullptr || k->NumElements() != static_cast<int64_t>(shapes.size())) {
    return ::tensorflow::OkStatus();
  }
  int64_t total = kHeaderWords;
  for (size_t i = 0; i < shapes.size(); ++i) {
    total += PartWords(quantized[i], k->flat<int32_t>()(i));
  }
  if (total > 0) *words = c->MakeDim(total);
  return ::tensorflow::OkStatus();
}

tensorflow::Status SelectShape(InferenceContext* c) {
  std::vector<ShapeHandle> grads, residuals, velocities;
  TF_RETURN_IF_ERROR(c->input("grads", &grads));
  TF_RETURN_IF_ERROR(c->input("residuals", &residuals));
  TF_RETURN_IF_ERROR(c->input("velocities", &velocities));
  TF_RETURN_IF_ERROR(CheckVelocities(c));
  if (residuals.size() != grads.size()) {
    return ::tensorflow::errors::InvalidArgument(
        "`residuals` must have one tensor per gradient. Received: ", residuals.size(),
        " residuals, ", grads.size(), " grads.");
  }
  const int n = grads.size();
  ShapeHandle unused;
  std::vector<ShapeHandle> of_tensor(n);
  for (int i = 0; i < n; ++i) {
    TF_RETURN_IF_ERROR(c->Merge(grads[i], residuals[i], &of_tensor[i]));
    if (!velocities.empty()) {
      TF_RETURN_IF_ERROR(c->Merge(of_tensor[i], velocities[i], &of_tensor[i]));
    }
  }
  const int k_input = grads.size() + residuals.size() + velocities.size();
  for (int i = 0; i < 2; ++i) {  // k and ratios
    TF_RETURN_IF_ERROR(c->WithRank(c->input(k_input + i), 1, &unused));
    DimensionHandle dim;
    TF_RETURN_IF_ERROR(c->WithValue(c->Dim(unused, 0), n, &dim));
  }
  for (int i = 2; i < 5; ++i) {  // scale, side and search
    TF_RETURN_IF_ERROR(c->WithRank(c->input(k_input + i), 0, &unused));
  }
  DimensionHandle words;
  TF_RETURN_IF_ERROR(MessageWords(c, c->input_tensor(k_input), of_tensor, &words));
  TF_RETURN_IF_ERROR(c->set_output("message", {c->Vector(words)}));
  TF_RETURN_IF_ERROR(c->set_output("new_residuals", of_tensor));
  int kept;
  TF_RETURN_IF_ERROR(c->GetAttr("U", &kept));
  if (kept == 0) of_tensor.clear();
  TF_RETURN_IF_ERROR(c->set_output("new_velocities", of_tensor));
  return c->set_output("new_ratios", {c->Vector(n)});
}

tensorflow::Status DecodeShape(InferenceContext* c) {
  std::vector<ShapeHandle> like;
  TF_RETURN_IF_ERROR(c->input("like", &like));
  ShapeHandle messages, k;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &messages));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &k));
  DimensionHandle words;
  TF_RETURN_IF_ERROR(MessageWords(c, c->input_tensor(1), like, &words));
  if (c->ValueKnown(words)) {
    TF_RETURN_IF_ERROR(c->Merge(c->Dim(messages, 1), words, &words));
  }
  return c->set_output("totals", like);
}

tensorflow::Status DescendShape(InferenceContext* context) {
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(context->Merge(context->input(1), context->input(2), &unused));
  return context->WithRank(context->input(3), 0, &unused);
}

tensorflow::Status DescendedShape(InferenceContext* context) {
  TF_RETURN_IF_ERROR(DescendShape(context));
  context->set_output(0, context->input(0));
  return tensorflow::OkStatus();
}

}  // namespace

REGISTER_OP("RedsyncAccumulateAndSelect")
    .Input("grads: T")
    .Input("residuals: N * float")
    .Input("velocities: M * float")
    .Input("k: int32")
    .Input("ratios: float")
    .Input("scale: float")
    .Input("side: int32")
    .Input("search: bool")
    .Output("message: int32")
    .Output("new_residuals: N * float")
    .Output("new_velocities: U * float")
    .Output("new_ratios: float")
    .Attr("T: list({float, bfloat16}) >= 1")
    .Attr("N: int >= 1")
    .Attr("M: int >= 0")
    .Attr("U: int >= 0")
    .Attr("selectors: list({'exact', 'trimmed', 'threshold', 'fixed'})")
    .Attr("quantized: list(bool)")
    .Attr("momentum: float = 0")
    .Attr("nesterov: bool = false")
    .Attr("masking: bool = true")
    .SetShapeFn(SelectShape)
    .Doc(R"doc(
Adds gradients to residuals and moves the largest elements into a message.

grads: Gradients, which are first multiplied by `scale` in float32. Buffers of float32 gradients,
  `residuals` and `velocities` are reused if no other op needs them.
residuals: Unsent sums of earlier steps, in the shapes of `grads`.
velocities: Velocities, in the shapes of `grads`; none if `momentum` is 0.
k: [N], number of elements to select, for the fixed selector at most. 1 <= k[i] <= elements of
  grads[i] (0 if it is empty).
ratios: [N], last ratios of the threshold search, -1 for none. For the fixed selector the threshold,
  >= 0.
scale: Factor of the gradients.
side: Sign that quantized tensors send, +1 or -1.
search: Whether to search thresholds again, or else try `ratios` first.
message: Flag (1 finite, 0 not), then per tensor [count, index * k, value * k], or if quantized
  [count, mean, index * k]. Floats are bit-cast. All zero if an accumulated
  element is not finite or has a magnitude of 2^96 or more.
new_residuals: Accumulated residuals, zero where selected.
new_velocities: Accumulated velocities, zero where selected if `masking`; none to discard them.
new_ratios: Ratios for the next step.
)doc");

REGISTER_OP("RedsyncDecode")
    .Input("messages: int32")
    .Input("k: int32")
    .Input("like: N * float")
    .Output("totals: N * float")
    .Attr("N: int >= 1")
    .Attr("quantized: list(bool)")
    .SetShapeFn(DecodeShape)
    .Doc(R"doc(
Sums the messages of all workers, rank by rank.

messages: [workers, words]; rows are results of RedsyncAccumulateAndSelect.
k: As given to RedsyncAccumulateAndSelect, [N].
like: Tensors in the shapes of the totals; their buffers are reused if no other op needs them.
totals: Sums over the workers.
)doc");

REGISTER_OP("RedsyncDescend")
    .Input("variable: resource")
    .Input("indices: float")
    .Input("values: float")
    .Input("learning_rate: float")
    .SetIsStateful()
    .SetShapeFn(DescendShape)
    .Doc(R"doc(
Applies `variable -= learning_rate * values` at `indices`, in the order of the entries.

variable: float32 variable of any shape.
indices: Positions in the flattened variable, the bits of unsigned integers. They may repeat.
values: The direction of the descent, in the shape of `indices`.
learning_rate: Scalar.
)doc");

REGISTER_OP("RedsyncDescended")
    .Input("start: float")
    .Input("indices: float")
    .Input("values: float")
    .Input("learning_rate: float")
    .Output("result: float")
    .SetShapeFn(DescendedShape)
    .Doc(R"doc(
Returns `start`, minus `learning_rate * values` at `indices`, in the order of the entries.

start: Tensor of any shape; the result reuses its buffer if no other op needs it.
indices: Positions in the flattened tensor, the bits of unsigned integers. They may repeat.
values: The direction of the descent, in the shape of `indices`.
learning_rate: Scalar.
result: Tensor in the shape of `start`.
)doc");

}  // namespace redsync
