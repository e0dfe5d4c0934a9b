/* The codecs on a GPU, behind a C interface; the rules of c_api.h hold here too.

   tf_redsync/ops/{quantization,merging,golomb,bloom}.py describe the codes; results equal those of
   the CPU, bit for bit. Calls that check their input take a record: all of it is overwritten, and
   if it names an error in the end the outputs are unspecified. Ranks: at most 65535. */
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_COMPRESSION_API_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_COMPRESSION_API_H_

#include "custom_ops/core/gpu/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* An error in an input or a message, from a record. */
typedef struct {
  const char* field; /* "flag", "scale", "code", "count", "number of ones", "index" or
                        "value". */
  int64_t rank;      /* -1: it is not a received message. */
  int64_t tensor;    /* -1: it belongs to no tensor. */
  int64_t slot;      /* Which of the fields of that name. */
  double value;
  const char* rule; /* The requirement; null: in [0, limit]. */
  int64_t limit;
} RedsyncGpuCodecError;

/* ---------------------------------------------------------------------------- quantization */

enum {
  REDSYNC_GPU_SIGN = 0,
  REDSYNC_GPU_TWO_LEVEL = 1,
  REDSYNC_GPU_TERNARY = 2, /* "threshold" */
  REDSYNC_GPU_STOCHASTIC = 3,
  REDSYNC_GPU_UNIFORM = 4,
  REDSYNC_GPU_NATURAL = 5
};

typedef struct {
  int32_t mode;   /* REDSYNC_GPU_SIGN, ... */
  int32_t levels; /* In [1, 32767] if stochastic, [1, 65535] if uniform; else 1. */
  int64_t bucket; /* Elements of one scale, a multiple of 32 below 2^31; 0: all of a tensor. */
} RedsyncGpuQuantizer;

typedef struct {
  int64_t size;    /* Elements. */
  const float* in; /* Device, [size]: what to code. Not used by the sum. */
  float* out;      /* Device, [size]: in - decoded (may be `in`; null: not wanted), or the sum. */
} RedsyncGpuDense;

/* Words of a message: flag, scales, codes; -1 if an argument is out of its range. */
REDSYNC_GPU_API int64_t redsync_gpu_quantized_words(const RedsyncGpuQuantizer* quantizer,
                                                    const RedsyncGpuDense* tensors, int64_t count);

typedef struct {
  RedsyncGpuQuantizer quantizer;
  const RedsyncGpuDense* tensors; /* Host, [count]. */
  int64_t count;
  const float* scales;   /* Device, for all buckets of all tensors. */
  const int32_t* stream; /* Device, [3]: seed, worker and step of the random numbers. */
  int32_t* message;      /* Device, [redsync_gpu_quantized_words()]. */
} RedsyncGpuQuantize;

REDSYNC_GPU_API int64_t redsync_gpu_quantize_scratch_bytes(void);

/* The message is all zero if an element or a scale is not finite. Bad is a scale below 0. */
REDSYNC_GPU_API int redsync_gpu_quantize(const RedsyncGpuQuantize* call, RedsyncGpuRecord* record,
                                         void* scratch, int64_t scratch_bytes, void* stream);

/* Fills `error` from a record on the host; returns 0 if the record names nothing. So do the other
   functions of this kind. */
REDSYNC_GPU_API int redsync_gpu_explain_quantize(const RedsyncGpuQuantize* call,
                                                 const RedsyncGpuRecord* record,
                                                 RedsyncGpuCodecError* error);

typedef struct {
  RedsyncGpuQuantizer quantizer;
  const RedsyncGpuDense* tensors; /* Host, [count]. */
  int64_t count;
  const int32_t* messages; /* Device, [ranks, words]. */
  int64_t ranks;
  int64_t words; /* redsync_gpu_quantized_words() */
} RedsyncGpuDequantize;

/* Sums over the ranks, in their order. Messages whose flag is 0 contribute nothing. */
REDSYNC_GPU_API int redsync_gpu_dequantize(const RedsyncGpuDequantize* call,
                                           RedsyncGpuRecord* record, void* stream);

REDSYNC_GPU_API int redsync_gpu_explain_dequantize(const RedsyncGpuDequantize* call,
                                                   const RedsyncGpuRecord* record,
                                                   RedsyncGpuCodecError* error);

/* ------------------------------------------------------------------------------------ merge */

typedef struct {
  int64_t slots;           /* Entries of a rank; ranks * slots is at most 2^31 - 1. */
  int64_t size;            /* Indices are in [0, size), at most 2^32 - 1. */
  int64_t k;               /* Sums to keep. */
  const uint32_t* indices; /* Device, [ranks, slots]: ascending as far as a rank's count. */
  const float* values;     /* Device, [ranks, slots]. */
  uint32_t* kept_indices;  /* Device, [k]; ascending, unused slots are 0. */
  float* kept_values;
  uint32_t* dropped_indices; /* Device, [ranks * slots]. */
  float* dropped_values;
} RedsyncGpuBlocks;

typedef struct {
  const RedsyncGpuBlocks* tensors; /* Host, [count]. */
  int64_t count;
  const int32_t* counts; /* Device, [ranks, count]. */
  int64_t ranks;
  int32_t* kept_counts; /* Device, [count]. */
  int32_t* dropped_counts;
} RedsyncGpuMerge;

/* -1 if an argument is out of its range. */
REDSYNC_GPU_API int64_t redsync_gpu_merge_scratch_bytes(const RedsyncGpuMerge* call);

/* Adds up the values of every index in the order of the ranks. Of the sums that are not 0 the k
   largest in magnitude, the lower index among equals, are kept; the others are dropped. */
REDSYNC_GPU_API int redsync_gpu_merge(const RedsyncGpuMerge* call, RedsyncGpuRecord* record,
                                      void* scratch, int64_t scratch_bytes, void* stream);

REDSYNC_GPU_API int redsync_gpu_explain_merge(const RedsyncGpuMerge* call,
                                              const RedsyncGpuRecord* record,
                                              RedsyncGpuCodecError* error);

/* ----------------------------------------------------------------------------------- Golomb */

typedef struct {
  int64_t size;       /* Positions are in [0, size), at most 2^32 - 1. */
  int64_t slots;      /* Positions at most, in [0, size] and at most 2^31 - 1. */
  int64_t rice;       /* Bits of a gap that are sent as they are, in [0, 30]. */
  const uint32_t* in; /* Device, [slots], ascending as far as the count: what to code. */
  uint32_t* out;      /* Device, [ranks, slots]: what was decoded, 0 after the count; 2^32 - 1 for
                         a position that is too large. */
} RedsyncGpuPositions;

/* Words of a message, per tensor [count, low words.., bitmap words..]: the `rice` low bits of all
   gaps less one, packed, and a bitmap with as many zeros as each of them has left, and a one.
   -1 if an argument is out of its range, or both together are 2^26 words or more. */
REDSYNC_GPU_API int64_t redsync_gpu_golomb_words(const RedsyncGpuPositions* tensors, int64_t count);

typedef struct {
  const RedsyncGpuPositions* tensors; /* Host, [count]. */
  int64_t count;
  const int32_t* counts; /* Device, [count]. */
  int32_t* message;      /* Device, [redsync_gpu_golomb_words()]. */
} RedsyncGpuGolombEncode;

REDSYNC_GPU_API int64_t redsync_gpu_golomb_encode_scratch_bytes(const RedsyncGpuGolombEncode* call);
REDSYNC_GPU_API int redsync_gpu_golomb_encode(const RedsyncGpuGolombEncode* call,
                                              RedsyncGpuRecord* record, void* scratch,
                                              int64_t scratch_bytes, void* stream);
REDSYNC_GPU_API int redsync_gpu_explain_golomb_encode(const RedsyncGpuGolombEncode* call,
                                                      const RedsyncGpuRecord* record,
                                                      RedsyncGpuCodecError* error);

typedef struct {
  const RedsyncGpuPositions* tensors; /* Host, [count]. */
  int64_t count;
  const int32_t* messages; /* Device, [ranks, words]. */
  int64_t ranks;
  int64_t stride;  /* From one message to the next, in words. */
  int64_t words;   /* redsync_gpu_golomb_words() */
  int32_t* counts; /* Device, [ranks, count]: 0 unless a part has as many ones. */
} RedsyncGpuGolombDecode;

REDSYNC_GPU_API int64_t redsync_gpu_golomb_decode_scratch_bytes(const RedsyncGpuGolombDecode* call);
REDSYNC_GPU_API int redsync_gpu_golomb_decode(const RedsyncGpuGolombDecode* call,
                                              RedsyncGpuRecord* record, void* scratch,
                                              int64_t scratch_bytes, void* stream);
REDSYNC_GPU_API int redsync_gpu_explain_golomb_decode(const RedsyncGpuGolombDecode* call,
                                                      const RedsyncGpuRecord* record,
                                                      RedsyncGpuCodecError* error);

/* ------------------------------------------------------------------------------------ Bloom */

typedef struct {
  int64_t size;       /* Positions are in [0, size), at most 2^32 - 1. */
  int64_t slots;      /* Positions given, or to be listed at most; at most 2^31 - 1. */
  int64_t words;      /* Of the filter, in [1, 2^27 - 1]. */
  int64_t hashes;     /* Bits that a position sets, in [1, 64]. */
  const uint32_t* in; /* Device, [slots], as many as the count: what to put in. */
  uint32_t* out; /* Device, [ranks, slots]: what a filter holds, ascending; 0 after the count. */
} RedsyncGpuFilter;

typedef struct {
  const RedsyncGpuFilter* tensors; /* Host, [count]. */
  int64_t count;
  const int32_t* counts; /* Device, [count]. */
  const int32_t* seed;   /* Device scalar. */
  int32_t* filters;      /* Device, one after the other. */
} RedsyncGpuBloomBuild;

REDSYNC_GPU_API int redsync_gpu_bloom_build(const RedsyncGpuBloomBuild* call,
                                            RedsyncGpuRecord* record, void* stream);
REDSYNC_GPU_API int redsync_gpu_explain_bloom_build(const RedsyncGpuBloomBuild* call,
                                                    const RedsyncGpuRecord* record,
                                                    RedsyncGpuCodecError* error);

typedef struct {
  const RedsyncGpuFilter* tensors; /* Host, [count]. */
  int64_t count;
  const int32_t* filters; /* Device, [ranks, words]. */
  int64_t ranks;
  int64_t words;       /* Of all filters. */
  const int32_t* seed; /* Device scalar. */
  int32_t* counts;     /* Device, [ranks, count]. */
} RedsyncGpuBloomQuery;

/* -1 if an argument is out of its range. */
REDSYNC_GPU_API int64_t redsync_gpu_bloom_query_scratch_bytes(const RedsyncGpuBloomQuery* call);

/* Lists the first positions that the filters hold. Nothing can be wrong with a filter. */
REDSYNC_GPU_API int redsync_gpu_bloom_query(const RedsyncGpuBloomQuery* call, void* scratch,
                                            int64_t scratch_bytes, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* TF_REDSYNC_CUSTOM_OPS_CORE_GPU_COMPRESSION_API_H_ */
