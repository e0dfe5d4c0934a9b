#include <algorithm>

#include "custom_ops/core/cpu/bits.h"
#include "custom_ops/kernels/codec.h"
#include "custom_ops/kernels/layout.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::errors::InvalidArgument;

constexpr int64_t kBlock = 32 * 512;  // Codes that a thread takes at a time: they fill whole words.
constexpr int64_t kCodeCost = 4;      // Cycles to pack or unpack one.

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
    OP_REQUIRES_OK(context, ReadInt(context, "bits", 0, kMaxCodeBits, &bits_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& codes = context->input(0);
    OP_REQUIRES(context, codes.dims() >= 1,
                InvalidArgument("`codes` must have a last axis. Received: a scalar."));
    const int64_t count = codes.dim_size(codes.dims() - 1), words = PackedWords(count, bits_);
    TensorShape shape = codes.shape();
    shape.set_dim(codes.dims() - 1, words);
    Tensor* output;
    OP_REQUIRES_OK(context, context->allocate_output("words", shape, &output));
    if (output->NumElements() == 0) return;
    const uint32_t* from = Words(codes);
    uint32_t* to = Words(output);
    ForBlocks(
        context, codes.NumElements() / count, count, [&](int64_t row, int64_t first, int64_t n) {
          PackBits(from + row * count + first, n, bits_, to + row * words + first / 32 * bits_);
        });
  }

 private:
  int64_t bits_;
};

class UnpackBitsOp : public tensorflow::OpKernel {
 public:
  explicit UnpackBitsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadInt(context, "bits", 0, kMaxCodeBits, &bits_));
    OP_REQUIRES_OK(context, ReadInt(context, "count", 0, INT64_MAX / 64, &count_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& words = context->input(0);
    const int64_t length = PackedWords(count_, bits_);
    OP_REQUIRES_OK(context, CheckShape("words", words, -1, length));
    const int64_t rows = words.dim_size(0);
    Tensor* output;
    OP_REQUIRES_OK(context,
                   context->allocate_output("codes", TensorShape({rows, count_}), &output));
    const uint32_t* from = Words(words);
    uint32_t* to = Words(output);
    ForBlocks(context, rows, count_, [&](int64_t row, int64_t first, int64_t n) {
      UnpackBits(from + row * length + first / 32 * bits_, n, bits_, to + row * count_ + first);
    });
  }

 private:
  int64_t bits_, count_;
};

class WriteBitsOp : public tensorflow::OpKernel {
 public:
  explicit WriteBitsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadInt(context, "size", 0, INT64_MAX / 64, &size_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor &codes = context->input(0), &lengths = context->input(1);
    OP_REQUIRES_OK(context, CheckShape("codes", codes, -2, codes.NumElements()));
    OP_REQUIRES_OK(context, CheckShape("lengths", lengths, -2, codes.NumElements()));
    Tensor* words;
    OP_REQUIRES_OK(context, context->allocate_output("words", TensorShape({size_}), &words));
    CodecError error;
    const Status status = WriteBits(codes.flat<int64_t>().data(), lengths.flat<int32_t>().data(),
                                    codes.NumElements(), size_, Words(words), &error);
    OP_REQUIRES(context, status == Status::kOk, Describe("lengths", error));
  }

 private:
  int64_t size_;
};

class BitmapOp : public tensorflow::OpKernel {
 public:
  explicit BitmapOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadInt(context, "size", 0, kMaxBitmapWords, &size_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor &positions = context->input(0), *count;
    OP_REQUIRES_OK(context, CheckShape("positions", positions, -2, positions.NumElements()));
    OP_REQUIRES_OK(context, Scalar(context, "count", &count));
    Tensor* words;
    OP_REQUIRES_OK(context, context->allocate_output("words", TensorShape({size_}), &words));
    CodecError error;
    const Status status = MakeBitmap(Words(positions), positions.NumElements(),
                                     count->scalar<int32_t>()(), size_, Words(words), &error);
    OP_REQUIRES(context, status == Status::kOk, Describe("positions", error));
  }

 private:
  int64_t size_;
};

class SetBitsOp : public tensorflow::OpKernel {
 public:
  explicit SetBitsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadInt(context, "slots", 0, INT32_MAX, &slots_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& words = context->input(0);
    OP_REQUIRES(
        context, words.dims() == 2 && words.dim_size(1) <= kMaxBitmapWords,
        InvalidArgument("`words` must have shape [rows, words], with at most ", kMaxBitmapWords,
                        " words. Received: ", words.shape().DebugString(), "."));
    const int64_t rows = words.dim_size(0), size = words.dim_size(1);
    Tensor *positions, *counts;
    OP_REQUIRES_OK(context,
                   context->allocate_output("positions", TensorShape({rows, slots_}), &positions));
    OP_REQUIRES_OK(context, context->allocate_output("counts", TensorShape({rows, 1}), &counts));
    const int64_t cost = kCodeCost * (size + slots_);
    IntraOpThreads(context)(rows, cost, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const uint32_t* bitmap = Words(words) + row * size;
        counts->flat<int32_t>()(row) = static_cast<int32_t>(CountBits(bitmap, size));
        FindBits(bitmap, size, slots_, Words(positions) + row * slots_);
      }
    });
  }

 private:
  int64_t slots_;
};

REGISTER_KERNEL_BUILDER(Name("RedsyncPackBits").Device(tensorflow::DEVICE_CPU), PackBitsOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncUnpackBits").Device(tensorflow::DEVICE_CPU), UnpackBitsOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncWriteBits").Device(tensorflow::DEVICE_CPU), WriteBitsOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncBitmap").Device(tensorflow::DEVICE_CPU), BitmapOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncSetBits").Device(tensorflow::DEVICE_CPU), SetBitsOp);

}  // namespace
}  // namespace redsync
