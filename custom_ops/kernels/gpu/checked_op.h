// What the GPU kernels of the codecs share.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_GPU_CHECKED_OP_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_GPU_CHECKED_OP_H_

#include <memory>
#include <type_traits>
#include <utility>

#include "custom_ops/core/gpu/compression_api.h"
#include "custom_ops/kernels/gpu/stream.h"
#include "custom_ops/kernels/op_support.h"

namespace redsync {

// Scratch memory on the device; it may be freed as soon as what uses it is queued. `bytes` is what
// the size query says: negative if an argument is out of its range.
inline tensorflow::Status AllocateScratch(tensorflow::OpKernelContext* context, int64_t bytes,
                                          tensorflow::Tensor* scratch) {
  if (bytes < 0) return FromCode(REDSYNC_GPU_INVALID_ARGUMENT, "The size query");
  return context->allocate_temp(tensorflow::DT_UINT8, tensorflow::TensorShape({bytes}), scratch);
}

// A kernel whose input may turn out to be wrong on the device: asynchronous, as GpuDecodeOp is.
//
// `Work` has the call of the C interface and all that it points to, a `record`, the constants kWhat
// (is done) and kName (of the argument that is checked), and Explain(), of the C interface.
template <class Work>
class CheckedOp : public tensorflow::AsyncOpKernel {
 public:
  explicit CheckedOp(tensorflow::OpKernelConstruction* context) : AsyncOpKernel(context) {}

  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) final {
    auto work = std::make_shared<Work>();
    OP_REQUIRES_OK_ASYNC(context, work->record.Allocate(context), done);
    OP_REQUIRES_OK_ASYNC(context, Queue(context, work.get()), done);
    CheckThenDone(
        context, &work->record,
        [context, work]() {
          RedsyncGpuCodecError e;
          if (Work::Explain(&work->call, &work->record.host(), &e)) {
            const CodecError error = {e.field, e.rank, e.tensor, e.slot, e.value, e.rule, e.limit};
            context->SetStatus(Describe(Work::kName, error));
          }
        },
        std::move(done));
  }

 protected:
  // Ends Queue(): queues function(&call, record, stream), ..
  template <class Function>
  static tensorflow::Status Run(tensorflow::OpKernelContext* context, Work* work,
                                Function function) {
    return FromCode(function(&work->call, work->record.device(), StreamOf(context)), Work::kWhat);
  }
  // .. or function(&call, record, scratch, bytes, stream) with so many bytes of scratch memory.
  template <class Function>
  static tensorflow::Status Run(tensorflow::OpKernelContext* context, Work* work, int64_t bytes,
                                Function function) {
    tensorflow::Tensor scratch;
    TF_RETURN_IF_ERROR(AllocateScratch(context, bytes, &scratch));
    return Run(context, work, [&](auto* call, RedsyncGpuRecord* record, void* stream) {
      return function(call, record, scratch.data(), bytes, stream);
    });
  }

  // Checks shapes, allocates the outputs and queues the work.
  virtual tensorflow::Status Queue(tensorflow::OpKernelContext* context, Work* work) const = 0;
};

// One whose attributes, inputs and outputs `Call` reads, as in call_op.h. Of it Fill() makes the
// work's call; the work also has Function() and Bytes(), of the C interface, or nullptr for these.
template <class Work, class Call, auto kRead, auto kPrepare>
class CheckedCallOp : public CheckedOp<Work> {
 public:
  explicit CheckedCallOp(tensorflow::OpKernelConstruction* context) : CheckedOp<Work>(context) {
    OP_REQUIRES_OK(context, (attributes_.*kRead)(context));
  }

 private:
  tensorflow::Status Queue(tensorflow::OpKernelContext* context, Work* work) const override {
    Call call = attributes_;
    TF_RETURN_IF_ERROR((call.*kPrepare)(context));
    work->Fill(call);
    if constexpr (std::is_null_pointer_v<std::remove_const_t<decltype(Work::Bytes)>>) {
      return this->Run(context, work, Work::Function);
    } else {
      return this->Run(context, work, Work::Bytes(&work->call), Work::Function);
    }
  }

  Call attributes_;
};

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_GPU_CHECKED_OP_H_
