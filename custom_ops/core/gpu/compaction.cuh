// Writes selected elements in the order of the indices: count, prefix sum, write.
#ifndef TF_REDSYNC_CUSTOM_OPS_CORE_GPU_COMPACTION_CUH_
#define TF_REDSYNC_CUSTOM_OPS_CORE_GPU_COMPACTION_CUH_

#include "custom_ops/core/gpu/selection_source.cuh"

namespace redsync {
namespace gpu {

// Returns the number of taken elements: those above the cut, and the first `ties` elements equal to
// it.
__device__ inline uint32_t Taken(const Tally<2>& tally, uint32_t ties) {
  return tally.at[0] + (tally.at[1] < ties ? tally.at[1] : ties);
}

// before[chunk] = {elements above the cut, elements equal to it}, one warp per chunk; the last
// block computes prefix sums.
template <class Source>
__device__ inline void Count(const Batch& batch, const Tensor& tensor, uint32_t group) {
  if (!Source::IsActive(tensor)) return;
  const Source source(batch, tensor);
  const Digits digits = tensor.state->digits[Source::kPhase];
  const uint32_t chunk = group * kGroup + Warp();
  if (chunk < tensor.chunks()) {
    const Range items = source.Chunk(chunk);
    uint32_t above = 0, ties = 0;
    for (uint32_t i = Lane(); i < items.count; i += 32) {
      const int32_t m = KeyMagnitude(source[items.begin + i]);
      above += m > digits.cut;
      ties += digits.ties != 0 && m == digits.cut;
    }
    above = WarpReduce(above, Add());
    ties = WarpReduce(ties, Add());
    if (Lane() == 0) tensor.before[chunk] = {{above, ties}};
  }
  if (!IsLastBlock(&tensor.state->histogram.ticket, tensor.groups())) return;
  const Tally<2> total = ScanTallies(tensor.before, tensor.chunks());
  if (threadIdx.x == 0) source.End(Taken(total, digits.ties), digits);
}

// Writes the taken elements, one warp per chunk. The last block computes their mean.
template <class Source>
__device__ inline void Place(const Batch& batch, const Tensor& tensor, uint32_t group) {
  if (!Source::IsActive(tensor)) return;
  const Source source(batch, tensor);
  const Digits digits = tensor.state->digits[Source::kPhase];
  const uint32_t chunk = group * kGroup + Warp();
  if (chunk < tensor.chunks()) {
    const Range items = source.Chunk(chunk);
    const Tally<2> before = tensor.before[chunk];
    const uint32_t begin = Taken(before, digits.ties);
    uint32_t place = begin, ties = before.at[1];
    double sum = 0;
    for (uint32_t first = 0; first < items.count; first += 32) {
      const bool inside = first + Lane() < items.count;
      const uint64_t key = inside ? source[items.begin + first + Lane()] : 0;
      const int32_t m = KeyMagnitude(key);
      const bool equal = inside && digits.ties != 0 && m == digits.cut;
      const uint32_t equals = __ballot_sync(kAllLanes, equal);
      const bool take =
          inside && (m > digits.cut || (equal && ties + RankIn(equals) < digits.ties));
      const uint32_t takes = __ballot_sync(kAllLanes, take);
      if (take) {
        source.Put(place + RankIn(takes), key);
        sum += __int_as_float(m);
      }
      place += __popc(takes);
      ties += __popc(equals);
    }
    sum = WarpReduce(sum, Add());
    if (Lane() == 0) source.EndChunk(chunk, begin, place - begin, sum);
  }
  if (Source::kPhase == kRefine || !tensor.quantized) return;
  if (!IsLastBlock(&tensor.state->histogram.ticket, tensor.groups())) return;
  double sum = 0;
  for (uint32_t c = threadIdx.x; c < tensor.chunks(); c += kThreads) sum += tensor.stats[c].sum;
  sum = BlockReduce(sum, Add());
  const int32_t count = tensor.part[0];
  if (threadIdx.x != 0 || count == 0) return;
  const float mean = static_cast<float>(sum / count);
  tensor.part[ValuesAt(true, tensor.k)] = __float_as_int(*batch.side < 0 ? -mean : mean);
}

}  // namespace gpu
}  // namespace redsync

#endif  // TF_REDSYNC_CUSTOM_OPS_CORE_GPU_COMPACTION_CUH_
