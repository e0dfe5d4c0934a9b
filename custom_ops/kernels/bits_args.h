// Attributes, inputs and outputs of the ops on bits, bitmaps and Rice codes; see call_op.h.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_BITS_ARGS_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_BITS_ARGS_H_

#include <cstdint>

#include "custom_ops/core/cpu/rice.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

// Rows of codes of a fixed number of bits, and their words.
struct PackedCodes {
  int64_t bits = 0;
  int64_t count = 0;  // Codes of a row.
  int64_t rows = 0;
  const uint32_t* in = nullptr;
  uint32_t* out = nullptr;

  int64_t words() const { return PackedWords(count, bits); }
};

struct PackCall : PackedCodes {
  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction* context);
  tensorflow::Status Prepare(tensorflow::OpKernelContext* context);
};

struct UnpackCall : PackedCodes {
  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction* context);
  tensorflow::Status Prepare(tensorflow::OpKernelContext* context);
};

struct WriteBitsCall {
  int64_t size = 0;   // Words.
  int64_t count = 0;  // Codes.
  const int64_t* codes = nullptr;
  const int32_t* lengths = nullptr;
  uint32_t* words = nullptr;

  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction* context);
  tensorflow::Status Prepare(tensorflow::OpKernelContext* context);
};

struct BitmapCall {
  int64_t size = 0;  // Words.
  int64_t slots = 0;
  const uint32_t* positions = nullptr;
  const int32_t* count = nullptr;
  uint32_t* words = nullptr;

  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction* context);
  tensorflow::Status Prepare(tensorflow::OpKernelContext* context);
};

struct SetBitsCall {
  int64_t slots = 0;  // Slots of a row.
  int64_t rows = 0;
  int64_t size = 0;  // Words of a row.
  const uint32_t* words = nullptr;
  uint32_t* positions = nullptr;
  int32_t* counts = nullptr;

  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction* context);
  tensorflow::Status Prepare(tensorflow::OpKernelContext* context);
};

struct RiceEncodeCall {
  RiceFormat format;
  const int32_t* numbers = nullptr;
  int32_t* code = nullptr;

  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction* context);
  tensorflow::Status Prepare(tensorflow::OpKernelContext* context);
};

struct RiceDecodeCall {
  RiceFormat format;
  int64_t rows = 0;
  const int32_t* codes = nullptr;
  int32_t* numbers = nullptr;

  tensorflow::Status ReadAttributes(tensorflow::OpKernelConstruction* context);
  tensorflow::Status Prepare(tensorflow::OpKernelContext* context);
};

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_BITS_ARGS_H_
