#include "custom_ops/ops/shape_support.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace redsync {

using ::tensorflow::errors::InvalidArgument;
using ::tensorflow::shape_inference::DimensionHandle;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

namespace {

tensorflow::Status MergeShape(InferenceContext* c) {
  int n;
  std::vector<int64_t> sizes, k;
  TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
  TF_RETURN_IF_ERROR(GetListAttr(c, "sizes", n, &sizes));
  TF_RETURN_IF_ERROR(GetListAttr(c, "k", n, &k));
  ShapeHandle counts;
  TF_RETURN_IF_ERROR(c->Merge(c->input(2 * n), c->Matrix(c->UnknownDim(), n), &counts));
  std::vector<ShapeHandle> kept, dropped;
  for (int i = 0; i < n; ++i) {
    ShapeHandle block = c->Matrix(c->Dim(counts, 0), c->UnknownDim());
    TF_RETURN_IF_ERROR(c->Merge(block, c->input(i), &block));
    TF_RETURN_IF_ERROR(c->Merge(block, c->input(n + i), &block));
    DimensionHandle entries;
    TF_RETURN_IF_ERROR(c->Multiply(c->Dim(block, 0), c->Dim(block, 1), &entries));
    if (k[i] < 0) return InvalidArgument("`k` must be >= 0. Received: k[", i, "]=", k[i], ".");
    kept.push_back(c->Vector(k[i]));
    dropped.push_back(c->Vector(entries));
  }
  TF_RETURN_IF_ERROR(c->set_output("kept_indices", kept));
  TF_RETURN_IF_ERROR(c->set_output("kept_values", kept));
  TF_RETURN_IF_ERROR(c->set_output("kept_counts", {c->Vector(n)}));
  TF_RETURN_IF_ERROR(c->set_output("dropped_indices", dropped));
  TF_RETURN_IF_ERROR(c->set_output("dropped_values", dropped));
  return c->set_output("dropped_counts", {c->Vector(n)});
}

}  // namespace

REGISTER_OP("RedsyncSparseMerge")
    .Input("indices: N * int32")
    .Input("values: N * float")
    .Input("counts: int32")
    .Output("kept_indices: N * int32")
    .Output("kept_values: N * float")
    .Output("kept_counts: int32")
    .Output("dropped_indices: N * int32")
    .Output("dropped_values: N * float")
    .Output("dropped_counts: int32")
    .Attr("N: int >= 1")
    .Attr("sizes: list(int)")
    .Attr("k: list(int)")
    .SetShapeFn(MergeShape)
    .Doc(R"doc(
Sums sparse blocks and keeps the largest sums.

indices: [workers, slots]; the first counts[worker, i] of a row ascend in [0, sizes[i]).
values: [workers, slots].
counts: [workers, N].
kept_indices: Positions of the k[i] sums of largest magnitude, ascending, [k[i]]; unused slots are 0.
kept_values: Their sums.
kept_counts: [N].
dropped_indices: Positions of the other non-zero sums, [workers * slots].
dropped_values: Their sums.
dropped_counts: [N].
sizes: Elements of the tensors.
k: Number of sums to keep.
)doc");

}  // namespace redsync
