// Bits in words, bitmaps and Rice codes.
#include "custom_ops/core/gpu/bits_api.h"
#include "custom_ops/kernels/bits_args.h"
#include "custom_ops/kernels/call_op.h"
#include "custom_ops/kernels/gpu/checked_op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

using ::tensorflow::OpKernelContext;

tensorflow::Status Pack(OpKernelContext* context, const PackedCodes& codes) {
  const RedsyncGpuPackedCodes call = {codes.rows, codes.count, codes.bits, codes.in, codes.out};
  return FromCode(redsync_gpu_pack_bits(&call, StreamOf(context)), "Packing bits");
}

tensorflow::Status Unpack(OpKernelContext* context, const PackedCodes& codes) {
  const RedsyncGpuPackedCodes call = {codes.rows, codes.count, codes.bits, codes.in, codes.out};
  return FromCode(redsync_gpu_unpack_bits(&call, StreamOf(context)), "Unpacking bits");
}

// Nothing can be wrong with a bitmap.
tensorflow::Status List(OpKernelContext* context, const PositionsOfBits& bits) {
  const RedsyncGpuSetBits call = {bits.words, bits.rows,      bits.size,
                                  bits.slots, bits.positions, bits.counts};
  const int64_t bytes = redsync_gpu_set_bits_scratch_bytes(&call);
  tensorflow::Tensor scratch;
  TF_RETURN_IF_ERROR(AllocateScratch(context, bytes, &scratch));
  const int code = redsync_gpu_set_bits(&call, scratch.data(), bytes, StreamOf(context));
  return FromCode(code, "Listing bits");
}

struct WriteBitsWork {
  static constexpr const char* kWhat = "Writing bits";
  static constexpr const char* kName = "lengths";
  static constexpr auto Bytes = redsync_gpu_write_bits_scratch_bytes;
  static constexpr auto Function = redsync_gpu_write_bits;
  static constexpr auto Explain = redsync_gpu_explain_write_bits;

  RedsyncGpuWriteBits call;
  RecordPair record;

  void Fill(const WrittenBits& bits) {
    call = {bits.codes, bits.lengths, bits.count, bits.size, bits.words};
  }
};

struct BitmapWork {
  static constexpr const char* kWhat = "Making a bitmap";
  static constexpr const char* kName = "positions";
  static constexpr auto Bytes = nullptr;
  static constexpr auto Function = redsync_gpu_bitmap;
  static constexpr auto Explain = redsync_gpu_explain_bitmap;

  RedsyncGpuBitmap call;
  RecordPair record;

  void Fill(const BitmapOfPositions& bits) {
    call = {bits.positions, bits.slots, bits.count, bits.size, bits.words};
  }
};

struct RiceEncodeWork {
  static constexpr const char* kWhat = "Rice encoding";
  static constexpr const char* kName = "numbers";
  static constexpr auto Bytes = redsync_gpu_rice_encode_scratch_bytes;
  static constexpr auto Function = redsync_gpu_rice_encode;
  static constexpr auto Explain = redsync_gpu_explain_rice_encode;

  RedsyncGpuRiceEncode call;
  RecordPair record;

  void Fill(const RiceCodes& codes) {
    const RiceFormat& format = codes.format;
    call = {codes.in, format.count, format.rice, format.bitmap_words,
            reinterpret_cast<uint32_t*>(codes.out)};
  }
};

struct RiceDecodeWork {
  static constexpr const char* kWhat = "Rice decoding";
  static constexpr const char* kName = "codes";
  static constexpr auto Bytes = redsync_gpu_rice_decode_scratch_bytes;
  static constexpr auto Function = redsync_gpu_rice_decode;
  static constexpr auto Explain = redsync_gpu_explain_rice_decode;

  RedsyncGpuRiceDecode call;
  RecordPair record;

  void Fill(const RiceCodes& codes) {
    const RiceFormat& format = codes.format;
    const auto* words = reinterpret_cast<const uint32_t*>(codes.in);
    call = {words, codes.rows, format.count, format.rice, format.bitmap_words, codes.out};
  }
};

REGISTER_KERNEL_BUILDER(
    Name("RedsyncPackBits").Device(tensorflow::DEVICE_GPU),
    CallOp<PackedCodes, &PackedCodes::ReadToPack, &PackedCodes::PrepareToPack, Pack>);
REGISTER_KERNEL_BUILDER(
    Name("RedsyncUnpackBits").Device(tensorflow::DEVICE_GPU),
    CallOp<PackedCodes, &PackedCodes::ReadToUnpack, &PackedCodes::PrepareToUnpack, Unpack>);
REGISTER_KERNEL_BUILDER(
    Name("RedsyncSetBits").Device(tensorflow::DEVICE_GPU),
    CallOp<PositionsOfBits, &PositionsOfBits::Read, &PositionsOfBits::Prepare, List>);
REGISTER_KERNEL_BUILDER(
    Name("RedsyncWriteBits").Device(tensorflow::DEVICE_GPU),
    CheckedCallOp<WriteBitsWork, WrittenBits, &WrittenBits::Read, &WrittenBits::Prepare>);
REGISTER_KERNEL_BUILDER(Name("RedsyncBitmap").Device(tensorflow::DEVICE_GPU),
                        CheckedCallOp<BitmapWork, BitmapOfPositions, &BitmapOfPositions::Read,
                                      &BitmapOfPositions::Prepare>);
REGISTER_KERNEL_BUILDER(Name("RedsyncRiceEncode").Device(tensorflow::DEVICE_GPU),
                        CheckedCallOp<RiceEncodeWork, RiceCodes, &RiceCodes::ReadToEncode,
                                      &RiceCodes::PrepareToEncode>);
REGISTER_KERNEL_BUILDER(Name("RedsyncRiceDecode").Device(tensorflow::DEVICE_GPU),
                        CheckedCallOp<RiceDecodeWork, RiceCodes, &RiceCodes::ReadToDecode,
                                      &RiceCodes::PrepareToDecode>);

}  // namespace
}  // namespace redsync
