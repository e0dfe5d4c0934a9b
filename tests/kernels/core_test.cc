// Tests core/cpu without TensorFlow against brute force. It prints a digest of all results, which
// must not depend on the number of threads (argument 1) or on TF_REDSYNC_SIMD. One run with brute
// force therefore serves all; "digest" as argument 2 skips brute force.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "custom_ops/core/cpu/select.h"
#include "custom_ops/core/cpu/sum_messages.h"
#include "tests/kernels/core_testing.h"

namespace redsync {
namespace {

using testing::Check;
using testing::Mix;

// Kinds of input; the last three defeat the prediction from a sample.
const char* const kKinds[] = {"normal", "heavy", "zero",      "constant",  "ties",
                              "sparse", "spike", "clustered", "two_levels"};

std::vector<float> Make(const std::string& kind, int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (int64_t i = 0; i < n; ++i) {
    const float z = normal(random);
    x[i] = kind == "normal"      ? z
           : kind == "heavy"     ? z * z * z * z * z
           : kind == "zero"      ? 0
           : kind == "constant"  ? 0.3f
           : kind == "ties"      ? std::floor(2 * z)
           : kind == "sparse"    ? (random() % 1000 == 0 ? z : 0)
           : kind == "spike"     ? (i == n / 2 ? 1e3f : z)
           : kind == "clustered" ? (i >= n / 3 && i < n / 3 + 300 ? 9 + z : z * 1e-3f)
                                 : (i % 16 < 2 ? 1.0f : 2.0f + z * 1e-6f);
  }
  return x;
}

bool brute_force = true;

struct Case {
  SelectOptions options;
  std::vector<float> g, v, u, new_v, new_u, new_v_over_g, new_u_over_g;
  std::vector<uint32_t> indices;
  std::vector<int32_t> values;
  SelectResult result;
};

void Run(Case* c, const ParallelFor& threads) {
  const SelectOptions& o = c->options;
  const int64_t slots = o.k;
  c->new_v = c->v;
  c->new_u = c->u;
  c->indices.assign(slots, 0);
  c->values.assign(slots, 0);
  SelectBuffers b;
  b.grad = c->g.data();
  b.residual = b.new_residual = c->new_v.data();  // In place.
  b.velocity = b.new_velocity = c->new_u.data();
  b.indices = c->indices.data();
  b.values = o.quantized ? nullptr : c->values.data();
  // Exactly the required memory: the sanitizer detects accesses beyond it.
  const int64_t bytes = SelectScratchBytes(o.size, o.k, o.selector);
  std::vector<double> scratch(CeilDiv(bytes, sizeof(double)));
  SelectResult* r = &c->result;
  if (bytes > 0) {
    Check(AccumulateAndSelect(o, b, scratch.data(), bytes - 1, threads, r) ==
              Status::kScratchTooSmall,
          "too little scratch memory is noticed");
  }
  Check(AccumulateAndSelect(o, b, scratch.data(), bytes, threads, r) == Status::kOk, "status");
  Mix(c->indices.data(), r->count * sizeof(int32_t));
  Mix(c->values.data(), c->values.size() * sizeof(int32_t));
  Mix(c->new_v.data(), c->new_v.size() * sizeof(float));
  Mix(c->new_u.data(), c->new_u.size() * sizeof(float));
  Mix(&r->mean, sizeof(float));
  Mix(&r->ratio, sizeof(float));

  if (!r->finite) return;  // The outputs are unspecified.
  // Again with one of the outputs in the gradient's memory.
  const bool has_u = o.momentum != Momentum::kNone;
  for (std::vector<float>* over_g : {&c->new_v_over_g, &c->new_u_over_g}) {
    std::vector<float> other(o.size);
    *over_g = c->g;
    const bool residual = over_g == &c->new_v_over_g;
    b.grad = over_g->data();
    b.residual = c->v.data();
    b.velocity = c->u.data();
    b.new_residual = residual ? over_g->data() : other.data();
    b.new_velocity = residual ? other.data() : over_g->data();
    if (!residual && !has_u) break;
    SelectResult again;
    Check(AccumulateAndSelect(o, b, scratch.data(), bytes, threads, &again) == Status::kOk,
          "status of the gradient's reuse");
    Check(again.count == r->count && *over_g == (residual ? c->new_v : c->new_u) &&
              (!has_u || other == (residual ? c->new_u : c->new_v)),
          "the gradient's memory can take an output");
  }
}

// Brute force: all elements sorted by magnitude, then by index.
void Verify(const Case& c, const std::string& name) {
  if (!brute_force) return;
  const SelectOptions& o = c.options;
  std::vector<float> v(o.size), a(o.size);
  std::vector<int32_t> order;
  for (int64_t i = 0; i < o.size; ++i) {
    const float t = o.scale * c.g[i];
    float u = 0;
    if (o.momentum == Momentum::kNone) v[i] = c.v[i] + t;
    if (o.momentum == Momentum::kPlain) v[i] = c.v[i] + (u = o.factor * c.u[i] + t);
    if (o.momentum == Momentum::kNesterov) v[i] = c.v[i] + (u = o.factor * (c.u[i] + t)) + t;
    a[i] = !o.quantized ? std::fabs(v[i]) : o.positive_side ? v[i] : -v[i];
    if (a[i] > 0) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](int x, int y) { return a[x] > a[y]; });
  const int64_t count = c.result.count;
  const int64_t eligible = order.size();
  if (o.selector == Selector::kFixed) {
    const int64_t pass = std::count_if(a.begin(), a.end(), [&](float x) { return x >= o.ratio; });
    Check(count == std::min(pass, o.k) && c.result.ratio == o.ratio, name + ": fixed count");
  } else if (o.k >= o.size) {
    Check(count == eligible, name + ": all eligible are selected");
  } else if (o.selector != Selector::kThreshold) {
    Check(count == std::min(o.k, eligible), name + ": count");
  } else if (c.result.ratio >= 0) {
    Check(4 * count > 3 * o.k && count <= o.k, name + ": count is in the band");
  }
  Check(count <= eligible, name + ": no more than are eligible");
  order.resize(std::min(count, eligible));  // The largest are selected for any count.
  std::sort(order.begin(), order.end());
  Check(std::equal(order.begin(), order.end(), c.indices.begin()), name + ": indices");
  for (int64_t i = 0; i < static_cast<int64_t>(order.size()); ++i) {
    if (!o.quantized) Check(FloatOf(c.values[i]) == v[order[i]], name + ": value");
    v[order[i]] = 0;
  }
  Check(v == c.new_v, name + ": residual");
}

void TestSelect(const ParallelFor& threads) {
  int turn = 0;
  for (const char* kind : kKinds) {
    ++turn;
    for (int64_t n : {1, 17, 5000, 33000}) {
      for (int64_t k : {int64_t{1}, n / 700, n / 3, n}) {
        if (k < 1) continue;
        for (int variant = 0; variant < 8; ++variant) {
          // Slow cases run each variant with every other kind.
          if (n > 10000 && (variant + turn) % 2 != 0) continue;
          Case c;
          c.options.size = n;
          c.options.k = k;
          c.options.selector = static_cast<Selector>(variant % 4);
          c.options.quantized = variant >= 4;
          c.options.momentum = static_cast<Momentum>((variant + n + k) % 3);
          c.options.factor = 0.9f;
          c.options.scale = 0.5f;
          c.options.positive_side = k % 2 == 0;
          c.options.masking = k % 3 != 0;
          c.options.search = n != 17;
          c.options.ratio = 0.5f;
          c.g = Make(kind, n, 1);
          c.v = std::string(kind) == "normal" ? Make(kind, n, 2) : std::vector<float>(n);
          c.u = std::vector<float>(n);
          Run(&c, threads);
          Verify(c, std::string(kind) + " n=" + std::to_string(n) + " k=" + std::to_string(k) +
                        " variant=" + std::to_string(variant));
        }
      }
    }
  }
}

// A bfloat16 gradient gives the same result as its values in float32.
void TestBfloat16(const ParallelFor& threads) {
  for (const char* kind : {"normal", "clustered", "ties"}) {
    for (int64_t n : {1, 63, 64, 65, 5000, 33001, 1 << 20}) {
      for (int variant = 0; variant < 12; ++variant) {
        if (n == 1 << 20 && variant % 5 != 0) continue;  // Bypasses the caches; one setting each.
        Case c;
        SelectOptions& o = c.options;
        o.size = n;
        o.k = CeilDiv(n, 100);
        o.selector = static_cast<Selector>(variant % 4);
        o.quantized = variant % 2 == 1;
        o.momentum = static_cast<Momentum>(variant % 3);
        o.factor = 0.9f;
        o.scale = 0.5f;
        o.ratio = 0.5f;
        c.g = Make(kind, n, 1);
        c.v = Make(kind, n, 2);
        c.u = Make(kind, n, 3);
        std::vector<uint16_t> halves(n);
        for (int64_t i = 0; i < n; ++i) {
          halves[i] = static_cast<uint16_t>(static_cast<uint32_t>(BitsOf(c.g[i])) >> 16);
          c.g[i] = FloatOf(static_cast<int32_t>(uint32_t{halves[i]} << 16));
        }
        Run(&c, threads);
        std::vector<float> new_v(n), new_u(n);
        std::vector<uint32_t> indices(o.k);
        std::vector<int32_t> values(c.values.size());
        SelectBuffers b;
        b.bfloat16_grad = halves.data();
        b.residual = c.v.data();
        b.velocity = c.u.data();
        b.new_residual = new_v.data();
        b.new_velocity = new_u.data();
        b.indices = indices.data();
        b.values = o.quantized ? nullptr : values.data();
        const int64_t bytes = SelectScratchBytes(o.size, o.k, o.selector);
        std::vector<double> scratch(CeilDiv(bytes, sizeof(double)));
        SelectResult r;
        Check(AccumulateAndSelect(o, b, scratch.data(), bytes, threads, &r) == Status::kOk,
              "status of a gradient of bfloat16");
        const bool has_u = o.momentum != Momentum::kNone;
        Check(r.count == c.result.count && r.mean == c.result.mean && r.ratio == c.result.ratio &&
                  new_v == c.new_v && (!has_u || new_u == c.new_u) && indices == c.indices &&
                  values == c.values,
              std::string("bfloat16, ") + kind + " n=" + std::to_string(n) +
                  " variant=" + std::to_string(variant));
      }
    }
  }
}

// All large values in one cache line: if the sample contains it, the predicted threshold is far too
// high, and the candidates come from histograms.
void TestWrongPrediction(const ParallelFor& threads) {
  const int64_t n = 33000, line = 16;
  const std::vector<float> normal = Make("normal", n, 1);
  for (float rest : {0.0f, 1e-3f}) {
    for (int64_t place = 0; place < 32; ++place) {
      for (int variant = 0; variant < 4; ++variant) {
        Case c;
        c.options.size = n;
        c.options.k = 47;
        c.options.ratio = 0.7f;
        c.options.selector = static_cast<Selector>(variant);
        c.g = normal;
        for (int64_t i = 0; i < n; ++i)
          c.g[i] = i / line == place ? 9 + normal[i] : rest * normal[i];
        c.v = c.u = std::vector<float>(n);
        Run(&c, threads);
        Verify(c, "large values in line " + std::to_string(place));
      }
    }
  }
}

void TestNotFinite(const ParallelFor& threads) {
  for (float bad : {INFINITY, -INFINITY, NAN}) {
    for (int64_t at : {0, 100, 49999}) {
      Case c;
      c.options.size = 50000;
      c.options.k = 50;
      c.g = Make("normal", 50000, 1);
      c.v = c.u = std::vector<float>(50000);
      c.g[at] = bad;
      Run(&c, threads);
      Check(!c.result.finite && c.result.count == 0, "not finite");
    }
  }
}

void TestDecode(const ParallelFor& threads) {
  const int64_t n = 300000, k = 1000, ranks = 3;
  const Part part = {1, k, n, false};
  std::vector<int32_t> data;
  std::vector<float> expected(n, 0), out(n, NAN);
  std::mt19937 random(5);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    std::vector<int32_t> index(k), value(k);
    for (int32_t& i : index) i = random() % n;
    std::sort(index.begin(), index.end());
    index.erase(std::unique(index.begin(), index.end()), index.end());
    const int32_t count = index.size();
    index.resize(k, 0);
    for (int64_t i = 0; i < k; ++i) {
      const float x = static_cast<float>(random() % 1000) / 7;
      value[i] = BitsOf(x);
      if (i < count) expected[index[i]] += x;
    }
    data.insert(data.end(), {1, count});
    data.insert(data.end(), index.begin(), index.end());
    data.insert(data.end(), value.begin(), value.end());
  }
  const Messages messages = {data.data(), ranks, 1 + part.words()};
  DecodeError error;
  Check(Validate(messages, &part, 1, &error) == Status::kOk, "valid");
  std::fill(out.begin(), out.end(), NAN);
  SumMessages(messages, part, threads, out.data());
  Check(out == expected, "decoded");
  Mix(out.data(), n * sizeof(float));
  data[messages.words + 2 + 7] = n;
  Check(Validate(messages, &part, 1, &error) == Status::kInvalidMessage, "invalid");
  Check(std::string(error.field) == "index" && error.rank == 1 && error.slot == 7 &&
            error.value == n && error.tensor == 0,
        "error names the place");
}

}  // namespace
}  // namespace redsync

int main(int argc, char** argv) {
  const auto threads = redsync::testing::Threads(argc > 1 ? std::atoi(argv[1]) : 1);
  redsync::brute_force = argc <= 2 || std::strcmp(argv[2], "digest") != 0;
  redsync::TestSelect(threads);
  redsync::TestBfloat16(threads);
  redsync::TestWrongPrediction(threads);
  redsync::TestNotFinite(threads);
  redsync::TestDecode(threads);
  return redsync::testing::Report(redsync::Passes().name);
}
