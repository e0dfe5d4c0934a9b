/* C interface of the ops on bits in words on a GPU; the rules of c_api.h and compression_api.h
   apply.

   Bit t is bit t % 32 of word t / 32, and the low bit of a code comes first. */
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BITS_API_H_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BITS_API_H_

#include "custom_ops/core/gpu/compression_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ----------------------------------------------------------------- codes of a fixed length */

typedef struct {
  int64_t rows;
  int64_t count;      /* Codes of a row, which fill ceil(count * bits / 32) words. */
  int64_t bits;       /* Low bits of a code, in [0, 32]. */
  const uint32_t* in; /* Device: codes to pack, or words to unpack. */
  uint32_t* out;      /* Device: words, or codes. */
} RedsyncGpuPackedCodes;

REDSYNC_GPU_API int redsync_gpu_pack_bits(const RedsyncGpuPackedCodes* call, void* stream);
REDSYNC_GPU_API int redsync_gpu_unpack_bits(const RedsyncGpuPackedCodes* call, void* stream);

/* --------------------------------------------------------------- codes of variable lengths */

typedef struct {
  const int64_t* codes;   /* Device, [count]; only the low bits are used. */
  const int32_t* lengths; /* Device, [count], in [0, 32]. */
  int64_t count;          /* At most 2^31 - 1. */
  int64_t size;           /* Words of the result; bits beyond are dropped. */
  uint32_t* words;        /* Device, [size]. */
} RedsyncGpuWriteBits;

REDSYNC_GPU_API int64_t redsync_gpu_write_bits_scratch_bytes(const RedsyncGpuWriteBits* call);
REDSYNC_GPU_API int redsync_gpu_write_bits(const RedsyncGpuWriteBits* call,
                                           RedsyncGpuRecord* record, void* scratch,
                                           int64_t scratch_bytes, void* stream);
REDSYNC_GPU_API int redsync_gpu_explain_write_bits(const RedsyncGpuWriteBits* call,
                                                   const RedsyncGpuRecord* record,
                                                   RedsyncGpuCodecError* error);

/* --------------------------------------------------------------------------------- bitmaps */

typedef struct {
  const uint32_t* positions; /* Device, [slots], of which the first `count` ascend. */
  int64_t slots;             /* At most 2^31 - 1. */
  const int32_t* count;      /* Device scalar. */
  int64_t size;              /* Words of the result, at most 2^26. */
  uint32_t* words;           /* Device, [size]. */
} RedsyncGpuBitmap;

REDSYNC_GPU_API int redsync_gpu_bitmap(const RedsyncGpuBitmap* call, RedsyncGpuRecord* record,
                                       void* stream);
REDSYNC_GPU_API int redsync_gpu_explain_bitmap(const RedsyncGpuBitmap* call,
                                               const RedsyncGpuRecord* record,
                                               RedsyncGpuCodecError* error);

typedef struct {
  const uint32_t* words; /* Device, [rows, size]. */
  int64_t rows;          /* At most 65535. */
  int64_t size;          /* At most 2^26 - 1. */
  int64_t slots;         /* Maximum number of positions to list per row, at most 2^31 - 1. */
  uint32_t* positions;   /* Device, [rows, slots]: positions of set bits, 0 after the last one. */
  int32_t* counts;       /* Device, [rows]: number of set bits, which may exceed `slots`. */
} RedsyncGpuSetBits;

/* Returns the bytes of scratch memory, or -1 if an argument is out of range. The same holds for the
   other functions for scratch bytes. */
REDSYNC_GPU_API int64_t redsync_gpu_set_bits_scratch_bytes(const RedsyncGpuSetBits* call);
REDSYNC_GPU_API int redsync_gpu_set_bits(const RedsyncGpuSetBits* call, void* scratch,
                                         int64_t scratch_bytes, void* stream);

/* ------------------------------------------------------------------------------ Rice codes */

/* A code is the packed low bits of all numbers, followed by a bitmap; see tf_redsync/ops/rice.py.
 */
typedef struct {
  const int32_t* numbers; /* Device, [count]. */
  int64_t count;          /* At most 2^31 - 1. */
  int64_t rice;           /* Low bits, in [0, 30]. */
  int64_t bitmap_words;   /* At most 2^26. */
  uint32_t* code;         /* Device, [ceil(count * rice / 32) + bitmap_words]. */
} RedsyncGpuRiceEncode;

REDSYNC_GPU_API int64_t redsync_gpu_rice_encode_scratch_bytes(const RedsyncGpuRiceEncode* call);
REDSYNC_GPU_API int redsync_gpu_rice_encode(const RedsyncGpuRiceEncode* call,
                                            RedsyncGpuRecord* record, void* scratch,
                                            int64_t scratch_bytes, void* stream);
REDSYNC_GPU_API int redsync_gpu_explain_rice_encode(const RedsyncGpuRiceEncode* call,
                                                    const RedsyncGpuRecord* record,
                                                    RedsyncGpuCodecError* error);

typedef struct {
  const uint32_t* codes; /* Device, [rows, words of a code]. */
  int64_t rows;          /* At most 65535. */
  int64_t count;
  int64_t rice;
  int64_t bitmap_words;
  int32_t* numbers; /* Device, [rows, count]. */
} RedsyncGpuRiceDecode;

REDSYNC_GPU_API int64_t redsync_gpu_rice_decode_scratch_bytes(const RedsyncGpuRiceDecode* call);
REDSYNC_GPU_API int redsync_gpu_rice_decode(const RedsyncGpuRiceDecode* call,
                                            RedsyncGpuRecord* record, void* scratch,
                                            int64_t scratch_bytes, void* stream);
REDSYNC_GPU_API int redsync_gpu_explain_rice_decode(const RedsyncGpuRiceDecode* call,
                                                    const RedsyncGpuRecord* record,
                                                    RedsyncGpuCodecError* error);

#ifdef __cplusplus
}
#endif

#endif /* TF_REDSYNC_CUSTOM_OPS_CORE_GPU_BITS_API_H_ */
