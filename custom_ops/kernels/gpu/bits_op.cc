// Bits in words, bitmaps and Rice codes.
#include "custom_ops/core/gpu/bits_api.h"
#include "custom_ops/kernels/bits.h"
#include "custom_ops/kernels/gpu/codec_op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;

class GpuPackBitsOp : public tensorflow::OpKernel {
 public:
  explicit GpuPackBitsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.ReadToPack(context));
  }

  void Compute(OpKernelContext* context) override {
    PackedCodes codes = attributes_;
    OP_REQUIRES_OK(context, codes.PrepareToPack(context));
    const RedsyncGpuCodes call = {codes.rows, codes.count, codes.bits, codes.in, codes.out};
    OP_REQUIRES_OK(context,
                   FromCode(redsync_gpu_pack_bits(&call, StreamOf(context)), "Packing bits"));
  }

 private:
  PackedCodes attributes_;
};

class GpuUnpackBitsOp : public tensorflow::OpKernel {
 public:
  explicit GpuUnpackBitsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.ReadToUnpack(context));
  }

  void Compute(OpKernelContext* context) override {
    PackedCodes codes = attributes_;
    OP_REQUIRES_OK(context, codes.PrepareToUnpack(context));
    const RedsyncGpuCodes call = {codes.rows, codes.count, codes.bits, codes.in, codes.out};
    OP_REQUIRES_OK(context,
                   FromCode(redsync_gpu_unpack_bits(&call, StreamOf(context)), "Unpacking bits"));
  }

 private:
  PackedCodes attributes_;
};

// Nothing can be wrong with a bitmap.
class GpuSetBitsOp : public tensorflow::OpKernel {
 public:
  explicit GpuSetBitsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
  }

  void Compute(OpKernelContext* context) override {
    PositionsOfBits bits = attributes_;
    OP_REQUIRES_OK(context, bits.Prepare(context));
    const RedsyncGpuSetBits call = {bits.words, bits.rows,      bits.size,
                                    bits.slots, bits.positions, bits.counts};
    const int64_t bytes = redsync_gpu_set_bits_scratch_bytes(&call);
    tensorflow::Tensor scratch;
    OP_REQUIRES_OK(context, AllocateScratch(context, bytes, &scratch));
    const int code = redsync_gpu_set_bits(&call, scratch.data(), bytes, StreamOf(context));
    OP_REQUIRES_OK(context, FromCode(code, "Listing bits"));
  }

 private:
  PositionsOfBits attributes_;
};

struct WriteBitsWork {
  static constexpr const char* kWhat = "Writing bits";
  static constexpr const char* kName = "lengths";
  static constexpr auto Explain = redsync_gpu_explain_write_bits;

  RedsyncGpuWriteBits call;
  RecordPair record;
};

class GpuWriteBitsOp : public CheckedOp<WriteBitsWork> {
 public:
  explicit GpuWriteBitsOp(OpKernelConstruction* context) : CheckedOp(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
  }

 private:
  tensorflow::Status Queue(OpKernelContext* context, WriteBitsWork* work) const override {
    WrittenBits bits = attributes_;
    TF_RETURN_IF_ERROR(bits.Prepare(context));
    work->call = {bits.codes, bits.lengths, bits.count, bits.size, bits.words};
    const int64_t bytes = redsync_gpu_write_bits_scratch_bytes(&work->call);
    return Run(context, work, bytes, redsync_gpu_write_bits);
  }

  WrittenBits attributes_;
};

struct BitmapWork {
  static constexpr const char* kWhat = "Making a bitmap";
  static constexpr const char* kName = "positions";
  static constexpr auto Explain = redsync_gpu_explain_bitmap;

  RedsyncGpuBitmap call;
  RecordPair record;
};

class GpuBitmapOp : public CheckedOp<BitmapWork> {
 public:
  explicit GpuBitmapOp(OpKernelConstruction* context) : CheckedOp(context) {
    OP_REQUIRES_OK(context, attributes_.Read(context));
  }

 private:
  tensorflow::Status Queue(OpKernelContext* context, BitmapWork* work) const override {
    BitmapOfPositions bits = attributes_;
    TF_RETURN_IF_ERROR(bits.Prepare(context));
    work->call = {bits.positions, bits.slots, bits.count, bits.size, bits.words};
    return Run(context, work, redsync_gpu_bitmap);
  }

  BitmapOfPositions attributes_;
};

struct RiceEncodeWork {
  static constexpr const char* kWhat = "Rice encoding";
  static constexpr const char* kName = "numbers";
  static constexpr auto Explain = redsync_gpu_explain_rice_encode;

  RedsyncGpuRiceEncode call;
  RecordPair record;
};

class GpuRiceEncodeOp : public CheckedOp<RiceEncodeWork> {
 public:
  explicit GpuRiceEncodeOp(OpKernelConstruction* context) : CheckedOp(context) {
    OP_REQUIRES_OK(context, attributes_.ReadToEncode(context));
  }

 private:
  tensorflow::Status Queue(OpKernelContext* context, RiceEncodeWork* work) const override {
    RiceCodes codes = attributes_;
    TF_RETURN_IF_ERROR(codes.PrepareToEncode(context));
    const RiceFormat& format = codes.format;
    work->call = {codes.in, format.count, format.rice, format.bitmap_words,
                  reinterpret_cast<uint32_t*>(codes.out)};
    const int64_t bytes = redsync_gpu_rice_encode_scratch_bytes(&work->call);
    return Run(context, work, bytes, redsync_gpu_rice_encode);
  }

  RiceCodes attributes_;
};

struct RiceDecodeWork {
  static constexpr const char* kWhat = "Rice decoding";
  static constexpr const char* kName = "codes";
  static constexpr auto Explain = redsync_gpu_explain_rice_decode;

  RedsyncGpuRiceDecode call;
  RecordPair record;
};

class GpuRiceDecodeOp : public CheckedOp<RiceDecodeWork> {
 public:
  explicit GpuRiceDecodeOp(OpKernelConstruction* context) : CheckedOp(context) {
    OP_REQUIRES_OK(context, attributes_.ReadToDecode(context));
  }

 private:
  tensorflow::Status Queue(OpKernelContext* context, RiceDecodeWork* work) const override {
    RiceCodes codes = attributes_;
    TF_RETURN_IF_ERROR(codes.PrepareToDecode(context));
    const RiceFormat& format = codes.format;
    work->call = {reinterpret_cast<const uint32_t*>(codes.in),
                  codes.rows,
                  format.count,
                  format.rice,
                  format.bitmap_words,
                  codes.out};
    const int64_t bytes = redsync_gpu_rice_decode_scratch_bytes(&work->call);
    return Run(context, work, bytes, redsync_gpu_rice_decode);
  }

  RiceCodes attributes_;
};

REGISTER_KERNEL_BUILDER(Name("RedsyncPackBits").Device(tensorflow::DEVICE_GPU), GpuPackBitsOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncUnpackBits").Device(tensorflow::DEVICE_GPU), GpuUnpackBitsOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncWriteBits").Device(tensorflow::DEVICE_GPU), GpuWriteBitsOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncBitmap").Device(tensorflow::DEVICE_GPU), GpuBitmapOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncSetBits").Device(tensorflow::DEVICE_GPU), GpuSetBitsOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncRiceEncode").Device(tensorflow::DEVICE_GPU), GpuRiceEncodeOp);
REGISTER_KERNEL_BUILDER(Name("RedsyncRiceDecode").Device(tensorflow::DEVICE_GPU), GpuRiceDecodeOp);

}  // namespace
}  // namespace redsync
