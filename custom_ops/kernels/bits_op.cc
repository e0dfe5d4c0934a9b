#include <algorithm>
#include <vector>

#include "custom_ops/core/cpu/bits.h"
#include "custom_ops/core/cpu/rice.h"
#include "custom_ops/kernels/bits_args.h"
#include "custom_ops/kernels/call_op.h"
#include "custom_ops/kernels/op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelContext;

constexpr int64_t kBlock = 32 * 512;  // Codes of a thread's task, which fill whole words.
constexpr int64_t kCodeCost = 4;      // Cycles to pack or unpack a code.
constexpr int64_t kNumberCost = 8;    // Cycles to read a number from a Rice code.

// Calls body(row, first, count) for blocks of the codes of all rows.
template <class Body>
void ForBlocks(OpKernelContext* context, int64_t rows, int64_t codes, const Body& body) {
  const int64_t blocks = CeilDiv(codes, kBlock);
  IntraOpThreads(context)(rows * blocks, kCodeCost * kBlock, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      const int64_t start = b % blocks * kBlock;
      body(b / blocks, start, std::min(kBlock, codes - start));
    }
  });
}

tensorflow::Status PackCodes(OpKernelContext* context, const PackCall& call) {
  const int64_t count = call.count, words = call.words(), bits = call.bits;
  if (words == 0) return tensorflow::OkStatus();
  ForBlocks(context, call.rows, count, [&](int64_t row, int64_t first, int64_t n) {
    PackBits(call.in + row * count + first, n, bits, call.out + row * words + first / 32 * bits);
  });
  return tensorflow::OkStatus();
}

tensorflow::Status UnpackCodes(OpKernelContext* context, const UnpackCall& call) {
  const int64_t count = call.count, words = call.words(), bits = call.bits;
  ForBlocks(context, call.rows, count, [&](int64_t row, int64_t first, int64_t n) {
    UnpackBits(call.in + row * words + first / 32 * bits, n, bits, call.out + row * count + first);
  });
  return tensorflow::OkStatus();
}

tensorflow::Status WriteCodes(OpKernelContext*, const WriteBitsCall& call) {
  CodecError error;
  const Status status =
      WriteBits(call.codes, call.lengths, call.count, call.size, call.words, &error);
  return StatusOf(status, "lengths", error);
}

tensorflow::Status MarkBits(OpKernelContext*, const BitmapCall& call) {
  CodecError error;
  const Status status =
      MakeBitmap(call.positions, call.slots, *call.count, call.size, call.words, &error);
  return StatusOf(status, "positions", error);
}

tensorflow::Status ListBits(OpKernelContext* context, const SetBitsCall& call) {
  const int64_t cost = kCodeCost * (call.size + call.slots);
  IntraOpThreads(context)(call.rows, cost, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const uint32_t* bitmap = call.words + row * call.size;
      call.counts[row] = static_cast<int32_t>(CountBits(bitmap, call.size));
      FindBits(bitmap, call.size, call.slots, call.positions + row * call.slots);
    }
  });
  return tensorflow::OkStatus();
}

tensorflow::Status EncodeRice(OpKernelContext*, const RiceEncodeCall& call) {
  CodecError error;
  const Status status = RiceEncode(call.format, call.numbers, call.code, &error);
  return StatusOf(status, "numbers", error);
}

tensorflow::Status DecodeRice(OpKernelContext* context, const RiceDecodeCall& call) {
  const RiceFormat& format = call.format;
  std::vector<CodecError> errors(call.rows);
  const int64_t cost = kNumberCost * (format.count + format.bitmap_words);
  IntraOpThreads(context)(call.rows, cost, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      RiceDecode(format, call.codes + row * format.words(), call.numbers + row * format.count,
                 &errors[row]);
      errors[row].rank = row;
    }
  });
  return FirstError("codes", errors);
}

REGISTER_KERNEL_BUILDER(Name("RedsyncPackBits").Device(tensorflow::DEVICE_CPU),
                        CallOp<PackCall, PackCodes>);
REGISTER_KERNEL_BUILDER(Name("RedsyncUnpackBits").Device(tensorflow::DEVICE_CPU),
                        CallOp<UnpackCall, UnpackCodes>);
REGISTER_KERNEL_BUILDER(Name("RedsyncWriteBits").Device(tensorflow::DEVICE_CPU),
                        CallOp<WriteBitsCall, WriteCodes>);
REGISTER_KERNEL_BUILDER(Name("RedsyncBitmap").Device(tensorflow::DEVICE_CPU),
                        CallOp<BitmapCall, MarkBits>);
REGISTER_KERNEL_BUILDER(Name("RedsyncSetBits").Device(tensorflow::DEVICE_CPU),
                        CallOp<SetBitsCall, ListBits>);
REGISTER_KERNEL_BUILDER(Name("RedsyncRiceEncode").Device(tensorflow::DEVICE_CPU),
                        CallOp<RiceEncodeCall, EncodeRice>);
REGISTER_KERNEL_BUILDER(Name("RedsyncRiceDecode").Device(tensorflow::DEVICE_CPU),
                        CallOp<RiceDecodeCall, DecodeRice>);

}  // namespace
}  // namespace redsync
