/* C interface of the CUDA algorithms: pointers, 64-bit sizes, scratch memory and a stream.

   The functions do not allocate, synchronize or print. They queue work on `stream` (a
   cudaStream_t), so all memory must stay valid until the work has run. "Device" pointers are read
   by the GPU only; all other arguments are read during the call. Semantics and the layout of
   messages are those of tf_redsync/ops/message_layout.py; results equal those of the CPU, bit for
   bit. */
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_C_API_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_C_API_H_

#include <stdint.h>

#define REDSYNC_GPU_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum {
  REDSYNC_GPU_OK = 0,
  REDSYNC_GPU_INVALID_ARGUMENT = 1,
  REDSYNC_GPU_SCRATCH_TOO_SMALL = 2,
  REDSYNC_GPU_CUDA_ERROR = 3 /* See redsync_gpu_last_error(). */
};
enum {
  REDSYNC_GPU_EXACT = 0,
  REDSYNC_GPU_TRIMMED = 1,
  REDSYNC_GPU_THRESHOLD = 2,
  REDSYNC_GPU_FIXED = 3 /* Elements that reach the threshold given as the ratio, at most k. */
};
enum { REDSYNC_GPU_NO_MOMENTUM = 0, REDSYNC_GPU_MOMENTUM = 1, REDSYNC_GPU_NESTEROV = 2 };

/* ------------------------------------------------------------------- accumulate and select */

typedef struct {
  int64_t size;      /* Elements, at most 2^32 - 1. */
  int64_t k;         /* In [1, size], at most 2^31 - 1; 0 if size is 0. */
  int32_t selector;  /* REDSYNC_GPU_EXACT, ... */
  int32_t quantized; /* 0 or 1. */
  const void* grad;  /* Device, float or bfloat16 [size]. The next four are float [size]. */
  const float* residual;
  const float* velocity; /* Null without momentum. */
  float* new_residual;   /* May be `residual`, or `grad` of float. */
  float* new_velocity;   /* May be `velocity`, or `grad` of float; null if it is not stored. */
  int32_t bfloat16;      /* 0 or 1: whether `grad` is bfloat16. */
} RedsyncGpuTensor;

typedef struct {
  const RedsyncGpuTensor* tensors; /* Host, [count]. */
  int64_t count;
  int32_t momentum; /* REDSYNC_GPU_NO_MOMENTUM, ... */
  int32_t masking;  /* 0 or 1. */
  float factor;     /* Momentum coefficient. */
  uint32_t seed;    /* Seed of the sampled places, a new one each time. Results do not depend on it,
                       but time does: a fixed sample may mispredict in every call. */
  /* Scalars that a graph may compute on the device: the host cannot read them without waiting. */
  const float* scale;    /* Device scalar: factor of the gradients. */
  const int32_t* side;   /* Device scalar, +1 or -1: sign that quantized tensors send. */
  const uint8_t* search; /* Device scalar: whether to search thresholds again. */
  const float* ratios;   /* Device, [count]. If all selectors are exact or trimmed and no tensor is
                            quantized, `ratios`, `side` and `search` may be null. */
  float* new_ratios;     /* Device, [count]; must not overlap `ratios`; null if `ratios` is. */
  int32_t* message;      /* Device, [redsync_gpu_message_words()]. */
} RedsyncGpuSelect;

/* Returns the words of the message; -1 if an argument is out of range. */
REDSYNC_GPU_API int64_t redsync_gpu_message_words(const RedsyncGpuSelect* call);

/* Returns the bytes of device memory that redsync_gpu_select() needs, aligned to 256 bytes; -1 if
   an argument is out of range. The result depends on sizes, k and selectors only. */
REDSYNC_GPU_API int64_t redsync_gpu_select_scratch_bytes(const RedsyncGpuSelect* call);

/* Accumulates the gradients, writes the message, and zeroes the selected elements. If a value is
   non-finite, or a fixed threshold is NaN or negative, the message is all zero, the ratios are
   unchanged, and new residuals and velocities are unspecified. */
REDSYNC_GPU_API int redsync_gpu_select(const RedsyncGpuSelect* call, void* scratch,
                                       int64_t scratch_bytes, void* stream);

/* --------------------------------------------------------------------------------- decode */

/* One tensor's part of every message. */
typedef struct {
  int64_t offset; /* Offset of the count, in words. */
  int64_t capacity;
  int64_t size; /* At most 2^32 - 1. */
  int32_t quantized;
  float* total; /* Device, [size]. */
} RedsyncGpuPart;

/* The first error, written on the device. Copy it to the host on the same stream. */
typedef struct {
  uint64_t position; /* Position of the first invalid word; all ones if there is none. */
  int64_t value;     /* The invalid word; for a descent the index, see redsync_gpu_descend(). */
} RedsyncGpuRecord;

typedef struct {
  const int32_t* messages; /* Device, [ranks, words]. */
  int64_t ranks;
  int64_t words;
  const RedsyncGpuPart* parts; /* Host, [count]. */
  int64_t count;
} RedsyncGpuSumMessages;

/* totals = sum over ranks, in the order of the ranks; overwrites `record`. If the record names an
   invalid word, the totals are not written. */
REDSYNC_GPU_API int redsync_gpu_sum_messages(const RedsyncGpuSumMessages* call,
                                             RedsyncGpuRecord* record, void* stream);

/* An invalid word. `field` is "flag", "count", "index", "value" or "mean". For "value" and "mean",
   `value` has the bits of the float. `tensor` is -1 for a flag. */
typedef struct {
  const char* field;
  int64_t rank, tensor, slot, value;
  int64_t limit; /* Exclusive for an index, inclusive for a flag or count; floats must be finite. */
} RedsyncGpuError;

/* Fills `error` from a record on the host; returns 0 if the record has no error. */
REDSYNC_GPU_API int redsync_gpu_explain_sum_messages(const RedsyncGpuSumMessages* call,
                                                     const RedsyncGpuRecord* record,
                                                     RedsyncGpuError* error);

/* -------------------------------------------------------------------------------- descend */

typedef struct {
  const uint32_t* indices;    /* Device, [entries]. They may repeat. */
  const float* values;        /* Device, [entries]. */
  const float* learning_rate; /* Device scalar, finite. */
  int64_t entries;            /* At most 2^31 - 1. */
  int64_t size;
  float* variable; /* Device, [size]. */
} RedsyncGpuDescend;

REDSYNC_GPU_API int64_t redsync_gpu_descend_scratch_bytes(void);

/* variable[indices] -= learning_rate * values, in the order of the entries. If the record names an
   invalid index, the variable is not written. The index in the record is unsigned if the size is
   2^31 or more. */
REDSYNC_GPU_API int redsync_gpu_descend(const RedsyncGpuDescend* call, RedsyncGpuRecord* record,
                                        void* scratch, int64_t scratch_bytes, void* stream);

/* ----------------------------------------------------------------------------------- chunks */

typedef struct {
  const float* chunks; /* Device, [number, size]. */
  int64_t number;      /* At most 2^31 - 1, like the size. */
  int64_t size;
  int64_t k;          /* In [0, size]. */
  int32_t* positions; /* Device, [number, k]. */
  float* values;      /* Device, [number, k]. */
} RedsyncGpuChunks;

/* Writes the elements of largest magnitude of every chunk, ordered by position; among equals the
   first are taken. Magnitudes compare as bits, so NaNs are the largest. */
REDSYNC_GPU_API int redsync_gpu_chunked_top_k(const RedsyncGpuChunks* call, void* stream);

/* ------------------------------------------------------------------------- block quantization */

typedef struct {
  int64_t bits;  /* 8, 4 or 2. */
  int64_t block; /* A multiple of 32, at most 2^31 - 1. */
  int64_t rows;
  int64_t size;        /* Elements of a row, a multiple of 32. */
  const float* values; /* Device, [rows, size]. */
  int32_t* messages;   /* Device, [rows, words]. */
  float* errors;       /* Device, [rows, size]; may be `values`. */
} RedsyncGpuBlockQuantize;

typedef struct {
  int64_t bits, block, rows, size; /* As above. */
  int32_t sum;                     /* 0 or 1: whether to sum the rows. */
  const int32_t* messages;         /* Device, [rows, words]. */
  float* values;                   /* Device, [rows, size], or [size] if `sum`. */
} RedsyncGpuBlockDequantize;

/* Returns the words of a row's message, or -1 if an argument is out of range. */
REDSYNC_GPU_API int64_t redsync_gpu_block_words(int64_t bits, int64_t block, int64_t size);

/* See custom_ops/core/cpu/block_quantize.h. */
REDSYNC_GPU_API int redsync_gpu_block_quantize(const RedsyncGpuBlockQuantize* call, void* stream);
REDSYNC_GPU_API int redsync_gpu_block_dequantize(const RedsyncGpuBlockDequantize* call,
                                                 void* stream);

/* -------------------------------------------------------------------------------- checksums */

typedef struct {
  const int32_t* messages; /* Device, [rows, words]. Word 0 is the flag, or the seal. */
  int64_t rows;            /* At most 2^23 - 1. */
  int64_t words;           /* In [1, 2^31 - 1]. */
  const int32_t* senders;  /* Null to seal; to open, device, [rows], below 0 for a row to copy. */
  int32_t* out;            /* Device, [rows, words]; may be `messages`. */
} RedsyncGpuChecksum;

/* Returns the bytes of device memory that redsync_gpu_checksum() needs. */
REDSYNC_GPU_API int64_t redsync_gpu_checksum_scratch_bytes(const RedsyncGpuChecksum* call);

/* Seals messages, which replaces the flag by a seal, or opens them; see custom_ops/core/checksum.h.
   When opening, the position of the record is the lowest sender whose seal does not match its
   words. When sealing, the record may be null, and a flag that is neither 0 nor 1 gets a seal that
   receivers reject. */
REDSYNC_GPU_API int redsync_gpu_checksum(const RedsyncGpuChecksum* call, RedsyncGpuRecord* record,
                                         void* scratch, int64_t scratch_bytes, void* stream);

/* ---------------------------------------------------------------------------------- stream */

/* For callers without CUDA headers. */
REDSYNC_GPU_API int redsync_gpu_copy(void* to, const void* from, int64_t bytes, void* stream);
REDSYNC_GPU_API const char* redsync_gpu_last_error(void);
/* Returns the reason why a GPU cannot run the kernels: no driver, an old driver, or no code for the
   GPU; "" if it can. Creates CUDA's context on this GPU. The text is valid until the next call. Not
   thread-safe. */
REDSYNC_GPU_API const char* redsync_gpu_problem(int device);

#ifdef __cplusplus
}
#endif

#endif /* TF_REDSYNC_CUSTOM_OPS_CORE_GPU_C_API_H_ */
