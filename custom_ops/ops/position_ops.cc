#include <algorithm>

#include "custom_ops/core/cpu/bits.h"
#include "custom_ops/core/cpu/golomb.h"
#include "custom_ops/ops/shape_support.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace redsync {

using ::tensorflow::errors::InvalidArgument;
using ::tensorflow::shape_inference::DimensionHandle;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

namespace {

// Checks that inputs 0 .. n - 1 are vectors, and that input n has one entry for each.
tensorflow::Status VectorsAndCounts(InferenceContext* c, int n) {
  ShapeHandle unused;
  for (int i = 0; i < n; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &unused));
  return c->Merge(c->input(n), c->Vector(n), &unused);
}

// Sets the outputs `indices` [P, slots[i]] and `counts` [P, N]; input 0 is [P, words].
tensorflow::Status PositionsShape(InferenceContext* c, int n, DimensionHandle words) {
  ShapeHandle messages;
  std::vector<int64_t> slots;
  TF_RETURN_IF_ERROR(GetListAttr(c, "slots", n, &slots));
  TF_RETURN_IF_ERROR(c->Merge(c->input(0), c->Matrix(c->UnknownDim(), words), &messages));
  const DimensionHandle ranks = c->Dim(messages, 0);
  std::vector<ShapeHandle> indices;
  for (const int64_t count : slots) {
    if (count < 0) return InvalidArgument("`slots` must be >= 0. Received: ", count, ".");
    indices.push_back(c->Matrix(ranks, c->MakeDim(count)));
  }
  TF_RETURN_IF_ERROR(c->set_output("indices", indices));
  return c->set_output("counts", {c->Matrix(ranks, n)});
}

tensorflow::Status GolombEncodeShape(InferenceContext* c) {
  int n;
  std::vector<int64_t> sizes, rice;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
  TF_RETURN_IF_ERROR(GetListAttr(c, "sizes", n, &sizes));
  TF_RETURN_IF_ERROR(GetListAttr(c, "rice", n, &rice));
  TF_RETURN_IF_ERROR(VectorsAndCounts(c, n));
  int64_t words = 0;
  for (int i = 0; i < n; ++i) {
    if (!c->FullyDefined(c->input(i)) || rice[i] < 0 || rice[i] > kMaxRice) {
      return c->set_output("message", {c->Vector(c->UnknownDim())});
    }
    const int64_t slots = c->Value(c->Dim(c->input(i), 0));
    if (slots > sizes[i]) {
      return InvalidArgument("`slots` must be at most `sizes`. Received: slots[", i, "]=", slots,
                             ", sizes[", i, "]=", sizes[i], ".");
    }
    const GolombFormat format = {sizes[i], slots, static_cast<int>(rice[i])};
    words += format.part_words();
  }
  return c->set_output("message", {c->Vector(words)});
}

tensorflow::Status GolombDecodeShape(InferenceContext* c) {
  int n;
  std::vector<int64_t> unused;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
  TF_RETURN_IF_ERROR(GetListAttr(c, "sizes", n, &unused));
  TF_RETURN_IF_ERROR(GetListAttr(c, "rice", n, &unused));
  return PositionsShape(c, n, c->UnknownDim());
}

tensorflow::Status FilterWords(InferenceContext* c, int n, DimensionHandle* words) {
  std::vector<int64_t> unused, lengths;
  TF_RETURN_IF_ERROR(GetListAttr(c, "sizes", n, &unused));
  TF_RETURN_IF_ERROR(GetListAttr(c, "hashes", n, &unused));
  TF_RETURN_IF_ERROR(GetListAttr(c, "words", n, &lengths));
  int64_t total = 0;
  for (const int64_t length : lengths) total += std::max<int64_t>(length, 0);
  *words = c->MakeDim(total);
  return ::tensorflow::OkStatus();
}

tensorflow::Status BloomBuildShape(InferenceContext* c) {
  int n;
  ShapeHandle unused;
  DimensionHandle words;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
  TF_RETURN_IF_ERROR(VectorsAndCounts(c, n));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(n + 1), 0, &unused));
  TF_RETURN_IF_ERROR(FilterWords(c, n, &words));
  return c->set_output("filters", {c->Vector(words)});
}

tensorflow::Status BloomQueryShape(InferenceContext* c) {
  int n;
  ShapeHandle unused;
  DimensionHandle words;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &unused));
  TF_RETURN_IF_ERROR(FilterWords(c, n, &words));
  return PositionsShape(c, n, words);
}

}  // namespace

REGISTER_OP("RedsyncGolombEncode")
    .Input("indices: N * int32")
    .Input("counts: int32")
    .Output("message: int32")
    .Attr("N: int >= 1")
    .Attr("sizes: list(int)")
    .Attr("rice: list(int)")
    .SetShapeFn(GolombEncodeShape)
    .Doc(R"doc(
Encodes ascending positions by Golomb codes of the gaps between them.

indices: Positions, [slots[i]]; the first counts[i] ascend in [0, sizes[i]).
counts: [N].
message: Per tensor [count, low bits, bitmap], with capacity for any positions.
sizes: Elements of the tensors.
rice: Number of low bits of a gap, which are sent verbatim.
)doc");

REGISTER_OP("RedsyncGolombDecode")
    .Input("messages: int32")
    .Output("indices: N * int32")
    .Output("counts: int32")
    .Attr("N: int >= 1")
    .Attr("sizes: list(int)")
    .Attr("slots: list(int)")
    .Attr("rice: list(int)")
    .SetShapeFn(GolombDecodeShape)
    .Doc(R"doc(
Decodes RedsyncGolombEncode of all workers.

messages: [workers, words].
indices: [workers, slots[i]]; 0 after the first counts[worker, i].
counts: [workers, N].
)doc");

REGISTER_OP("RedsyncBloomBuild")
    .Input("indices: N * int32")
    .Input("counts: int32")
    .Input("seed: int32")
    .Output("filters: int32")
    .Attr("N: int >= 1")
    .Attr("sizes: list(int)")
    .Attr("words: list(int)")
    .Attr("hashes: list(int)")
    .SetShapeFn(BloomBuildShape)
    .Doc(R"doc(
Returns Bloom filters of positions.

indices: Positions, [slots[i]]; the first counts[i] are in [0, sizes[i]).
counts: [N].
seed: Seed of the hashes, a scalar.
filters: The concatenated filters, words[i] words for tensor i.
sizes: Elements of the tensors.
hashes: Bits that a position sets, per tensor.
)doc");

REGISTER_OP("RedsyncBloomQuery")
    .Input("filters: int32")
    .Input("seed: int32")
    .Output("indices: N * int32")
    .Output("counts: int32")
    .Attr("N: int >= 1")
    .Attr("sizes: list(int)")
    .Attr("slots: list(int)")
    .Attr("words: list(int)")
    .Attr("hashes: list(int)")
    .SetShapeFn(BloomQueryShape)
    .Doc(R"doc(
Returns the positions in Bloom filters, including false positives.

filters: [workers, all words].
seed: As given to RedsyncBloomBuild.
indices: The first slots[i] positives, ascending, [workers, slots[i]]; 0 after the last one.
counts: The number of listed positives, [workers, N].
)doc");

}  // namespace redsync
