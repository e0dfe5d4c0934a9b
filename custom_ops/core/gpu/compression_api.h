/* C interface of the codecs on a GPU; the rules of c_api.h apply.

   tf_redsync/ops/{quantization,merging,golomb,bloom}.py describe the codes; results equal those of
   the CPU, bit for bit. Functions that check their input overwrite a record. If it has an error
   afterwards, the outputs are unspecified. At most 65535 ranks. */
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
  int64_t rank;      /* -1 if it is not a received message. */
  int64_t tensor;    /* -1 if it belongs to no tensor. */
  int64_t slot;      /* Index among the fields of this name. */
  double value;
  const char* rule; /* The requirement; null for "in [0, limit]". */
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
  int64_t bucket; /* Elements that share a scale, a multiple of 32 below 2^31; 0: a whole tensor. */
} RedsyncGpuQuantizer;

typedef struct {
  int64_t size;    /* Elements. */
  const float* in; /* Device, [size]: input of the quantization; unused by the sum. */
  float* out;      /* Device, [size]: in - decoded (may be `in` or null), or the sum. */
} RedsyncGpuDense;

/* Returns the words of a message: flag, scales, codes; -1 if an argument is out of range. */
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

/* Writes the message, all zero if an element or a scale is non-finite. Negative scales fail. */
REDSYNC_GPU_API int redsync_gpu_quantize(const RedsyncGpuQuantize* call, RedsyncGpuRecord* record,
                                         void* scratch, int64_t scratch_bytes, void* stream);

/* Fills `error` from a record on the host; returns 0 if the record has no error. The same holds for
   the other explain functions. */
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

/* Sums the messages in the order of the ranks; ignores messages with flag 0. */
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
  const uint32_t* indices; /* Device, [ranks, slots]; the first `count` of a rank ascend. */
  const float* values;     /* Device, [ranks, slots]. */
  uint32_t* kept_indices;  /* Device, [k], ascending; unused slots are 0. */
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

/* Adds the values of every index in the order of the ranks. Keeps the k non-zero sums of largest
   magnitude, the lower index first among equals, and drops the other non-zero sums. */
REDSYNC_GPU_API int redsync_gpu_merge(const RedsyncGpuMerge* call, RedsyncGpuRecord* record,
                                      void* scratch, int64_t scratch_bytes, void* stream);

REDSYNC_GPU_API int redsync_gpu_explain_merge(const RedsyncGpuMerge* call,
                                              const RedsyncGpuRecord* record,
                                              RedsyncGpuCodecError* error);

/* ----------------------------------------------------------------------------------- Golomb */

typedef struct {
  int64_t size;       /* Positions are in [0, size), at most 2^32 - 1. */
  int64_t slots;      /* Maximum number of positions, in [0, size], at most 2^31 - 1. */
  int64_t rice;       /* Low bits of a gap, which are sent verbatim, in [0, 30]. */
  const uint32_t* in; /* Device, [slots]: positions to encode, of which the first `count` ascend. */
  uint32_t* out;      /* Device, [ranks, slots]: decoded positions, 0 after the count; 2^32 - 1 for
                           a position that is out of range. */
} RedsyncGpuPositions;

/* Returns the words of a message, per tensor [count, low words.., bitmap words..]. With d - 1 for a
   gap d, the low words have the packed `rice` low bits, and the bitmap has (d - 1) >> rice zeros
   and a one. Returns -1 if an argument is out of range, or both parts have 2^26 words or more. */
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
  int64_t stride;  /* Distance between messages, in words. */
  int64_t words;   /* redsync_gpu_golomb_words() */
  int32_t* counts; /* Device, [ranks, count]; 0 if the number of ones in a part differs. */
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
  int64_t slots;      /* Number of positions, or maximum number to list; at most 2^31 - 1. */
  int64_t words;      /* Words of the filter, in [1, 2^27 - 1]. */
  int64_t hashes;     /* Bits that a position sets, in [1, 64]. */
  const uint32_t* in; /* Device, [slots]: positions to insert, the first `count`. */
  uint32_t* out; /* Device, [ranks, slots]: contained positions, ascending; 0 after the count. */
} RedsyncGpuFilter;

typedef struct {
  const RedsyncGpuFilter* tensors; /* Host, [count]. */
  int64_t count;
  const int32_t* counts; /* Device, [count]. */
  const int32_t* seed;   /* Device scalar. */
  int32_t* filters;      /* Device, concatenated. */
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

/* Lists the first positions in the filters. Any words are a valid filter. */
REDSYNC_GPU_API int redsync_gpu_bloom_query(const RedsyncGpuBloomQuery* call, void* scratch,
                                            int64_t scratch_bytes, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* TF_REDSYNC_CUSTOM_OPS_CORE_GPU_COMPRESSION_API_H_ */
