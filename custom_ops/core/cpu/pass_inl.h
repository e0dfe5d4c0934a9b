// The vector code of pass.cc, which includes this file once per instruction set, each time inside a
// namespace and with these defined: REDSYNC_LANES (floats in a register) and
// MaskAbove(vector of int32, int32_t threshold), which sets bit i if lane i is above the threshold,
// AnyAbove(), which is MaskAbove() != 0, Stream(float*, vector), an aligned store past the caches,
// and Sqrt(vector).
//
// No include guard, no include: pass.cc does that before it switches the instruction set on.

typedef float F __attribute__((vector_size(4 * REDSYNC_LANES)));
typedef int32_t I __attribute__((vector_size(4 * REDSYNC_LANES)));
typedef float HalfF __attribute__((vector_size(2 * REDSYNC_LANES)));
typedef double D __attribute__((vector_size(4 * REDSYNC_LANES)));
typedef uint16_t HalfI __attribute__((vector_size(2 * REDSYNC_LANES)));

constexpr int kGroup = 64;     // Elements between two comparisons with the threshold.
constexpr int kSumLanes = 16;  // Partial sums of a block: the same for all instruction sets.
constexpr int kSumVectors = kSumLanes / (REDSYNC_LANES / 2);

// Tensors are aligned to their elements only: vectors are copied in and out, which compiles to
// unaligned loads and stores.
template <class Vector>
static inline __attribute__((always_inline)) Vector Load(const void* memory) {
  Vector vector;
  __builtin_memcpy(&vector, memory, sizeof(vector));
  return vector;
}

template <class Vector>
static inline __attribute__((always_inline)) void Store(float* memory, const Vector& vector) {
  __builtin_memcpy(memory, &vector, sizeof(vector));
}

static inline __attribute__((always_inline)) I Max(I a, I b) { return a > b ? a : b; }

static inline __attribute__((always_inline)) int32_t MaxLane(const I& v) {
  int32_t best = v[0];
  for (int i = 1; i < REDSYNC_LANES; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

// Statistics that a block accumulates.
struct Lanes {
  I max;
  I max_absolute;
  D sum[kSumVectors];
};

// Accumulates kGroup elements. Returns the largest magnitude of each lane. With kStream the results
// bypass the caches, so that memory is not read before it is overwritten, and `copy` gets the new
// residual as well.
template <Momentum kMomentum, bool kSum, bool kStream>
static inline __attribute__((always_inline)) I AccumulateGroup(const PassArgs& args, const float* g,
                                                               const float* v, const float* u,
                                                               float* new_v, float* new_u,
                                                               float* copy, Lanes* lanes) {
  I group_max = I{} + INT32_MIN;
  for (int j = 0; j < kGroup; j += REDSYNC_LANES) {
    const F t = args.scale * Load<F>(g + j);
    F value = Load<F>(v + j);
    if (kMomentum == Momentum::kNone) {
      value = value + t;
    } else {
      F speed = Load<F>(u + j);
      if (kMomentum == Momentum::kNesterov) {
        speed = args.factor * (speed + t);
        value = (value + speed) + t;
      } else if (kMomentum == Momentum::kAdam) {
        const F kept = args.adam.keep * speed, square = t * t;
        speed = kept + (args.adam.gain * square);
        value = value + t / (Sqrt(kept + (args.adam.own * square)) + args.adam.epsilon);
        const F nan_if_infinite = speed - speed;
        lanes->max_absolute = Max(lanes->max_absolute, Load<I>(&nan_if_infinite) & 0x7fffffff);
      } else {
        speed = (args.factor * speed) + t;
        value = value + speed;
      }
      if (Keeps(kMomentum)) {
        kStream ? Stream(new_u + j, speed) : Store(new_u + j, speed);
      }
    }
    if (kStream) {
      Stream(new_v + j, value);
      Store(copy + j, value);
    } else {
      Store(new_v + j, value);
    }
    const I bits = Load<I>(&value);
    const I magnitude = (bits & args.magnitude.keep) ^ args.magnitude.flip;
    group_max = Max(group_max, magnitude);
    lanes->max_absolute = Max(lanes->max_absolute, bits & 0x7fffffff);
    if (kSum) {
      const int lane = 2 * (j / REDSYNC_LANES) % kSumVectors;
      lanes->sum[lane] += __builtin_convertvector(Load<HalfF>(&magnitude), D);
      lanes->sum[lane + 1] += __builtin_convertvector(
          Load<HalfF>(reinterpret_cast<const char*>(&magnitude) + sizeof(HalfF)), D);
    }
  }
  lanes->max = Max(lanes->max, group_max);
  return group_max;
}

// Buffer of keys to be appended to the pool.
struct KeyBuffer {
  CandidatePool* pool;
  int32_t threshold;
  int64_t count = 0;
  uint64_t keys[CandidatePool::kFlush + kGroup];

  void Flush() {
    pool->Append(keys, count);
    count = 0;
    if (pool->overflowed()) threshold = INT32_MAX;  // Refine() finds the candidates then.
  }
};

// Collects the candidates among kGroup elements.
static inline void Pick(const float* values, Magnitude magnitude, int64_t index,
                        KeyBuffer* buffer) {
  static_assert(kGroup == 64, "one bit of `mask` per element");
  uint64_t mask = 0;
  for (int j = 0; j < kGroup; j += REDSYNC_LANES) {
    const I bits = Load<I>(values + j);
    const I magnitudes = (bits & magnitude.keep) ^ magnitude.flip;
    mask |= static_cast<uint64_t>(MaskAbove(magnitudes, buffer->threshold)) << j;
  }
  // Usually one iteration, so the branch is predicted.
  int64_t count = buffer->count;
  for (; mask != 0; mask &= mask - 1) {
    const int lane = __builtin_ctzll(mask);
    const int32_t bits = BitsOf(values[lane]);
    buffer->keys[count++] = MakeKey(magnitude(bits), index + lane, bits < 0);
  }
  buffer->count = count;
  if (count >= CandidatePool::kFlush) buffer->Flush();
}

// Returns the gradient's kGroup elements from `begin` on; bfloat16 is widened into `wide`.
template <bool kBfloat16>
static inline __attribute__((always_inline)) const float* GroupOf(const PassArgs& args,
                                                                  int64_t begin, float* wide) {
  if (!kBfloat16) return args.grad + begin;
  for (int j = 0; j < kGroup; j += REDSYNC_LANES) {
    const HalfI bits = Load<HalfI>(args.bfloat16_grad + begin + j);
    Store(wide + j, __builtin_convertvector(bits, I) << 16);
  }
  return wide;
}

// The last elements of a tensor, fewer than kGroup, padded with zeros.
template <Momentum kMomentum, bool kSum>
static void AccumulateTail(const PassArgs& args, int64_t begin, int64_t size, Lanes* lanes,
                           KeyBuffer* buffer) {
  float g[kGroup] = {}, v[kGroup] = {}, u[kGroup] = {};
  if (args.bfloat16_grad) {
    for (int64_t i = 0; i < size; ++i) g[i] = Widened(args.bfloat16_grad[begin + i]);
  } else {
    std::memcpy(g, args.grad + begin, size * sizeof(float));
  }
  std::memcpy(v, args.residual + begin, size * sizeof(float));
  if (kMomentum != Momentum::kNone) std::memcpy(u, args.velocity + begin, size * sizeof(float));
  AccumulateGroup<kMomentum, kSum, false>(args, g, v, u, v, u, nullptr, lanes);
  std::memcpy(args.new_residual + begin, v, size * sizeof(float));
  if (Keeps(kMomentum)) std::memcpy(args.new_velocity + begin, u, size * sizeof(float));
  Pick(v, args.magnitude, begin, buffer);  // Padding is never above the threshold.
}

template <Momentum kMomentum, bool kSum, bool kStream, bool kBfloat16>
static void AccumulateBlock(const PassArgs& args, int64_t begin, int64_t end, BlockStats* stats,
                            KeyBuffer* buffer) {
  Lanes lanes = {};
  lanes.max += INT32_MIN;
  alignas(64) float copy[kGroup], wide[kGroup];
  int64_t i = begin;
  for (; i + kGroup <= end; i += kGroup) {
    const bool has_u = kMomentum != Momentum::kNone;
    const I group_max = AccumulateGroup<kMomentum, kSum, kStream>(
        args, GroupOf<kBfloat16>(args, i, wide), args.residual + i,
        has_u ? args.velocity + i : nullptr, args.new_residual + i,
        Keeps(kMomentum) ? args.new_velocity + i : nullptr, copy, &lanes);
    if (AnyAbove(group_max, buffer->threshold)) {
      Pick(kStream ? copy : args.new_residual + i, args.magnitude, i, buffer);
    }
  }
  if (i < end) AccumulateTail<kMomentum, kSum>(args, i, end - i, &lanes, buffer);
  stats->max = MaxLane(lanes.max);
  stats->max_absolute = MaxLane(lanes.max_absolute);
  stats->sum = 0;
  for (int j = 0; kSum && j < kSumLanes; ++j) {
    stats->sum += lanes.sum[j / (REDSYNC_LANES / 2)][j % (REDSYNC_LANES / 2)];
  }
}

template <Momentum kMomentum, bool kSum, bool kStream>
static void AccumulateBlocks(const PassArgs& args, int64_t begin, int64_t end, BlockStats* stats,
                             CandidatePool* pool) {
  KeyBuffer buffer;
  buffer.pool = pool;
  buffer.threshold = args.threshold;
  for (int64_t i = begin; i < end; i += kBlock) {
    const auto accumulate = args.bfloat16_grad ? AccumulateBlock<kMomentum, kSum, kStream, true>
                                               : AccumulateBlock<kMomentum, kSum, kStream, false>;
    accumulate(args, i, i + kBlock < end ? i + kBlock : end, stats++, &buffer);
  }
  if (kStream) FenceStreams();
  buffer.Flush();
}

// Returns whether stores bypass the caches: the outputs are separate from the inputs and large.
static bool UseStreams(const PassArgs& args) {
  const uintptr_t places = reinterpret_cast<uintptr_t>(args.new_residual) |
                           reinterpret_cast<uintptr_t>(args.new_velocity);
  const bool in_place = args.new_residual == args.residual ||
                        (args.new_velocity != nullptr && args.new_velocity == args.velocity);
  return args.bypass_caches && !in_place && places % (4 * REDSYNC_LANES) == 0;
}

static void Accumulate(const PassArgs& args, int64_t begin, int64_t end, BlockStats* stats,
                       CandidatePool* pool) {
  const bool streams = UseStreams(args);
#define REDSYNC_RUN(momentum, sum)                                                      \
  return streams ? AccumulateBlocks<momentum, sum, true>(args, begin, end, stats, pool) \
                 : AccumulateBlocks<momentum, sum, false>(args, begin, end, stats, pool)
#define REDSYNC_CASE(momentum)                      \
  case momentum:                                    \
    if (args.need_sum) REDSYNC_RUN(momentum, true); \
    REDSYNC_RUN(momentum, false)
  switch (args.momentum) {
    REDSYNC_CASE(Momentum::kNone);
    REDSYNC_CASE(Momentum::kPlain);
    REDSYNC_CASE(Momentum::kNesterov);
    REDSYNC_CASE(Momentum::kUnkept);
    REDSYNC_CASE(Momentum::kAdam);
  }
#undef REDSYNC_CASE
#undef REDSYNC_RUN
}

static void Scan(const float* values, Magnitude magnitude, int32_t threshold, int64_t begin,
                 int64_t end, CandidatePool* pool) {
  KeyBuffer buffer;
  buffer.pool = pool;
  buffer.threshold = threshold;
  int64_t i = begin;
  for (; i + kGroup <= end; i += kGroup) {
    I group_max = I{} + INT32_MIN;
    for (int j = 0; j < kGroup; j += REDSYNC_LANES) {
      const I bits = Load<I>(values + i + j);
      group_max = Max(group_max, (bits & magnitude.keep) ^ magnitude.flip);
    }
    if (AnyAbove(group_max, buffer.threshold)) Pick(values + i, magnitude, i, &buffer);
  }
  if (i < end) {
    float tail[kGroup] = {};  // Padding is never above the threshold.
    std::memcpy(tail, values + i, (end - i) * sizeof(float));
    Pick(tail, magnitude, i, &buffer);
  }
  buffer.Flush();
}
