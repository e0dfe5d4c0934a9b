#include "custom_ops/kernels/block_quantize_args.h"
#include "custom_ops/kernels/call_op.h"
#include "custom_ops/kernels/op_support.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace redsync {
namespace {

tensorflow::Status QuantizeBlocks(tensorflow::OpKernelContext* context,
                                  const BlockQuantizeCall& call) {
  BlockQuantize(call.format, call.values, call.rows, call.size, IntraOpThreads(context),
                call.messages, call.errors);
  return tensorflow::OkStatus();
}

tensorflow::Status DequantizeBlocks(tensorflow::OpKernelContext* context,
                                    const BlockDequantizeCall& call) {
  BlockDequantize(call.format, call.messages, call.rows, call.size, call.sum,
                  IntraOpThreads(context), call.values);
  return tensorflow::OkStatus();
}

REGISTER_KERNEL_BUILDER(Name("RedsyncBlockQuantize").Device(tensorflow::DEVICE_CPU),
                        CallOp<BlockQuantizeCall, QuantizeBlocks>);
REGISTER_KERNEL_BUILDER(
    Name("RedsyncBlockDequantize").Device(tensorflow::DEVICE_CPU).HostMemory("size"),
    CallOp<BlockDequantizeCall, DequantizeBlocks>);

}  // namespace
}  // namespace redsync
