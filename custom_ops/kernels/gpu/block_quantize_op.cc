#include "custom_ops/kernels/block_quantize_args.h"
#include "custom_ops/kernels/call_op.h"
#include "custom_ops/kernels/gpu/stream.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

// Any words are valid, so there is no check.
tensorflow::Status QuantizeBlocks(tensorflow::OpKernelContext* context,
                                  const BlockQuantizeCall& call) {
  const RedsyncGpuBlockQuantize blocks = {call.format.bits, call.format.block, call.rows,
                                          call.size,        call.values,       call.messages,
                                          call.errors};
  return FromCode(redsync_gpu_block_quantize(&blocks, StreamOf(context)), "Block quantization");
}

tensorflow::Status DequantizeBlocks(tensorflow::OpKernelContext* context,
                                    const BlockDequantizeCall& call) {
  const RedsyncGpuBlockDequantize blocks = {call.format.bits, call.format.block, call.rows,
                                            call.size,        call.sum,          call.messages,
                                            call.values};
  return FromCode(redsync_gpu_block_dequantize(&blocks, StreamOf(context)), "Block dequantization");
}

REGISTER_KERNEL_BUILDER(Name("RedsyncBlockQuantize").Device(tensorflow::DEVICE_GPU),
                        CallOp<BlockQuantizeCall, QuantizeBlocks>);
REGISTER_KERNEL_BUILDER(
    Name("RedsyncBlockDequantize").Device(tensorflow::DEVICE_GPU).HostMemory("size"),
    CallOp<BlockDequantizeCall, DequantizeBlocks>);

}  // namespace
}  // namespace redsync
