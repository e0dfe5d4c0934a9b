// Selection of the largest sums of a sparse merge: choice of the cut, and placement.
#include "custom_ops/core/gpu/merge.cuh"
#include "custom_ops/core/gpu/records.cuh"

namespace redsync {
namespace gpu {
namespace {

// Source of NextDigit().
struct Source {
  const MergeItem& item;

  __device__ uint32_t rank() const { return static_cast<uint32_t>(item.blocks.k); }
  __device__ uint64_t operator[](uint32_t i) const {
    const uint64_t sum = item.sums[i];
    return MakeKey(static_cast<int32_t>(sum) & INT32_MAX, static_cast<uint32_t>(sum >> 32));
  }
  __device__ void Found(uint32_t, Digits* digits) const { digits->ties = rank() - digits->above; }
  __device__ void NotFound(uint32_t, Digits* digits) const { digits->cut = 0; }
};

__global__ void __launch_bounds__(kThreads)
    FindDigit(REDSYNC_PARAMETER MergeGroup call, int level) {
  const int item_index = call.Find();
  const MergeItem& item = call.items[item_index];
  if (!IsClear(*call.record) || item.blocks.k == 0 || item.state->digits.done) return;
  const Range part = Part(item.entries, call.Block(item_index), call.Blocks(item_index));
  __shared__ uint32_t bins[kBins];
  NextDigit(Source{item}, part, level, call.Blocks(item_index), bins, &item.state->histogram,
            &item.state->digits);
}

// Classes of 32 neighbours, one per lane: sums above the cut, ties that may be kept, and all sums.
struct Choice {
  uint32_t above, ties, all;  // Ballots.
  bool is_above, is_tie, is_sum;

  __device__ Choice(const MergeItem& item, uint32_t i, uint32_t end) {
    const Digits& digits = item.state->digits;
    const int32_t cut = item.blocks.k == 0 ? INT32_MAX : digits.cut;
    const int32_t m = i < end ? KeyMagnitude(Source{item}[i]) : 0;
    is_sum = m > 0;
    is_above = m > cut;
    is_tie = is_sum && digits.ties != 0 && m == cut;
    above = __ballot_sync(kAllLanes, is_above);
    ties = __ballot_sync(kAllLanes, is_tie);
    all = __ballot_sync(kAllLanes, is_sum);
  }
};

// Returns the number of kept sums: those above the cut, and the first ties.
__device__ inline uint32_t Kept(const MergeItem& item, uint32_t above, uint32_t ties) {
  const uint32_t most = item.state->digits.ties;
  return above + (ties < most ? ties : most);
}

__device__ inline Range Slice(const MergeItem& item, uint32_t slice) {
  const uint32_t begin = slice * kSlice, left = item.entries - begin;
  return {begin, left < kSlice ? left : kSlice};
}

// One warp per slice; the last block computes prefix sums.
__global__ void __launch_bounds__(kThreads) Count(REDSYNC_PARAMETER MergeGroup call) {
  const int item_index = call.Find();
  const MergeItem& item = call.items[item_index];
  if (!IsClear(*call.record)) return;
  const uint32_t slice = call.Block(item_index) * kWarps + Warp();
  if (slice < item.slices()) {
    const Range part = Slice(item, slice);
    Tally<3> tally = {};
    for (uint32_t i = 0; i < part.count; i += 32) {
      const Choice choice(item, part.begin + i + Lane(), part.begin + part.count);
      tally.at[0] += __popc(choice.above);
      tally.at[1] += __popc(choice.ties);
      tally.at[2] += __popc(choice.all);
    }
    if (Lane() == 0) item.before[slice] = tally;
  }
  if (!IsLastBlock(&item.state->histogram.ticket, call.Blocks(item_index))) return;
  const Tally<3> total = ScanTallies(item.before, item.slices());
  if (threadIdx.x != 0) return;
  const uint32_t kept = Kept(item, total.at[0], total.at[1]);
  *item.kept = static_cast<int32_t>(kept);
  *item.dropped = static_cast<int32_t>(total.at[2] - kept);
}

__global__ void __launch_bounds__(kThreads) Place(REDSYNC_PARAMETER MergeGroup call) {
  const int item_index = call.Find();
  const MergeItem& item = call.items[item_index];
  const RedsyncGpuBlocks& b = item.blocks;
  const uint32_t slice = call.Block(item_index) * kWarps + Warp();
  if (!IsClear(*call.record) || slice >= item.slices()) return;
  const Range part = Slice(item, slice);
  Tally<3> before = item.before[slice];
  for (uint32_t i = 0; i < part.count; i += 32) {
    const uint32_t at = part.begin + i + Lane();
    const Choice choice(item, at, part.begin + part.count);
    const uint32_t ties = before.at[1] + RankIn(choice.ties);
    const uint32_t kept = Kept(item, before.at[0] + RankIn(choice.above), ties);
    const uint32_t dropped = before.at[2] + RankIn(choice.all) - kept;
    if (choice.is_sum) {
      const uint64_t sum = item.sums[at];
      const bool keep = choice.is_above || (choice.is_tie && ties < item.state->digits.ties);
      const uint32_t place = keep ? kept : dropped;
      (keep ? b.kept_indices : b.dropped_indices)[place] = static_cast<uint32_t>(sum >> 32);
      (keep ? b.kept_values : b.dropped_values)[place] = __int_as_float(static_cast<int32_t>(sum));
    }
    before.at[0] += __popc(choice.above);
    before.at[1] += __popc(choice.ties);
    before.at[2] += __popc(choice.all);
  }
}

}  // namespace

void LaunchMergeSelect(const MergeGroup& group, uint32_t blocks, cudaStream_t stream) {
  for (int level = 0; level < kLevels; ++level) {
    REDSYNC_LAUNCH(FindDigit, blocks, kThreads, stream, group, level);
  }
  REDSYNC_LAUNCH(Count, blocks, kThreads, stream, group);
  REDSYNC_LAUNCH(Place, blocks, kThreads, stream, group);
}

}  // namespace gpu
}  // namespace redsync
