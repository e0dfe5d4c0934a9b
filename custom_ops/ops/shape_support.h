// Checks of attributes for the shape functions of all ops, so that an invalid attribute fails while
// the graph is built, before the kernel checks it.
#ifndef TF_REDSYNC_CUSTOM_OPS_OPS_SHAPE_SUPPORT_H_
#define TF_REDSYNC_CUSTOM_OPS_OPS_SHAPE_SUPPORT_H_

#include <vector>

#include "tensorflow/core/framework/shape_inference.h"

namespace redsync {

// Reads the attribute `name`, an integer in [0, high].
inline tensorflow::Status GetIntAttr(tensorflow::shape_inference::InferenceContext* c,
                                     const char* name, int64_t high, int64_t* value) {
  TF_RETURN_IF_ERROR(c->GetAttr(name, value));
  if (*value >= 0 && *value <= high) return tensorflow::OkStatus();
  return tensorflow::errors::InvalidArgument("`", name, "` must be in [0, ", high,
                                             "]. Received: ", name, "=", *value, ".");
}

// Reads the attribute `name`, a list with one entry for each of `n` tensors.
template <typename T>
tensorflow::Status GetListAttr(tensorflow::shape_inference::InferenceContext* c, const char* name,
                               int n, std::vector<T>* values) {
  values->clear();  // GetAttr appends.
  TF_RETURN_IF_ERROR(c->GetAttr(name, values));
  if (static_cast<int>(values->size()) == n) return tensorflow::OkStatus();
  return tensorflow::errors::InvalidArgument(
      "`", name, "` must have one entry per tensor. Received: ", values->size(), " for ", n,
      " tensors.");
}

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_OPS_SHAPE_SUPPORT_H_
