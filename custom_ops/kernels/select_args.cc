#include "custom_ops/kernels/select_args.h"

#include <algorithm>
#include <cmath>

#include "custom_ops/kernels/op_support.h"

namespace redsync {

using ::tensorflow::OpInputList;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::errors::InvalidArgument;

namespace {

// Checks that `tensors` have the shapes of `grads`, one by one.
tensorflow::Status CheckShapes(const char* name, const OpInputList& tensors,
                               const OpInputList& grads) {
  if (tensors.size() != grads.size()) {
    return InvalidArgument("`", name,
                           "` must have one tensor per gradient. Received: ", tensors.size(), " ",
                           name, ", ", grads.size(), " grads.");
  }
  for (int i = 0; i < grads.size(); ++i) {
    if (tensors[i].shape() == grads[i].shape()) continue;
    return InvalidArgument("`", name, "` must have the shapes of `grads`. Received: ", name, "[", i,
                           "] of shape ", tensors[i].shape().DebugString(), " and grads[", i,
                           "] of shape ", grads[i].shape().DebugString(), ".");
  }
  return tensorflow::OkStatus();
}

// Allocates an output list. Each tensor reuses the buffer of the input at the same index in the
// first list of `inputs` whose tensor no other op needs.
tensorflow::Status AllocateList(OpKernelContext* context, const std::vector<const char*>& inputs,
                                const char* output, std::vector<Tensor*>* tensors) {
  int begin, end, output_begin, output_end;
  std::vector<int> candidates;
  for (const char* input : inputs) {
    TF_RETURN_IF_ERROR(context->op_kernel().InputRange(input, &begin, &end));
    candidates.push_back(begin);
  }
  TF_RETURN_IF_ERROR(context->op_kernel().OutputRange(output, &output_begin, &output_end));
  tensors->resize(output_end - output_begin);
  for (Tensor*& tensor : *tensors) {
    TF_RETURN_IF_ERROR(context->forward_input_or_allocate_output(
        candidates, output_begin++, context->input(candidates[0]).shape(), &tensor));
    for (int& candidate : candidates) ++candidate;
  }
  return tensorflow::OkStatus();
}

}  // namespace

tensorflow::Status AccumulateCall::ReadAttributes(OpKernelConstruction* context, bool adam) {
  bool nesterov;
  int kept;
  TF_RETURN_IF_ERROR(CheckVelocities(context, adam));
  TF_RETURN_IF_ERROR(context->GetAttr("U", &kept));
  TF_RETURN_IF_ERROR(context->GetAttr("momentum", &factor));
  TF_RETURN_IF_ERROR(context->GetAttr("nesterov", &nesterov));
  TF_RETURN_IF_ERROR(context->GetAttr("masking", &masking));
  momentum = adam          ? Momentum::kAdam
             : factor == 0 ? Momentum::kNone
             : nesterov    ? Momentum::kNesterov
             : kept        ? Momentum::kPlain
                           : Momentum::kUnkept;
  if (std::isfinite(factor) && factor >= 0) return tensorflow::OkStatus();
  return InvalidArgument("`momentum` must be finite and >= 0. Received: momentum=", factor, ".");
}

tensorflow::Status AccumulateCall::ReadInputs(OpKernelContext* context) {
  TF_RETURN_IF_ERROR(context->input_list("grads", &grads));
  TF_RETURN_IF_ERROR(context->input_list("residuals", &residuals));
  TF_RETURN_IF_ERROR(context->input_list("velocities", &velocities));
  TF_RETURN_IF_ERROR(ReadScalar(context, "scale", &scale));
  TF_RETURN_IF_ERROR(CheckShapes("residuals", residuals, grads));
  if (momentum == Momentum::kNone) return tensorflow::OkStatus();
  return CheckShapes("velocities", velocities, grads);
}

tensorflow::Status AccumulateCall::AllocateState(OpKernelContext* context) {
  TF_RETURN_IF_ERROR(
      AllocateList(context, {"residuals", "grads"}, "new_residuals", &new_residuals));
  return AllocateList(context, {"velocities", "grads"}, "new_velocities", &new_velocities);
}

void AccumulateCall::Set(int i, SelectOptions* options, SelectBuffers* buffers) const {
  options->size = grads[i].NumElements();
  options->momentum = momentum;
  options->factor = factor;
  options->masking = masking;
  options->scale = scale->scalar<float>()();
  if (IsBfloat16(grads[i])) {
    static_assert(sizeof(tensorflow::bfloat16) == sizeof(uint16_t), "its bits alone");
    buffers->bfloat16_grad = static_cast<const uint16_t*>(grads[i].data());
  } else {
    buffers->grad = grads[i].flat<float>().data();
  }
  buffers->residual = residuals[i].flat<float>().data();
  buffers->new_residual = new_residuals[i]->flat<float>().data();
  if (momentum == Momentum::kNone) return;
  buffers->velocity = velocities[i].flat<float>().data();
  if (Keeps(momentum)) buffers->new_velocity = new_velocities[i]->flat<float>().data();
}

tensorflow::Status PartsCall::ReadAttributes(OpKernelConstruction* context) {
  int n;
  TF_RETURN_IF_ERROR(context->GetAttr("N", &n));
  TF_RETURN_IF_ERROR(context->GetAttr("quantized", &quantized));
  return CheckOnePerTensor("quantized", quantized.size(), n);
}

tensorflow::Status PartsCall::ComputeParts(const std::string& name, const OpInputList& tensors,
                                           const Tensor& k) {
  if (k.dims() != 1 || k.NumElements() != tensors.size()) {
    return InvalidArgument("`k` must have shape [", tensors.size(),
                           "]. Received: ", k.shape().DebugString(), ".");
  }
  int64_t offset = kHeaderWords;
  for (int i = 0; i < tensors.size(); ++i) {
    const int64_t size = tensors[i].NumElements(), ki = k.flat<int32_t>()(i);
    if (size > kMaxElements) {
      return InvalidArgument("`", name, "` must have at most ", kMaxElements,
                             " elements each. Received: ", name, "[", i, "] of shape ",
                             tensors[i].shape().DebugString(), ".");
    }
    if (ki < std::min<int64_t>(size, 1) || ki > size) {
      return InvalidArgument("`k` must be in [1, size] (0 for an empty tensor). Received: k[", i,
                             "]=", ki, " for ", name, "[", i, "] of shape ",
                             tensors[i].shape().DebugString(), ".");
    }
    parts.push_back({offset, ki, size, quantized[i]});
    offset += parts.back().words();
  }
  return tensorflow::OkStatus();
}

tensorflow::Status SelectCall::ReadAttributes(OpKernelConstruction* context) {
  std::vector<std::string> names;
  TF_RETURN_IF_ERROR(PartsCall::ReadAttributes(context));
  TF_RETURN_IF_ERROR(context->GetAttr("selectors", &names));
  TF_RETURN_IF_ERROR(CheckOnePerTensor("selectors", names.size(), quantized.size()));
  for (const std::string& name : names) {
    selectors.push_back(name == "exact"     ? Selector::kExact
                        : name == "trimmed" ? Selector::kTrimmed
                        : name == "fixed"   ? Selector::kFixed
                                            : Selector::kThreshold);
  }
  return AccumulateCall::ReadAttributes(context);
}

tensorflow::Status SelectCall::Prepare(OpKernelContext* context) {
  TF_RETURN_IF_ERROR(ReadInputs(context));
  TF_RETURN_IF_ERROR(context->input("k", &k));
  TF_RETURN_IF_ERROR(context->input("ratios", &ratios));
  TF_RETURN_IF_ERROR(ReadScalar(context, "side", &side));
  TF_RETURN_IF_ERROR(ReadScalar(context, "search", &search));
  if (ratios->dims() != 1 || ratios->NumElements() != grads.size()) {
    return InvalidArgument("`ratios` must have shape [", grads.size(),
                           "]. Received: ", ratios->shape().DebugString(), ".");
  }
  TF_RETURN_IF_ERROR(ComputeParts("grads", grads, *k));
  TF_RETURN_IF_ERROR(
      AllocateOutput(context, "message", tensorflow::TensorShape({words()}), &message));
  TF_RETURN_IF_ERROR(AllocateOutput(context, "new_ratios", ratios->shape(), &new_ratios));
  return AllocateState(context);
}

tensorflow::Status DecodeCall::Prepare(OpKernelContext* context) {
  const Tensor *received, *k;
  OpInputList like;
  TF_RETURN_IF_ERROR(context->input("messages", &received));
  TF_RETURN_IF_ERROR(context->input("k", &k));
  TF_RETURN_IF_ERROR(context->input_list("like", &like));
  TF_RETURN_IF_ERROR(ComputeParts("like", like, *k));
  if (received->dims() != 2 || received->dim_size(1) != words()) {
    return InvalidArgument("`messages` must have shape [workers, ", words(),
                           "], the number of words that `k` implies. Received: ",
                           received->shape().DebugString(), ".");
  }
  messages = received->flat<int32_t>().data();
  ranks = received->dim_size(0);
  totals.resize(parts.size());
  for (int i = 0; i < like.size(); ++i) {
    TF_RETURN_IF_ERROR(ForwardOrAllocate(context, 2 + i, i, &totals[i]));
  }
  return tensorflow::OkStatus();
}

tensorflow::Status InvalidMessage(const std::string& field, int64_t tensor, int64_t rank,
                                  int64_t slot, int64_t value, int64_t limit) {
  using ::tensorflow::strings::StrCat;
  const bool in_range = value >= 0 && value < limit;
  const std::string must = field == "index" && in_range          ? "above the one before it"
                           : field == "index"                    ? StrCat(">= 0 and < ", limit)
                           : field == "flag" || field == "count" ? StrCat(">= 0 and <= ", limit)
                                                                 : "the bits of a finite float32";
  return tensorflow::errors::InvalidArgument(
      "`messages` hold an invalid ", field, tensor < 0 ? "" : StrCat(" of tensor ", tensor),
      ". Received: ", value, " from rank ", rank, ", slot ", slot, "; it must be ", must,
      ". Do all workers run the same version and configuration?");
}

}  // namespace redsync
