// The kernel class of GPU ops that check their input on the device.
#ifndef TF_REDSYNC_CUSTOM_OPS_KERNELS_GPU_CHECKED_OP_H_
#define TF_REDSYNC_CUSTOM_OPS_KERNELS_GPU_CHECKED_OP_H_

#include <memory>
#include <type_traits>
#include <utility>

#include "custom_ops/core/gpu/compression_api.h"
#include "custom_ops/kernels/gpu/stream.h"
#include "custom_ops/kernels/op_support.h"

namespace redsync {

// `Call` reads attributes, inputs and outputs; see call_op.h. `Work` lives until the queued work is
// done:
//
//   // Queues the work on the stream.
//   tensorflow::Status Queue(OpKernelContext* context, Call& call, RedsyncGpuRecord* record);
//   // Returns the error in the record, which is now on the host.
//   tensorflow::Status Check(OpKernelContext* context, const RedsyncGpuRecord& record) const;
//
// The device checks the input, so the host knows an error only after the queued work. The kernel is
// asynchronous: no thread waits, and the op raises the error before other ops use its outputs.
template <class Call, class Work>
class CheckedOp : public tensorflow::AsyncOpKernel {
 public:
  explicit CheckedOp(tensorflow::OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, attributes_.ReadAttributes(context));
  }

  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override {
    struct Queued {
      RecordPair record;
      Work work;
    };
    auto queued = std::make_shared<Queued>();
    RecordPair& record = queued->record;
    Call call = attributes_;
    OP_REQUIRES_OK_ASYNC(context, call.Prepare(context), done);
    OP_REQUIRES_OK_ASYNC(context, record.Allocate(context), done);
    OP_REQUIRES_OK_ASYNC(context, queued->work.Queue(context, call, record.device()), done);
    CheckThenDone(
        context, &record,
        [context, queued]() {
          const tensorflow::Status status = queued->work.Check(context, queued->record.host());
          if (!status.ok()) context->SetStatus(status);
        },
        std::move(done));
  }

 private:
  Call attributes_;
};

// The work of a codec. `Codec` owns the struct `call` of the C interface and the memory to which it
// points, and has
//
//   static constexpr const char* kWork;  // Name of the work, for errors.
//   static constexpr const char* kName;  // Name of the checked argument.
//   static constexpr auto Bytes;         // The size query of scratch memory, or nullptr.
//   static constexpr auto Function;      // Queues the work.
//   static constexpr auto Explain;       // Converts a record to an error.
//   tensorflow::Status Fill(const Call& from);  // Fills `call`.
template <class Codec>
struct CodecWork : Codec {
  template <class Call>
  tensorflow::Status Queue(tensorflow::OpKernelContext* context, const Call& from,
                           RedsyncGpuRecord* record) {
    TF_RETURN_IF_ERROR(this->Fill(from));
    if constexpr (std::is_null_pointer_v<std::remove_const_t<decltype(Codec::Bytes)>>) {
      return FromCode(Codec::Function(&this->call, record, StreamOf(context)), Codec::kWork);
    } else {
      return WithScratch(context, Codec::Bytes(&this->call), Codec::kWork,
                         [&](void* scratch, int64_t bytes, void* stream) {
                           return Codec::Function(&this->call, record, scratch, bytes, stream);
                         });
    }
  }

  tensorflow::Status Check(tensorflow::OpKernelContext*, const RedsyncGpuRecord& record) const {
    RedsyncGpuCodecError e;
    if (!Codec::Explain(&this->call, &record, &e)) return tensorflow::OkStatus();
    const CodecError error = {e.field, e.rank, e.tensor, e.slot, e.value, e.rule, e.limit};
    return Describe(Codec::kName, error);
  }
};

template <class Call, class Codec>
using CodecOp = CheckedOp<Call, CodecWork<Codec>>;

}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_KERNELS_GPU_CHECKED_OP_H_
