// A stub of the CUDA runtime functions that the harness calls, in host memory. "Device" memory is
// valid only between its cudaMalloc and cudaFree, at addresses beyond 32 bits.
#include <sys/mman.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>

namespace {

constexpr int kInvalidValue = 1;

std::map<uintptr_t, size_t>& Allocations() {
  static auto* allocations = new std::map<uintptr_t, size_t>;
  return *allocations;
}

bool IsDevice(const void* pointer, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = Allocations().upper_bound(address);
  if (after == Allocations().begin()) return false;
  --after;
  return address + bytes <= after->first + after->second;
}

using Clock = std::chrono::steady_clock;

}  // namespace

extern "C" {

int cudaMalloc(void** pointer, size_t bytes) {
  void* const beyond = reinterpret_cast<void*>(uintptr_t{1} << 40);
  void* found = mmap(beyond, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) return 2;
  Allocations()[reinterpret_cast<uintptr_t>(found)] = bytes;
  *pointer = found;
  return 0;
}

int cudaFree(void* pointer) {
  const auto found = Allocations().find(reinterpret_cast<uintptr_t>(pointer));
  if (found == Allocations().end()) return kInvalidValue;
  munmap(pointer, found->second);
  Allocations().erase(found);
  return 0;
}

int cudaMemcpy(void* to, const void* from, size_t bytes, int kind) {
  const bool fits = kind == 1   ? IsDevice(to, bytes) && !IsDevice(from, 0)
                    : kind == 2 ? IsDevice(from, bytes) && !IsDevice(to, 0)
                                : false;
  if (!fits) return kInvalidValue;
  std::memcpy(to, from, bytes);
  return 0;
}

int cudaDeviceSynchronize() { return 0; }

int cudaGetDeviceCount(int* count) {
  *count = 1;
  return 0;
}

const char* cudaGetErrorString(int status) { return status == 0 ? "no error" : "invalid argument"; }

int cudaEventCreate(void** event) {
  *event = new Clock::time_point;
  return 0;
}

int cudaEventRecord(void* event, void*) {
  *static_cast<Clock::time_point*>(event) = Clock::now();
  return 0;
}

int cudaEventElapsedTime(float* ms, void* first, void* last) {
  const auto between =
      *static_cast<Clock::time_point*>(last) - *static_cast<Clock::time_point*>(first);
  *ms = std::chrono::duration<float, std::milli>(between).count();
  return 0;
}

int stub_allocations() { return static_cast<int>(Allocations().size()); }
}
