#include "custom_ops/kernels/quantize_args.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace redsync {

using ::tensorflow::shape_inference::DimensionHandle;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

namespace {

// Sets `words` to the words of a message [flag, scales.., codes..], or unknown if a size is.
tensorflow::Status QuantizedWords(InferenceContext* c, const std::vector<ShapeHandle>& shapes,
                                  DimensionHandle* words) {
  QuantizeFormat format;
  TF_RETURN_IF_ERROR(ReadFormat(c, &format));
  int64_t total = kHeaderWords;
  *words = c->UnknownDim();
  for (const ShapeHandle& shape : shapes) {
    if (!c->FullyDefined(shape)) return ::tensorflow::OkStatus();
    int64_t size = 1;
    for (int d = 0; d < c->Rank(shape); ++d) size *= c->Value(c->Dim(shape, d));
    total += format.scales(size) + format.words(size);
  }
  *words = c->MakeDim(total);
  return ::tensorflow::OkStatus();
}

tensorflow::Status QuantizeShape(InferenceContext* c) {
  std::vector<ShapeHandle> tensors;
  TF_RETURN_IF_ERROR(c->input("tensors", &tensors));
  int n = tensors.size(), errors;
  TF_RETURN_IF_ERROR(c->GetAttr("M", &errors));
  if (errors != 0 && errors != n) {
    return ::tensorflow::errors::InvalidArgument("`M` must be 0 or ", n, ". Received: M=", errors);
  }
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(n), 1, &unused));
  TF_RETURN_IF_ERROR(c->Merge(c->input(n + 1), c->Vector(3), &unused));
  DimensionHandle words;
  TF_RETURN_IF_ERROR(QuantizedWords(c, tensors, &words));
  TF_RETURN_IF_ERROR(c->set_output("message", {c->Vector(words)}));
  if (errors == 0) tensors.clear();
  return c->set_output("errors", tensors);
}

tensorflow::Status DequantizeShape(InferenceContext* c) {
  std::vector<ShapeHandle> like;
  TF_RETURN_IF_ERROR(c->input("like", &like));
  ShapeHandle messages;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &messages));
  DimensionHandle words;
  TF_RETURN_IF_ERROR(QuantizedWords(c, like, &words));
  TF_RETURN_IF_ERROR(c->Merge(c->Dim(messages, 1), words, &words));
  return c->set_output("totals", like);
}

}  // namespace

REGISTER_OP("RedsyncQuantize")
    .Input("tensors: N * float")
    .Input("scales: float")
    .Input("stream: int32")
    .Output("message: int32")
    .Output("errors: M * float")
    .Attr("N: int >= 1")
    .Attr("M: int >= 0")
    .Attr("mode: {'sign', 'two_level', 'threshold', 'stochastic', 'uniform', 'natural'}")
    .Attr("levels: int = 1")
    .Attr("bucket_size: int = 0")
    .SetShapeFn(QuantizeShape)
    .Doc(R"doc(
Quantizes elements to codes of a few bits.

tensors: The tensors to quantize.
scales: One scale per bucket (two for two_level, none for natural), tensor by tensor.
stream: Seed, worker and step of the random numbers, [3].
message: Flag (1 finite, 0 not), scales (bit-cast), codes; the codes of a tensor start at a word.
  All zero if an element or a scale is not finite or, for natural, a rounded element is not.
errors: tensors - decoded; empty if M is 0.
levels: Levels of one sign, for stochastic; steps from the lowest to the highest, for uniform.
bucket_size: Elements that share a scale, a multiple of 32; 0 for a whole tensor.
)doc");

REGISTER_OP("RedsyncDequantizeSum")
    .Input("messages: int32")
    .Input("like: N * float")
    .Output("totals: N * float")
    .Attr("N: int >= 1")
    .Attr("mode: {'sign', 'two_level', 'threshold', 'stochastic', 'uniform', 'natural'}")
    .Attr("levels: int = 1")
    .Attr("bucket_size: int = 0")
    .SetShapeFn(DequantizeShape)
    .Doc(R"doc(
Decodes RedsyncQuantize of all workers and sums the values, rank by rank.

messages: [workers, words].
like: Tensors in the shapes of the totals; their buffers are reused if no other op needs them.
totals: Sums over the workers.
)doc");

}  // namespace redsync
