/* Coded messages of selected elements on a GPU, behind a C interface; the rules of c_api.h and
   codecs_api.h hold here too. What the words are is said in custom_ops/core/cpu/coded_message.h. */
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_CODED_API_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_CODED_API_H_

#include "custom_ops/core/gpu/codecs_api.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int64_t size;    /* Elements. */
  int64_t slots;   /* Elements that may be selected, in [0, size]. */
  int64_t stream;  /* Whose positions are coded together; below the number of streams. */
  float* residual; /* Device, [size]. Not used by decoding. */
} RedsyncGpuCodedTensor;

typedef struct {
  const RedsyncGpuCodedTensor* tensors; /* Host, [count]. */
  int64_t count;
  const int64_t* rice; /* Host, [streams]: bits of a gap that are sent as they are, in [0, 30]. */
  int64_t streams;
  int64_t value_bits; /* In [1, 4], or 16. */
} RedsyncGpuCodedFormat;

/* Words of a coded message; -1 if an argument is out of its range, or elements of a stream are too
   many. */
REDSYNC_GPU_API int64_t redsync_gpu_coded_words(const RedsyncGpuCodedFormat* format);

/* Words of the message that it was before: [flag], and [count, index * slots, value * slots] of
   each tensor. */
REDSYNC_GPU_API int64_t redsync_gpu_plain_words(const RedsyncGpuCodedFormat* format);

typedef struct {
  RedsyncGpuCodedFormat format;
  const int32_t*
      plain;        /* Device, [redsync_gpu_plain_words()], as redsync_gpu_select() leaves it. */
  int32_t* message; /* Device, [redsync_gpu_coded_words()]. */
} RedsyncGpuCode;

REDSYNC_GPU_API int64_t redsync_gpu_code_scratch_bytes(const RedsyncGpuCode* call);

/* Codes a message, and leaves in the residuals, at the selected elements, what is not sent. The
   message is all zero, and the residuals are unspecified, if the plain one is, or if a value is too
   large for 16 bits. */
REDSYNC_GPU_API int redsync_gpu_code(const RedsyncGpuCode* call, void* scratch,
                                     int64_t scratch_bytes, void* stream);

typedef struct {
  RedsyncGpuCodedFormat format;
  const int32_t* messages; /* Device, [ranks, words]. */
  int64_t ranks;           /* At most 65535. */
  int64_t words;           /* redsync_gpu_coded_words() */
  int32_t* plain;          /* Device, [ranks, redsync_gpu_plain_words()]. */
} RedsyncGpuUncode;

REDSYNC_GPU_API int64_t redsync_gpu_uncode_scratch_bytes(const RedsyncGpuUncode* call);

/* Undoes it. Checks the codes of positions; flags, counts and values are for redsync_gpu_decode().
 */
REDSYNC_GPU_API int redsync_gpu_uncode(const RedsyncGpuUncode* call, RedsyncGpuRecord* record,
                                       void* scratch, int64_t scratch_bytes, void* stream);
REDSYNC_GPU_API int redsync_gpu_explain_uncode(const RedsyncGpuUncode* call,
                                               const RedsyncGpuRecord* record,
                                               RedsyncGpuCodecError* error);

#ifdef __cplusplus
}
#endif

#endif /* TF_REDSYNC_CUSTOM_OPS_CORE_GPU_CODED_API_H_ */
