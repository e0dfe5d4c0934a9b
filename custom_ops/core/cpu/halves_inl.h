// The loops of halves.cc, which includes this file once per instruction set, each time inside a
// namespace; the compiler vectorises them. No include guard, no include.

// Rounds to the nearest float16, ties to even. Magnitudes of 65520 or more, and NaNs, become
// infinities.
struct Float16 {
  static uint32_t Rounded(uint32_t x) {
    const uint32_t magnitude = x & 0x7fffffffu, odd = magnitude >> 13 & 1u;
    // The last mantissa bit of 0.5 is the spacing of float16's denormals.
    const auto small = static_cast<uint32_t>(BitsOf(FloatOfBits(magnitude) + 0.5f)) - 0x3f000000u;
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + odd) >> 13;
    const uint32_t in_range = magnitude < 0x38800000u ? small : normal;
    return (magnitude < 0x477ff000u ? in_range : 0x7c00u) | (x >> 16 & 0x8000u);
  }
  static float Value(uint32_t half) {
    const uint32_t magnitude = (half & 0x7fffu) << 13;
    const float small = FloatOfBits(magnitude + 0x38800000u) - 0x1p-14f;
    const uint32_t normal = magnitude + (magnitude < 0xf800000u ? 0x38000000u : 0x70000000u);
    const uint32_t bits = magnitude < 0x800000u ? static_cast<uint32_t>(BitsOf(small)) : normal;
    return FloatOfBits(bits | (half & 0x8000u) << 16);
  }
  static uint32_t NotFinite(uint32_t half) { return (half & 0x7c00u) == 0x7c00u; }
};

// Rounds to the nearest bfloat16, ties to even. A NaN becomes an infinity or a NaN.
struct Bfloat16 {
  static uint32_t Rounded(uint32_t x) {
    const uint32_t rounded = HalfOf(static_cast<int32_t>(x));
    return (x & 0x7f800000u) == 0x7f800000u ? x >> 16 : rounded;
  }
  static float Value(uint32_t half) { return FloatOfBits(half << 16); }
  static uint32_t NotFinite(uint32_t half) { return (half & 0x7f80u) == 0x7f80u; }
};

// Rounds n sums x + residual; returns whether all results are finite. `errors` may be an input.
template <class Half>
static bool EncodeSum(const float* x, const float* residual, int64_t n, uint16_t* halves,
                      float* errors) {
  uint32_t wrong = 0;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const float value = x[i] + residual[i];
    const uint32_t half = Half::Rounded(static_cast<uint32_t>(BitsOf(value)));
    wrong |= Half::NotFinite(half);
    halves[i] = static_cast<uint16_t>(half);
    errors[i] = value - Half::Value(half);
  }
  return wrong == 0;
}

// The same as EncodeSum() without a residual.
template <class Half>
static bool Encode(const float* x, int64_t n, uint16_t* halves, float* errors) {
  uint32_t wrong = 0;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const float value = x[i];
    const uint32_t half = Half::Rounded(static_cast<uint32_t>(BitsOf(value)));
    wrong |= Half::NotFinite(half);
    halves[i] = static_cast<uint16_t>(half);
    errors[i] = value - Half::Value(half);
  }
  return wrong == 0;
}

template <class Half>
static void Decode(const uint16_t* halves, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = Half::Value(halves[i]);
}

template <class Half>
static void Add(const uint16_t* halves, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] += Half::Value(halves[i]);
}
