// What the kernels for bits in words do on every device: attributes, shapes, outputs.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_BITS_ARGS_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_BITS_ARGS_H_

#include <cstdint>

#include "custom_ops/core/cpu/rice.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {

// Codes of a fixed number of bits, and the words that they fill.
struct PackedCodes {
  int64_t bits = 0;
  int64_t count = 0;  // Codes of a row.
  int64_t rows = 0;
  const uint32_t* in;
  uint32_t* out;

  int64_t words() const { return PackedWords(count, bits); }

  tensorflow::Status ReadToPack(tensorflow::OpKernelConstruction* context);
  tensorflow::Status ReadToUnpack(tensorflow::OpKernelConstruction* context);
  tensorflow::Status PrepareToPack(tensorflow::OpKernelContext* context);
  tensorflow::Status PrepareToUnpack(tensorflow::OpKernelContext* context);
};

struct WrittenBits {
  int64_t size = 0;   // Words.
  int64_t count = 0;  // Codes.
  const int64_t* codes;
  const int32_t* lengths;
  uint32_t* words;

  tensorflow::Status Read(tensorflow::OpKernelConstruction* context);
  tensorflow::Status Prepare(tensorflow::OpKernelContext* context);
};

struct BitmapOfPositions {
  int64_t size = 0;  // Words.
  int64_t slots = 0;
  const uint32_t* positions;
  const int32_t* count;
  uint32_t* words;

  tensorflow::Status Read(tensorflow::OpKernelConstruction* context);
  tensorflow::Status Prepare(tensorflow::OpKernelContext* context);
};

struct PositionsOfBits {
  int64_t slots = 0;  // Of a row.
  int64_t rows = 0;
  int64_t size = 0;  // Words of a row.
  const uint32_t* words;
  uint32_t* positions;
  int32_t* counts;

  tensorflow::Status Read(tensorflow::OpKernelConstruction* context);
  tensorflow::Status Prepare(tensorflow::OpKernelContext* context);
};

// Numbers and their Rice codes.
struct RiceCodes {
  RiceFormat format;
  int64_t rows = 1;
  const int32_t* in;
  int32_t* out;

  tensorflow::Status ReadToEncode(tensorflow::OpKernelConstruction* context);
  tensorflow::Status ReadToDecode(tensorflow::OpKernelConstruction* context);
  tensorflow::Status PrepareToEncode(tensorflow::OpKernelContext* context);
  tensorflow::Status PrepareToDecode(tensorflow::OpKernelContext* context);
};

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_BITS_ARGS_H_
