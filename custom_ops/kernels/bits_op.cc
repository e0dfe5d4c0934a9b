#include <algorithm>
#include <vector>

#include "custom_ops/core/cpu/bits.h"
#include "custom_ops/core/cpu/rice.h"
#include "custom_ops/kernels/bits.h"
#include "custom_ops/kernels/codec.h"
#include "custom_ops/kernels/layout.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelConstruction;
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

class PackBitsOp : public tensorflow::OpKernel {
 public:
  explicit PackBitsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.ReadToPack(context));
  }

  void Compute(OpKernelContext* context) override {
    PackedCodes codes = attributes_;
    OP_REQUIRES_OK(context, codes.PrepareToPack(context));
    const int64_t count = codes.count, words = codes.words(), bits = codes.bits;
    if (words == 0) return;
    ForBlocks(context, codes.rows, count, [&](int64_t row, int64_t first, int64_t n) {
      PackBits(codes.in + row * count + first, n, bits,
               codes.out + row * words + first / 32 * bits);
    });
  }

 private:
  PackedCodes attributes_;
};

class UnpackBitsOp : public tensorflow::OpKernel {
 public:
  explicit UnpackBitsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.ReadToUnpack(context));
  }

  void Compute(OpKernelContext* context) override {
    PackedCodes codes = attributes_;
    OP_REQUIRES_OK(context, codes.PrepareToUnpack(context));
    const int64_t count = codes.count, words = codes.words(), bits = codes.bits;
    ForBlocks(context, codes.rows, count, [&](int64_t row, int64_t first, int64_t n) {
      UnpackBits(codes.in + row * words + first / 32 * bits, n, bits,
                 codes.out + row * count + first);
    });
  }

 private:
  PackedCodes attributes_;
};

class WriteBitsOp : public tensorflow::OpKernel {
 public:
  explicit WriteBitsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
  }

  void Compute(OpKernelContext* context) override {
    WrittenBits call = attributes_;
    OP_REQUIRES_OK(context, call.Prepare(context));
    CodecError error;
    const Status status =
        WriteBits(call.codes, call.lengths, call.count, call.size, call.words, &error);
    OP_REQUIRES(context, status == Status::kOk, Describe("lengths", error));
  }

 private:
  WrittenBits attributes_;
};

class BitmapOp : public tensorflow::OpKernel {
 public:
  explicit BitmapOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
  }

  void Compute(OpKernelContext* context) override {
    BitmapOfPositions call = attributes_;
    OP_REQUIRES_OK(context, call.Prepare(context));
    CodecError error;
    const Status status =
        MakeBitmap(call.positions, call.slots, *call.count, call.size, call.words, &error);
    OP_REQUIRES(context, status == Status::kOk, Describe("positions", error));
  }

 private:
  BitmapOfPositions attributes_;
};

class SetBitsOp : public tensorflow::OpKernel {
 public:
  explicit SetBitsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
  }

  void Compute(OpKernelContext* context) override {
    PositionsOfBits call = attributes_;
    OP_REQUIRES_OK(context, call.Prepare(context));
    const int64_t cost = kCodeCost * (call.size + call.slots);
    IntraOpThreads(context)(call.rows, cost, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const uint32_t* bitmap = call.words + row * call.size;
        call.counts[row] = static_cast<int32_t>(CountBits(bitmap, call.size));
        FindBits(bitmap, call.size, call.slots, call.positions + row * call.slots);
      }
    });
  }

 private:
  PositionsOfBits attributes_;
};

class RiceEncodeOp : public tensorflow::OpKernel {
 public:
  explicit RiceEncodeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.ReadToEncode(context));
  }

  void Compute(OpKernelContext* context) override {
    RiceCodes call = attributes_;
    OP_REQUIRES_OK(context, call.PrepareToEncode(context));
    CodecError error;
    const Status status = RiceEncode(call.format, call.in, call.out, &error);
    OP_REQUIRES(context, status == Status::kOk, Describe("numbers", error));
  }

 private:
  RiceCodes attributes_;
};

class RiceDecodeOp : public tensorflow::OpKernel {
 public:
  explicit RiceDecodeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.ReadToDecode(context));
  }

  void Compute(OpKernelContext* context) override {
    RiceCodes call = attributes_;
    OP_REQUIRES_OK(context, call.PrepareToDecode(context));
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
    OP_REQUIRES_OK(context, FirstError("codes", errors));
  }

 private:
  RiceCodes attributes_;
};

REGISTER_KERNEL_BUILDER(Name("RedsyncPackBits").Device(tensorflow::DEVICE_CPU), PackBitsOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncUnpackBits").Device(tensorflow::DEVICE_CPU), UnpackBitsOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncWriteBits").Device(tensorflow::DEVICE_CPU), WriteBitsOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncBitmap").Device(tensorflow::DEVICE_CPU), BitmapOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncSetBits").Device(tensorflow::DEVICE_CPU), SetBitsOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncRiceEncode").Device(tensorflow::DEVICE_CPU), RiceEncodeOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncRiceDecode").Device(tensorflow::DEVICE_CPU), RiceDecodeOp);

}  // namespace
}  // namespace redsync
