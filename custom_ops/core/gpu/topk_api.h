/* C interface of encoded messages of top-k elements on a GPU; the rules of c_api.h and
   compression_api.h apply. custom_ops/core/cpu/topk_codec.h describes the words. */
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_TOPK_API_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_TOPK_API_H_

#include "custom_ops/core/gpu/compression_api.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int64_t size;    /* Elements. */
  int64_t slots;   /* Maximum number of selected elements, in [0, size]. */
  int64_t stream;  /* Index of the stream that has its positions. */
  float* residual; /* Device, [size]. Unused by decoding. */
} RedsyncGpuTopKTensor;

typedef struct {
  const RedsyncGpuTopKTensor* tensors; /* Host, [count]. */
  int64_t count;
  const int64_t* rice; /* Host, [streams]: low bits of a gap, sent verbatim, in [0, 30]. */
  int64_t streams;
  int64_t value_bits; /* In [1, 4], or 16. */
} RedsyncGpuTopKFormat;

/* Returns the words of a coded message; -1 if an argument is out of range, or a stream has too many
   elements. */
REDSYNC_GPU_API int64_t redsync_gpu_topk_words(const RedsyncGpuTopKFormat* format);

/* Returns the words of the plain message: [flag], and [count, index * slots, value * slots] of each
   tensor. */
REDSYNC_GPU_API int64_t redsync_gpu_plain_words(const RedsyncGpuTopKFormat* format);

typedef struct {
  RedsyncGpuTopKFormat format;
  const int32_t* plain; /* Device, [redsync_gpu_plain_words()], from redsync_gpu_select(). */
  int32_t* message;     /* Device, [redsync_gpu_topk_words()]. */
} RedsyncGpuEncodeTopK;

REDSYNC_GPU_API int64_t redsync_gpu_encode_topk_scratch_bytes(const RedsyncGpuEncodeTopK* call);

/* Encodes a message, and stores the coding errors in the residuals, at the selected elements. The
   message is all zero, and the residuals are unspecified, if the plain one is. */
REDSYNC_GPU_API int redsync_gpu_encode_topk(const RedsyncGpuEncodeTopK* call, void* scratch,
                                            int64_t scratch_bytes, void* stream);

typedef struct {
  RedsyncGpuTopKFormat format;
  const int32_t* messages; /* Device, [ranks, words]. */
  int64_t ranks;           /* At most 65535. */
  int64_t words;           /* redsync_gpu_topk_words() */
  int32_t* plain;          /* Device, [ranks, redsync_gpu_plain_words()]. */
} RedsyncGpuDecodeTopK;

REDSYNC_GPU_API int64_t redsync_gpu_decode_topk_scratch_bytes(const RedsyncGpuDecodeTopK* call);

/* Decodes messages. Checks the codes of positions; redsync_gpu_sum_messages() checks flags, counts
   and values. */
REDSYNC_GPU_API int redsync_gpu_decode_topk(const RedsyncGpuDecodeTopK* call,
                                            RedsyncGpuRecord* record, void* scratch,
                                            int64_t scratch_bytes, void* stream);
REDSYNC_GPU_API int redsync_gpu_explain_decode_topk(const RedsyncGpuDecodeTopK* call,
                                                    const RedsyncGpuRecord* record,
                                                    RedsyncGpuCodecError* error);

#ifdef __cplusplus
}
#endif

#endif /* TF_REDSYNC_CUSTOM_OPS_CORE_GPU_TOPK_API_H_ */
