#include <algorithm>
#include <vector>

#include "custom_ops/core/cpu/bits.h"
#include "custom_ops/core/cpu/rice.h"
#include "custom_ops/kernels/bits_args.h"
#include "custom_ops/kernels/call_op.h"
#include "custom_ops/kernels/op_support.h"
#include "custom_ops/kernels/select_args.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelContext;

constexpr int64_t kBlock = 32 * 512;  // Codes that a thread takes at a time: they fill whole words.
constexpr int64_t kCodeCost = 4;      // Cycles to pack or unpack one.
constexpr int64_t kNumberCost = 8;    // Cycles to read one of a Rice code.

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

tensorflow::Status Result(Status status, const char* argument, const CodecError& error) {
  return status == Status::kOk ? tensorflow::OkStatus() : Describe(argument, error);
}

tensorflow::Status Pack(OpKernelContext* context, const PackedCodes& call) {
  const int64_t count = call.count, words = call.words(), bits = call.bits;
  if (words == 0) return tensorflow::OkStatus();
  ForBlocks(context, call.rows, count, [&](int64_t row, int64_t first, int64_t n) {
    PackBits(call.in + row * count + first, n, bits, call.out + row * words + first / 32 * bits);
  });
  return tensorflow::OkStatus();
}

tensorflow::Status Unpack(OpKernelContext* context, const PackedCodes& call) {
  const int64_t count = call.count, words = call.words(), bits = call.bits;
  ForBlocks(context, call.rows, count, [&](int64_t row, int64_t first, int64_t n) {
    UnpackBits(call.in + row * words + first / 32 * bits, n, bits, call.out + row * count + first);
  });
  return tensorflow::OkStatus();
}

tensorflow::Status Write(OpKernelContext*, const WrittenBits& call) {
  CodecError error;
  const Status status =
      WriteBits(call.codes, call.lengths, call.count, call.size, call.words, &error);
  return Result(status, "lengths", error);
}

tensorflow::Status Mark(OpKernelContext*, const BitmapOfPositions& call) {
  CodecError error;
  const Status status =
      MakeBitmap(call.positions, call.slots, *call.count, call.size, call.words, &error);
  return Result(status, "positions", error);
}

tensorflow::Status List(OpKernelContext* context, const PositionsOfBits& call) {
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

tensorflow::Status Encode(OpKernelContext*, const RiceCodes& call) {
  CodecError error;
  const Status status = RiceEncode(call.format, call.in, call.out, &error);
  return Result(status, "numbers", error);
}

tensorflow::Status Decode(OpKernelContext* context, const RiceCodes& call) {
  const RiceFormat& format = call.format;
  std::vector<CodecError> errors(call.rows);
  const int64_t cost = kNumberCost * (format.count + format.bitmap_words);
  IntraOpThreads(context)(call.rows, cost, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      RiceDecode(format, call.in + row * format.words(), call.out + row * format.count,
                 &errors[row]);
      errors[row].rank = row;
    }
  });
  return FirstError("codes", errors);
}

REGISTER_KERNEL_BUILDER(
    Name("RedsyncPackBits").Device(tensorflow::DEVICE_CPU),
    CallOp<PackedCodes, &PackedCodes::ReadToPack, &PackedCodes::PrepareToPack, Pack>);
REGISTER_KERNEL_BUILDER(
    Name("RedsyncUnpackBits").Device(tensorflow::DEVICE_CPU),
    CallOp<PackedCodes, &PackedCodes::ReadToUnpack, &PackedCodes::PrepareToUnpack, Unpack>);
REGISTER_KERNEL_BUILDER(Name("RedsyncWriteBits").Device(tensorflow::DEVICE_CPU),
                        CallOp<WrittenBits, &WrittenBits::Read, &WrittenBits::Prepare, Write>);
REGISTER_KERNEL_BUILDER(
    Name("RedsyncBitmap").Device(tensorflow::DEVICE_CPU),
    CallOp<BitmapOfPositions, &BitmapOfPositions::Read, &BitmapOfPositions::Prepare, Mark>);
REGISTER_KERNEL_BUILDER(
    Name("RedsyncSetBits").Device(tensorflow::DEVICE_CPU),
    CallOp<PositionsOfBits, &PositionsOfBits::Read, &PositionsOfBits::Prepare, List>);
REGISTER_KERNEL_BUILDER(
    Name("RedsyncRiceEncode").Device(tensorflow::DEVICE_CPU),
    CallOp<RiceCodes, &RiceCodes::ReadToEncode, &RiceCodes::PrepareToEncode, Encode>);
REGISTER_KERNEL_BUILDER(
    Name("RedsyncRiceDecode").Device(tensorflow::DEVICE_CPU),
    CallOp<RiceCodes, &RiceCodes::ReadToDecode, &RiceCodes::PrepareToDecode, Decode>);

}  // namespace
}  // namespace redsync
