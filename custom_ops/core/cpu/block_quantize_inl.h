// The loops of block_quantize.cc, which includes this file once per instruction set, each time
// inside a namespace; the compiler vectorises them. No include guard, no include.

// The bits of the largest magnitude.
static int32_t Largest(const float* x, int n) {
  int32_t largest = 0;
  for (int i = 0; i < n; ++i) {
    const int32_t bits = MagnitudeBits(x[i]);
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// For each of kScales scales, writes the reduction of the sum of squares: the sum of scale (2 |x| -
// scale) over the elements above scale / 2. It adds in 16 lanes, then pairs of lanes, so the order
// is the same on all devices. n is a multiple of 16.
static void Saved(const float* x, int64_t n, const float* scales, float* saved) {
  for (int s = 0; s < kScales; ++s) {
    const float half = 0.5f * scales[s];
    float lanes[16] = {};
    for (int64_t i = 0; i < n; i += 16) {
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) {
        const float above = FloatOf(MagnitudeBits(x[i + j])) - half;
        lanes[j] += above > 0.0f ? above : 0.0f;
      }
    }
    for (int distance = 8; distance > 0; distance /= 2) {
      for (int j = 0; j < distance; ++j) lanes[j] += lanes[j + distance];
    }
    saved[s] = 2.0f * lanes[0] * scales[s];
  }
}

// Returns x / unit, clamped to [-limit, limit].
static float Steps(float x, const Step& step) {
  const float most = static_cast<float>(step.limit);
  const float steps = x * step.inverse;
  const float low = steps < most ? steps : most;
  return low > -most ? low : -most;
}

// Rounds x / unit to integers, half to even.
static void EncodeIntegers(const float* x, int n, const Step& step, int8_t* codes, float* errors) {
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) {
    const float value = x[i];
    const float steps = Steps(value, step);
    const int32_t code = BitsOf(steps + kRound) - kRoundBits;
    codes[i] = static_cast<int8_t>(code);
    if (errors) errors[i] = value - static_cast<float>(code) * step.unit;
  }
}

// Rounds x / unit to 0, 1, 2, 3, 4, 6, 8, 12 or their negatives, half to even. A code is a sign, at
// 8, and the position in this list.
static void EncodeFloats(const float* x, int n, const Step& step, int8_t* codes, float* errors) {
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) {
    const float value = x[i];
    const float steps = Steps(value, step);
    const float size = FloatOf(MagnitudeBits(steps));
    // Adding and subtracting it rounds to multiples of 1, 2 and 4.
    const float round = size < 4.0f ? kRound : size < 8.0f ? 2.0f * kRound : 4.0f * kRound;
    const float level = (steps + round) - round;
    const int32_t units = static_cast<int32_t>(FloatOf(MagnitudeBits(level)));
    const int32_t place = units < 4 ? units : units < 8 ? 2 + units / 2 : 4 + units / 4;
    codes[i] = static_cast<int8_t>(place | (level < 0.0f ? 8 : 0));
    if (errors) errors[i] = value - level * step.unit;
  }
}

static void Encode(int bits, const float* x, int n, const Step& step, int8_t* codes,
                   float* errors) {
  (bits == 4 ? EncodeFloats : EncodeIntegers)(x, n, step, codes, errors);
}

// Packs codes of 8, 4 or 2 bits, the first one lowest, into n * bits / 8 bytes. The codes of a byte
// are read as one integer.
static void Pack(int bits, const int8_t* codes, int n, uint8_t* packed) {
  if (bits == 8) {
    __builtin_memcpy(packed, codes, n);
  } else if (bits == 4) {
    for (int i = 0; i < n / 2; ++i) {
      uint16_t two;
      __builtin_memcpy(&two, codes + 2 * i, sizeof(two));
      packed[i] = static_cast<uint8_t>((two & 15) | (two >> 4 & 0xf0));
    }
  } else {
    for (int i = 0; i < n / 4; ++i) {
      uint32_t four;
      __builtin_memcpy(&four, codes + 4 * i, sizeof(four));
      packed[i] = static_cast<uint8_t>((four & 3) | (four >> 6 & 0xc) | (four >> 12 & 0x30) |
                                       (four >> 18 & 0xc0));
    }
  }
}

// Decodes packed codes to multiples of the unit.
static void Unpack(int bits, const uint8_t* packed, int n, int8_t* codes) {
  if (bits == 8) {
    __builtin_memcpy(codes, packed, n);
  } else if (bits == 4) {
    for (int i = 0; i < n / 2; ++i) {
      const uint32_t two = packed[i];
      const auto both = static_cast<uint16_t>((two & 15) | (two & 0xf0) << 4);
      __builtin_memcpy(codes + 2 * i, &both, sizeof(both));
    }
    for (int i = 0; i < n; ++i) {
      const auto place = static_cast<int8_t>(codes[i] & 7);
      const auto more = static_cast<int8_t>((place > 4) + (place > 5) + 3 * (place > 6));
      const auto units = static_cast<int8_t>(place + more);
      codes[i] = static_cast<int8_t>(codes[i] & 8 ? -units : units);
    }
  } else {
    for (int i = 0; i < n / 4; ++i) {
      const uint32_t four = packed[i];
      uint32_t spread = (four & 3) | (four & 0xc) << 6 | (four & 0x30) << 12 | (four & 0xc0) << 18;
      spread = (spread ^ 0x02020202u) + 0x7e7e7e7eu;  // Each byte's code minus 2, plus 128.
      spread ^= 0x80808080u;
      __builtin_memcpy(codes + 4 * i, &spread, sizeof(spread));
    }
  }
}

static void Decode(const int8_t* codes, int n, float unit, float* out) {
  for (int i = 0; i < n; ++i) out[i] = static_cast<float>(codes[i]) * unit;
}

static void Add(const int8_t* codes, int n, float unit, float* out) {
  for (int i = 0; i < n; ++i) out[i] += static_cast<float>(codes[i]) * unit;
}
