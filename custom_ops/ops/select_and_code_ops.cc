#include <vector>

#include "custom_ops/core/cpu/bits.h"
#include "custom_ops/core/cpu/golomb.h"
#include "custom_ops/core/cpu/levels.h"
#include "custom_ops/core/message_layout.h"
#include "custom_ops/kernels/select_args.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace redsync {

using ::tensorflow::errors::InvalidArgument;
using ::tensorflow::shape_inference::DimensionHandle;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

namespace {

// Sets `words` to the words of the codes of positions, or unknown if a shape is unknown or the
// kernel refuses an attribute.
tensorflow::Status PositionWords(InferenceContext* c, const std::vector<ShapeHandle>& grads,
                                 const std::vector<int64_t>& k, const std::vector<int64_t>& streams,
                                 const std::vector<int64_t>& rice, DimensionHandle* words) {
  *words = c->UnknownDim();
  std::vector<int64_t> sizes(rice.size()), slots(rice.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    const int64_t s = streams[i];
    if (s < 0 || s >= static_cast<int64_t>(rice.size()) || !c->FullyDefined(grads[i])) {
      return ::tensorflow::OkStatus();
    }
    sizes[s] += c->Value(c->NumElements(grads[i]));
    slots[s] += k[i];
  }
  int64_t total = 0;
  for (size_t s = 0; s < rice.size(); ++s) {
    if (rice[s] < 0 || rice[s] > kMaxRice || slots[s] > sizes[s]) return ::tensorflow::OkStatus();
    const GolombFormat format = {sizes[s], slots[s], static_cast<int>(rice[s])};
    total += format.part_words();
  }
  *words = c->MakeDim(total);
  return ::tensorflow::OkStatus();
}

tensorflow::Status SelectAndCodeShape(InferenceContext* c) {
  std::vector<ShapeHandle> grads, residuals, velocities;
  std::vector<int64_t> k, streams, rice;
  int64_t bits;
  float epsilon;
  TF_RETURN_IF_ERROR(c->GetAttr("epsilon", &epsilon));
  TF_RETURN_IF_ERROR(c->input("grads", &grads));
  TF_RETURN_IF_ERROR(c->input("residuals", &residuals));
  TF_RETURN_IF_ERROR(c->input("velocities", &velocities));
  TF_RETURN_IF_ERROR(CheckVelocities(c, epsilon != 0));
  TF_RETURN_IF_ERROR(c->GetAttr("k", &k));
  TF_RETURN_IF_ERROR(c->GetAttr("streams", &streams));
  TF_RETURN_IF_ERROR(c->GetAttr("rice", &rice));
  TF_RETURN_IF_ERROR(c->GetAttr("value_bits", &bits));
  if (residuals.size() != grads.size() || k.size() != grads.size() || streams.size() != k.size()) {
    return InvalidArgument(
        "`residuals`, `k` and `streams` must have one entry per gradient. Received: ",
        residuals.size(), " residuals, ", k.size(), " k, ", streams.size(), " streams, ",
        grads.size(), " grads.");
  }
  for (size_t i = 0; i < grads.size(); ++i) {
    TF_RETURN_IF_ERROR(c->Merge(grads[i], residuals[i], &grads[i]));
    if (!velocities.empty()) TF_RETURN_IF_ERROR(c->Merge(grads[i], velocities[i], &grads[i]));
  }
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(c->num_inputs() - 2), 0, &unused));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(c->num_inputs() - 1), 2, &unused));
  if (bits > kMaxLevelBits && bits != kHalfBits) {
    return InvalidArgument("`value_bits` must be in [1, ", kMaxLevelBits, "] or ", kHalfBits,
                           ". Received: value_bits=", bits, ".");
  }
  DimensionHandle positions;
  TF_RETURN_IF_ERROR(PositionWords(c, grads, k, streams, rice, &positions));
  int64_t words = kHeaderWords, slots = 0;
  for (const int64_t of_tensor : k) {
    if (of_tensor < 0) return InvalidArgument("`k` must be >= 0. Received: ", of_tensor, ".");
    slots += of_tensor;
    words += bits == kHalfBits ? CeilDiv(of_tensor, 2) : LevelCount(static_cast<int>(bits));
  }
  if (bits != kHalfBits) words += PackedWords(slots, bits);
  DimensionHandle all;
  TF_RETURN_IF_ERROR(c->Add(positions, words, &all));
  TF_RETURN_IF_ERROR(c->set_output("message", {c->Vector(all)}));
  TF_RETURN_IF_ERROR(c->set_output("new_residuals", grads));
  int kept;
  TF_RETURN_IF_ERROR(c->GetAttr("U", &kept));
  if (kept == 0) grads.clear();
  return c->set_output("new_velocities", grads);
}

tensorflow::Status UncodeShape(InferenceContext* c) {
  std::vector<int64_t> k;
  ShapeHandle messages;
  TF_RETURN_IF_ERROR(c->GetAttr("k", &k));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &messages));
  int64_t words = kHeaderWords;
  for (const int64_t of_tensor : k) words += PartWords(false, of_tensor);
  return c->set_output("plain", {c->Matrix(c->Dim(messages, 0), words)});
}

}  // namespace

REGISTER_OP("RedsyncSelectAndCode")
    .Input("grads: T")
    .Input("residuals: N * float")
    .Input("velocities: M * float")
    .Input("scale: float")
    .Input("adam: float")
    .Output("message: int32")
    .Output("new_residuals: N * float")
    .Output("new_velocities: U * float")
    .Attr("T: list({float, bfloat16}) >= 1")
    .Attr("N: int >= 1")
    .Attr("M: int >= 0")
    .Attr("U: int >= 0")
    .Attr("k: list(int)")
    .Attr("streams: list(int)")
    .Attr("rice: list(int)")
    .Attr("value_bits: int >= 1 = 1")
    .Attr("momentum: float = 0")
    .Attr("nesterov: bool = false")
    .Attr("masking: bool = true")
    .Attr("epsilon: float = 0")
    .SetShapeFn(SelectAndCodeShape)
    .Doc(R"doc(
Adds gradients to residuals, and moves the largest elements into a coded message.

grads: Gradients, which are first multiplied by `scale` in float32. Buffers of float32 gradients,
  `residuals` and `velocities` are reused if no other op needs them.
residuals: Unsent sums of earlier steps, in the shapes of `grads`.
velocities: Velocities, in the shapes of `grads`; none if `momentum` is 0. With `epsilon`, Adam's
  second moments u, and residuals v get Adam's updates of t = scale grads, on CPUs only:
  u' = keep u + gain t^2, v' = v + t / (sqrt(keep u + own t^2) + epsilon).
scale: Factor of the gradients.
adam: For each tensor a row of keep, gain and own, with own <= gain; none without `epsilon`.
message: Flag (1 finite, 0 not), a Golomb code [count, low bits, bitmap] for each stream of
  positions, with capacity for any positions, and values: magnitudes of each tensor and a code of
  `value_bits` bits for each of k values, or, with 16 bits, bfloat16 values of each tensor. All zero
  if an accumulated element is not finite or has a magnitude of 2^96 or more, or a u' is infinite.
new_residuals: Accumulated residuals, minus the decoded values where selected.
new_velocities: Accumulated velocities, zero where selected if `masking`; none to discard them.
k: Number of elements to select; 1 <= k[i] <= elements of grads[i] (0 if it is empty).
streams: Index of the stream of the positions in grads[i], in [0, length of `rice`).
rice: For each stream, number of low bits of a gap, which are sent verbatim.
value_bits: 1 to 4, a sign and one of 2^(value_bits - 1) magnitudes; or 16.
)doc");

REGISTER_OP("RedsyncUncode")
    .Input("messages: int32")
    .Output("plain: int32")
    .Attr("sizes: list(int)")
    .Attr("k: list(int)")
    .Attr("streams: list(int)")
    .Attr("rice: list(int)")
    .Attr("value_bits: int >= 1 = 1")
    .SetShapeFn(UncodeShape)
    .Doc(R"doc(
Decodes coded messages to plain ones, the input of RedsyncDecode.

messages: [workers, words]; rows are messages of RedsyncSelectAndCode.
plain: Flag and, for each tensor, [count, index * k, value * k]; [workers, words].
sizes: Elements of each tensor.
k: As given to RedsyncSelectAndCode, like the other attributes.
)doc");

}  // namespace redsync
