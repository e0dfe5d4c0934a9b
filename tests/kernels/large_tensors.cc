// Tests core/cpu on a tensor of more than 2^31 elements. It takes 8 GiB: the gradient, almost all
// zero, is mapped memory that is hardly touched; the total reuses the residual's.
#include <algorithm>
#include <vector>

#include "custom_ops/core/cpu/descend.h"
#include "custom_ops/core/cpu/select.h"
#include "custom_ops/core/cpu/sum_messages.h"
#include "tests/kernels/core_testing.h"

namespace redsync {
namespace {

using testing::Check;

constexpr int64_t kSize = (int64_t{1} << 31) + 12345;
constexpr int64_t kK = 6;
// Six selected elements in the order of their positions, and two that are not: a tie and a small
// one.
const std::vector<uint32_t> kWinners = {3,           2147483646u, 2147483647u,
                                        2147483648u, 2147490000u, static_cast<uint32_t>(kSize - 1)};
const std::vector<float> kValues = {5, -7, 2, 4, -2, 9};
constexpr int64_t kTie = kSize - 2, kSmall = 77;

void Select(float* grad, float* residual, const ParallelFor& threads, std::vector<int32_t>* row) {
  for (size_t i = 0; i < kWinners.size(); ++i) grad[kWinners[i]] = kValues[i];
  grad[kTie] = 2;
  grad[kSmall] = 1;
  const Part part = {1, kK, kSize, false};
  row->assign(1 + part.words(), 0);
  SelectOptions options;
  options.size = kSize;
  options.k = kK;
  SelectBuffers buffers;
  buffers.grad = grad;
  buffers.residual = buffers.new_residual = residual;
  buffers.indices = const_cast<uint32_t*>(part.indices(row->data()));
  buffers.values = const_cast<int32_t*>(part.values(row->data()));
  std::vector<double> scratch(SelectScratchBytes(kSize, kK, options.selector) / 8 + 1);
  SelectResult result;
  const Status status =
      AccumulateAndSelect(options, buffers, scratch.data(), scratch.size() * 8, threads, &result);
  Check(status == Status::kOk && result.finite && result.count == kK, "selection");
  (*row)[0] = 1;
  (*row)[1] = kK;
  Check(std::equal(kWinners.begin(), kWinners.end(), buffers.indices), "positions");
  for (int64_t i = 0; i < kK; ++i) Check(FloatOf(buffers.values[i]) == kValues[i], "values");
  for (const uint32_t at : kWinners) Check(residual[at] == 0, "what was selected is zero");
  Check(residual[kTie] == 2 && residual[kSmall] == 1, "what was not selected is kept");
}

void Decode(std::vector<int32_t> row, const ParallelFor& threads, float* total) {
  const Part part = {1, kK, kSize, false};
  row.insert(row.end(), row.begin(), row.end());  // Two ranks that sent the same.
  const Messages messages = {row.data(), 2, static_cast<int64_t>(row.size()) / 2};
  DecodeError error;
  Check(Validate(messages, &part, 1, &error) == Status::kOk, "a good message");
  SumMessages(messages, part, threads, total);
  for (int64_t i = 0; i < kK; ++i) Check(total[kWinners[i]] == 2 * kValues[i], "totals");
  Check(total[kTie] == 0 && total[kSmall] == 0, "the rest of the total is zero");
  const_cast<uint32_t*>(part.indices(row.data()))[kK - 1] = static_cast<uint32_t>(kSize);
  Check(Validate(messages, &part, 1, &error) == Status::kInvalidMessage && error.value == kSize,
        "an index out of range");
}

void TestDescend(const ParallelFor& threads, float* variable) {
  const std::vector<uint32_t> at = {kWinners[5], kWinners[3], kWinners[5]};
  const std::vector<float> values = {1, 2, 3};
  const Coordinates along = {at.data(), values.data(), 3};
  const float last = variable[at[0]], other = variable[at[1]];
  Check(Descend(along, 0.5f, kSize - 1, threads, variable) == 0, "one out of range");
  Check(variable[at[0]] == last && variable[at[1]] == other, "nothing has changed");
  Check(Descend(along, 0.5f, kSize, threads, variable) == -1, "all in range");
  Check(variable[at[0]] == last - 2 && variable[at[1]] == other - 1, "descent");
}

}  // namespace
}  // namespace redsync

int main() {
  using namespace redsync;
  const ParallelFor threads = testing::Threads(2);
  float *grad = testing::Map<float>(kSize), *residual = testing::Map<float>(kSize);
  std::vector<int32_t> row;
  Select(grad, residual, threads, &row);
  Decode(row, threads, residual);
  TestDescend(threads, residual);
  return testing::Report("large");
}
