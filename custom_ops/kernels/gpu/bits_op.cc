// Bits in words, bitmaps and Rice codes.
#include "custom_ops/core/gpu/bits_api.h"
#include "custom_ops/kernels/bits_args.h"
#include "custom_ops/kernels/call_op.h"
#include "custom_ops/kernels/gpu/checked_op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelContext;

tensorflow::Status PackCodes(OpKernelContext* context, const PackCall& codes) {
  const RedsyncGpuPackedCodes call = {codes.rows, codes.count, codes.bits, codes.in, codes.out};
  return FromCode(redsync_gpu_pack_bits(&call, StreamOf(context)), "Packing bits");
}

tensorflow::Status UnpackCodes(OpKernelContext* context, const UnpackCall& codes) {
  const RedsyncGpuPackedCodes call = {codes.rows, codes.count, codes.bits, codes.in, codes.out};
  return FromCode(redsync_gpu_unpack_bits(&call, StreamOf(context)), "Unpacking bits");
}

// Any words are a valid bitmap, so there is no check.
tensorflow::Status ListBits(OpKernelContext* context, const SetBitsCall& bits) {
  const RedsyncGpuSetBits call = {bits.words, bits.rows,      bits.size,
                                  bits.slots, bits.positions, bits.counts};
  return WithScratch(context, redsync_gpu_set_bits_scratch_bytes(&call), "Listing bits",
                     [&](void* scratch, int64_t bytes, void* stream) {
                       return redsync_gpu_set_bits(&call, scratch, bytes, stream);
                     });
}

struct WriteBits {
  static constexpr const char* kWork = "Writing bits";
  static constexpr const char* kName = "lengths";
  static constexpr auto Bytes = redsync_gpu_write_bits_scratch_bytes;
  static constexpr auto Function = redsync_gpu_write_bits;
  static constexpr auto Explain = redsync_gpu_explain_write_bits;

  RedsyncGpuWriteBits call;

  tensorflow::Status Fill(const WriteBitsCall& bits) {
    call = {bits.codes, bits.lengths, bits.count, bits.size, bits.words};
    return tensorflow::OkStatus();
  }
};

struct MakeBitmap {
  static constexpr const char* kWork = "Making a bitmap";
  static constexpr const char* kName = "positions";
  static constexpr auto Bytes = nullptr;
  static constexpr auto Function = redsync_gpu_bitmap;
  static constexpr auto Explain = redsync_gpu_explain_bitmap;

  RedsyncGpuBitmap call;

  tensorflow::Status Fill(const BitmapCall& bits) {
    call = {bits.positions, bits.slots, bits.count, bits.size, bits.words};
    return tensorflow::OkStatus();
  }
};

struct EncodeRice {
  static constexpr const char* kWork = "Rice encoding";
  static constexpr const char* kName = "numbers";
  static constexpr auto Bytes = redsync_gpu_rice_encode_scratch_bytes;
  static constexpr auto Function = redsync_gpu_rice_encode;
  static constexpr auto Explain = redsync_gpu_explain_rice_encode;

  RedsyncGpuRiceEncode call;

  tensorflow::Status Fill(const RiceEncodeCall& from) {
    const RiceFormat& format = from.format;
    call = {from.numbers, format.count, format.rice, format.bitmap_words,
            reinterpret_cast<uint32_t*>(from.code)};
    return tensorflow::OkStatus();
  }
};

struct DecodeRice {
  static constexpr const char* kWork = "Rice decoding";
  static constexpr const char* kName = "codes";
  static constexpr auto Bytes = redsync_gpu_rice_decode_scratch_bytes;
  static constexpr auto Function = redsync_gpu_rice_decode;
  static constexpr auto Explain = redsync_gpu_explain_rice_decode;

  RedsyncGpuRiceDecode call;

  tensorflow::Status Fill(const RiceDecodeCall& from) {
    const RiceFormat& format = from.format;
    const auto* words = reinterpret_cast<const uint32_t*>(from.codes);
    call = {words, from.rows, format.count, format.rice, format.bitmap_words, from.numbers};
    return tensorflow::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("RedsyncPackBits").Device(tensorflow::DEVICE_GPU),
                        CallOp<PackCall, PackCodes>);
REGISTER_KERNEL_BUILDER(Name("RedsyncUnpackBits").Device(tensorflow::DEVICE_GPU),
                        CallOp<UnpackCall, UnpackCodes>);
REGISTER_KERNEL_BUILDER(Name("RedsyncSetBits").Device(tensorflow::DEVICE_GPU),
                        CallOp<SetBitsCall, ListBits>);
REGISTER_KERNEL_BUILDER(Name("RedsyncWriteBits").Device(tensorflow::DEVICE_GPU),
                        CodecOp<WriteBitsCall, WriteBits>);
REGISTER_KERNEL_BUILDER(Name("RedsyncBitmap").Device(tensorflow::DEVICE_GPU),
                        CodecOp<BitmapCall, MakeBitmap>);
REGISTER_KERNEL_BUILDER(Name("RedsyncRiceEncode").Device(tensorflow::DEVICE_GPU),
                        CodecOp<RiceEncodeCall, EncodeRice>);
REGISTER_KERNEL_BUILDER(Name("RedsyncRiceDecode").Device(tensorflow::DEVICE_GPU),
                        CodecOp<RiceDecodeCall, DecodeRice>);

}  // namespace
}  // namespace redsync
