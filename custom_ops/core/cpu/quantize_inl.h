// The loops of quantize.cc, which includes this file once per instruction set, each time inside a
// namespace; the compiler vectorises them. No include guard, no include.

// Packs 32 codes of kBits bits, the first one lowest, into kBits words, and unpacks them.
template <int kBits>
static inline __attribute__((always_inline)) void PackGroup(const uint32_t* codes,
                                                            uint32_t* words) {
  for (int w = 0; w < kBits; ++w) words[w] = 0;
#pragma GCC unroll 32
  for (int j = 0; j < 32; ++j) {
    const int at = j * kBits, shift = at % 32;
    words[at / 32] |= codes[j] << shift;
    if (shift + kBits > 32) words[at / 32 + 1] |= codes[j] >> (32 - shift);
  }
}

template <int kBits>
static inline __attribute__((always_inline)) void UnpackGroup(const uint32_t* words,
                                                              uint32_t* codes) {
#pragma GCC unroll 32
  for (int j = 0; j < 32; ++j) {
    const int at = j * kBits, shift = at % 32;
    uint32_t code = words[at / 32] >> shift;
    if (shift + kBits > 32) code |= words[at / 32 + 1] << (32 - shift);
    codes[j] = code & ((1u << kBits) - 1);
  }
}

template <int kBits>
static void PackPiece(const uint32_t* codes, int groups, uint32_t* words) {
  for (int g = 0; g < groups; ++g) PackGroup<kBits>(codes + 32 * g, words + kBits * g);
}

template <int kBits>
static void UnpackPiece(const uint32_t* words, int groups, uint32_t* codes) {
  for (int g = 0; g < groups; ++g) UnpackGroup<kBits>(words + kBits * g, codes + 32 * g);
}

// Packs codes of `bits` bits in groups of 32.
static void Pack(int bits, const uint32_t* codes, int groups, uint32_t* words) {
  switch (bits) {
#define REDSYNC_CASE(b) \
  case b:               \
    return PackPiece<b>(codes, groups, words);
    REDSYNC_FOR_BITS(REDSYNC_CASE)
#undef REDSYNC_CASE
  }
}

static void Unpack(int bits, const uint32_t* words, int groups, uint32_t* codes) {
  switch (bits) {
#define REDSYNC_CASE(b) \
  case b:               \
    return UnpackPiece<b>(words, groups, codes);
    REDSYNC_FOR_BITS(REDSYNC_CASE)
#undef REDSYNC_CASE
  }
}

// Philox4x32-10 of `blocks` counters (first, first + 1, .. ; high0, high1): 4 words each to `out`.
static void Philox(uint32_t key0, uint32_t key1, uint64_t first, uint32_t high0, uint32_t high1,
                   int blocks, uint32_t* out) {
  uint32_t c0[kPiece / 4], c1[kPiece / 4], c2[kPiece / 4], c3[kPiece / 4];
  for (int i = 0; i < blocks; ++i) {
    const uint64_t counter = first + static_cast<uint64_t>(i);
    c0[i] = static_cast<uint32_t>(counter);
    c1[i] = static_cast<uint32_t>(counter >> 32);
    c2[i] = high0;
    c3[i] = high1;
  }
  for (int i = 0; i < blocks; ++i) {
    uint32_t a = c0[i], b = c1[i], c = c2[i], d = c3[i], k0 = key0, k1 = key1;
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const uint64_t p = uint64_t{0xD2511F53u} * a, q = uint64_t{0xCD9E8D57u} * c;
      const uint32_t next_a = static_cast<uint32_t>(q >> 32) ^ b ^ k0;
      const uint32_t next_c = static_cast<uint32_t>(p >> 32) ^ d ^ k1;
      b = static_cast<uint32_t>(q);
      d = static_cast<uint32_t>(p);
      a = next_a;
      c = next_c;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    c0[i] = a;
    c1[i] = b;
    c2[i] = c;
    c3[i] = d;
  }
  for (int i = 0; i < blocks; ++i) {
    out[4 * i] = c0[i];
    out[4 * i + 1] = c1[i];
    out[4 * i + 2] = c2[i];
    out[4 * i + 3] = c3[i];
  }
}

static inline __attribute__((always_inline)) uint32_t Bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

static inline __attribute__((always_inline)) uint32_t MagnitudeBits(float value) {
  return Bits(value) & 0x7fffffffu;
}

static inline __attribute__((always_inline)) float Float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

// Rounds y >= 0 up with probability y - floor(y), else down.
static inline __attribute__((always_inline)) int32_t RoundAtRandom(float y, uint32_t random) {
  const int32_t floor = static_cast<int32_t>(y);
  const float uniform = static_cast<float>(static_cast<int32_t>(random >> 8)) * 0x1p-24f;
  return floor + (uniform < y - static_cast<float>(floor) ? 1 : 0);
}

// Decodes exponent and sign to a power of two, or to zero.
static inline __attribute__((always_inline)) float PowerOf(uint32_t code) {
  return Float(code >> 1 << 23 | code << 31);
}

// The loops over a piece. Each returns the maximum of the bits of absolute values, from which the
// caller checks that all are finite. With kErrors they also write x - decoded.
template <bool kErrors>
static uint32_t EncodeBinary(const float* x, int n, const Levels& levels, uint32_t* codes,
                             float* errors) {
  uint32_t largest = 0;
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) {
    const float value = x[i];
    const uint32_t bits = MagnitudeBits(value);
    largest = bits > largest ? bits : largest;
    const bool up = value >= 0;
    codes[i] = up;
    if (kErrors) errors[i] = value - (up ? levels.high : levels.low);
  }
  return largest;
}

template <bool kErrors>
static uint32_t EncodeThreshold(const float* x, int n, const Levels& levels, uint32_t* codes,
                                float* errors) {
  uint32_t largest = 0;
  const float scale = levels.high;
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) {
    const float value = x[i];
    const uint32_t bits = MagnitudeBits(value);
    largest = bits > largest ? bits : largest;
    const int32_t level = (value >= scale ? 1 : 0) - (value <= -scale ? 1 : 0);
    codes[i] = static_cast<uint32_t>(1 + level);
    if (kErrors) errors[i] = value - static_cast<float>(level) * scale;
  }
  return largest;
}

template <bool kErrors>
static uint32_t EncodeStochastic(const float* x, int n, const Levels& levels,
                                 const uint32_t* random, uint32_t* codes, float* errors) {
  uint32_t largest = 0;
  const float s = static_cast<float>(levels.s), scale = levels.high, unit = levels.unit;
  const int32_t zero = levels.s;
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) {
    const float value = x[i];
    const uint32_t bits = MagnitudeBits(value);
    largest = bits > largest ? bits : largest;
    const float y = (Float(bits) / scale) * s;
    const int32_t level = RoundAtRandom(y < s ? y : s, random[i]);  // s if y is NaN.
    const int32_t code = value < 0 ? -level : level;
    codes[i] = static_cast<uint32_t>(zero + code);
    if (kErrors) errors[i] = value - static_cast<float>(code) * unit;
  }
  return largest;
}

template <bool kErrors>
static uint32_t EncodeUniform(const float* x, int n, const Levels& levels, const uint32_t* random,
                              uint32_t* codes, float* errors) {
  uint32_t largest = 0;
  const float s = static_cast<float>(levels.s), scale = levels.high, unit = levels.unit;
  const int32_t middle = levels.s;
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) {
    const float value = x[i];
    const uint32_t bits = MagnitudeBits(value);
    largest = bits > largest ? bits : largest;
    const float y = (value / scale + 1.0f) * (s * 0.5f);
    const float positive = y > 0.0f ? y : 0.0f;  // 0 if y is NaN.
    const int32_t code = RoundAtRandom(positive < s ? positive : s, random[i]);
    codes[i] = static_cast<uint32_t>(code);
    if (kErrors) errors[i] = value - static_cast<float>(2 * code - middle) * unit;
  }
  return largest;
}

template <bool kErrors>
static uint32_t EncodeNatural(const float* x, int n, const uint32_t* random, uint32_t* codes,
                              float* errors) {
  uint32_t largest = 0;
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) {
    const float value = x[i];
    const uint32_t bits = Bits(value);
    const uint32_t rounded = (bits & 0x7fffffffu) + (random[i] >> 9);
    largest = rounded > largest ? rounded : largest;
    const uint32_t code = (rounded >> 23 << 1) | bits >> 31;
    codes[i] = code;
    if (kErrors) errors[i] = value - PowerOf(code);
  }
  return largest;
}

static uint32_t Encode(Quantizer quantizer, const float* x, int n, const Levels& levels,
                       const uint32_t* random, uint32_t* codes, float* errors) {
  switch (quantizer) {
    case Quantizer::kSign:
    case Quantizer::kTwoLevel:
      return errors ? EncodeBinary<true>(x, n, levels, codes, errors)
                    : EncodeBinary<false>(x, n, levels, codes, errors);
    case Quantizer::kThreshold:
      return errors ? EncodeThreshold<true>(x, n, levels, codes, errors)
                    : EncodeThreshold<false>(x, n, levels, codes, errors);
    case Quantizer::kStochastic:
      return errors ? EncodeStochastic<true>(x, n, levels, random, codes, errors)
                    : EncodeStochastic<false>(x, n, levels, random, codes, errors);
    case Quantizer::kUniform:
      return errors ? EncodeUniform<true>(x, n, levels, random, codes, errors)
                    : EncodeUniform<false>(x, n, levels, random, codes, errors);
    case Quantizer::kNatural:
      return errors ? EncodeNatural<true>(x, n, random, codes, errors)
                    : EncodeNatural<false>(x, n, random, codes, errors);
  }
  return 0;
}

// Adds the values of codes to `out`; returns the largest code.
static uint32_t AddBinary(const uint32_t* codes, int n, const Levels& levels, float* out) {
  for (int i = 0; i < n; ++i) out[i] += codes[i] ? levels.high : levels.low;
  return 0;
}

static uint32_t AddLevels(const uint32_t* codes, int n, const Levels& levels, float* out) {
  uint32_t largest = 0;
  for (int i = 0; i < n; ++i) {
    largest = codes[i] > largest ? codes[i] : largest;
    const int32_t steps = static_cast<int32_t>(codes[i] << levels.shift) - levels.s;
    out[i] += static_cast<float>(steps) * levels.unit;
  }
  return largest;
}

static uint32_t AddPowers(const uint32_t* codes, int n, const Levels&, float* out) {
  uint32_t largest = 0;
  for (int i = 0; i < n; ++i) {
    largest = codes[i] > largest ? codes[i] : largest;
    out[i] += PowerOf(codes[i]);
  }
  return largest;
}
