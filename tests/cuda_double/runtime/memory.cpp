// Device memory and pinned memory. Device memory is host memory. It is zero at first, its pages become resident when touched,
// and touching the page after an allocation is an error.
#include <sys/mman.h>

#include <cstring>
#include <utility>

#include "runtime.h"

namespace cuda_double {
namespace {

const size_t PAGE_BYTES = 2 << 20;  // page size of the device
const size_t HOST_PAGE_BYTES = 4096;

struct Range {
  uintptr_t stop;
  int device;
};
using Ranges = std::map<uintptr_t, Range>;  // by start

struct Physical {  // a piece of the device's memory without an address
  size_t bytes;
  int device;
};

struct Memory {
  Ranges device, pinned;
  std::map<int, long long> device_bytes;
  long long pinned_bytes = 0;
  std::map<unsigned long long, Physical> physical;  // by handle
  // The next requested failure: see `is_to_fail`.
  size_t failed_bytes = 0;
  bool may_retry = false;
};

Memory& memory() {
  static auto* all = new Memory;
  return *all;
}

const std::pair<const uintptr_t, Range>* range_at(const Ranges& ranges, uintptr_t at) {
  auto next = ranges.upper_bound(at);
  if (next == ranges.begin()) return nullptr;
  --next;
  return at < next->second.stop ? &*next : nullptr;
}

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// Returns whether this allocation must fail. The caching allocator frees its cache and retries once; the retry belongs to the
// same failure.
bool is_to_fail(size_t bytes, const Lock&) {
  long& left = settings().allocations_before_failure;
  if (memory().may_retry) {
    memory().may_retry = false;
    if (memory().failed_bytes == bytes) return true;
  }
  if (left < 0 || left-- > 0) return false;
  memory().may_retry = true;
  memory().failed_bytes = bytes;
  return true;
}

// Takes `bytes` of the device's budget. Returns false if fewer are left.
bool take(size_t bytes, int device, const Lock& lock) {
  bool fails = is_to_fail(bytes, lock);
  if (fails) count("device allocations that were made to fail");
  long long& used_bytes = memory().device_bytes[device];
  if (fails || used_bytes + (long long)bytes > settings().memory_bytes - settings().context_bytes) return false;
  used_bytes += bytes;
  count("device allocations");
  count("device bytes allocated", bytes);
  count_peak("device bytes peak", used_bytes);
  return true;
}

// Reserves inaccessible addresses, followed by one inaccessible page.
char* reserve(size_t bytes) {
  size_t whole = bytes + 2 * PAGE_BYTES;
  char* start = (char*)mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return nullptr;
  return (char*)rounded((uintptr_t)start, PAGE_BYTES);
}

void make_usable(char* start, size_t bytes) {
  mprotect(start, bytes, PROT_READ | PROT_WRITE);
  madvise(start, bytes, MADV_DONTFORK);
  madvise(start, bytes, MADV_NOHUGEPAGE);  // only touched pages may become resident
}

cudaError_t pin(void* pointer, size_t bytes, bool is_registered) {
  Lock lock(state_mutex());
  auto start = (uintptr_t)pointer, stop = start + bytes;
  auto& pinned = memory().pinned;
  auto next = pinned.lower_bound(start);
  if ((next != pinned.end() && next->first < stop) || range_at(pinned, start)) return fail(cudaErrorHostMemoryAlreadyRegistered);
  if (memory().pinned_bytes + (long long)bytes > settings().pin_limit_bytes) {
    count(is_registered ? "cudaHostRegister refused" : "cudaHostAlloc refused");
    return fail(cudaErrorMemoryAllocation);
  }
  pinned[start] = {stop, -1};
  memory().pinned_bytes += bytes;
  count_peak("pinned bytes peak", memory().pinned_bytes);
  return cudaSuccess;
}

cudaError_t unpin(void* pointer, size_t* bytes, const char* function) {
  auto start = (uintptr_t)pointer;
  {
    Lock lock(state_mutex());
    auto known = memory().pinned.find(start);
    if (known == memory().pinned.end()) return fail(cudaErrorHostMemoryNotRegistered);
    *bytes = known->second.stop - start;
  }
  auto user = user_of(start, start + *bytes);
  if (!user.empty()) report_violation("%s while \"%.200s\" uses the memory", function, user.c_str());
  Lock lock(state_mutex());
  forget_accesses(start, start + *bytes, lock);
  memory().pinned.erase(start);
  memory().pinned_bytes -= *bytes;
  return cudaSuccess;
}

}  // namespace

Place place_of(const void* pointer) {
  Lock lock(state_mutex());
  if (range_at(memory().device, (uintptr_t)pointer)) return Place::DEVICE;
  return range_at(memory().pinned, (uintptr_t)pointer) ? Place::PINNED : Place::PAGEABLE;
}

bool leaves_its_allocation(const void* pointer, size_t bytes) {
  Lock lock(state_mutex());
  auto at = (uintptr_t)pointer, stop = at + bytes;
  auto* range = range_at(memory().device, at);
  if (!range) return false;
  while (range && range->second.stop < stop) range = range_at(memory().device, range->second.stop);  // adjacent pieces
  return !range;
}

MemoryNow memory_now() {
  Lock lock(state_mutex());
  MemoryNow now{0, memory().pinned_bytes};
  for (auto& [device, bytes] : memory().device_bytes) now.device_bytes += bytes;
  return now;
}

}  // namespace cuda_double

using namespace cuda_double;

extern "C" {

long long cuda_double_set_pin_limit(long long bytes) {
  Lock lock(state_mutex());
  return std::exchange(settings().pin_limit_bytes, bytes);
}
long long cuda_double_set_memory(long long bytes) {
  Lock lock(state_mutex());
  return std::exchange(settings().memory_bytes, bytes);
}
void cuda_double_fail_allocation(long number) {
  Lock lock(state_mutex());
  settings().allocations_before_failure = number - 1;
  memory().may_retry = false;
}

// ---- device memory

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  Lock lock(state_mutex());
  *total_bytes = settings().memory_bytes;
  long long left = settings().memory_bytes - settings().context_bytes - memory().device_bytes[current_device()];
  *free_bytes = left > 0 ? left : 0;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  count("cudaMalloc");
  tell("cudaMalloc", bytes, 0);
  *pointer = nullptr;
  if (!bytes) return cudaSuccess;
  size_t whole = rounded(bytes, PAGE_BYTES);
  Lock lock(state_mutex());
  if (!take(whole, current_device(), lock)) return fail(cudaErrorMemoryAllocation);
  char* start = reserve(whole);
  if (!start) return fail(cudaErrorMemoryAllocation);
  make_usable(start, whole);
  memory().device[(uintptr_t)start] = {(uintptr_t)start + whole, current_device()};
  *pointer = start;
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  count("cudaFree");
  tell("sync: cudaFree", 0, 0);
  drain_all();  // as on a GPU, which waits for all enqueued work
  Lock lock(state_mutex());
  auto known = memory().device.find((uintptr_t)pointer);
  if (known == memory().device.end()) return fail(cudaErrorInvalidValue);
  auto [start, range] = *known;
  memory().device_bytes[range.device] -= range.stop - start;
  memory().device.erase(known);
  forget_accesses(start, range.stop, lock);
  munmap(pointer, range.stop - start);
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }

// ---- device memory in pieces: addresses first, memory later (expandable segments)

int cuda_double_create_physical(size_t bytes, int device, unsigned long long* handle) {
  count("cuMemCreate");
  tell("cuMemCreate", bytes, 0);
  Lock lock(state_mutex());
  if (!take(bytes, device, lock)) return cudaErrorMemoryAllocation;  // CUresult has the same number
  static unsigned long long last = 0;
  *handle = ++last;
  memory().physical[last] = {bytes, device};
  return 0;
}
int cuda_double_release_physical(unsigned long long handle) {
  Lock lock(state_mutex());
  auto known = memory().physical.find(handle);
  if (known == memory().physical.end()) return cudaErrorInvalidValue;
  memory().device_bytes[known->second.device] -= known->second.bytes;
  memory().physical.erase(known);
  return 0;
}
int cuda_double_reserve_addresses(size_t bytes, uintptr_t* start) {
  *start = (uintptr_t)reserve(bytes);
  return *start ? 0 : cudaErrorMemoryAllocation;
}
int cuda_double_free_addresses(uintptr_t start, size_t bytes) {
  munmap((void*)start, bytes);
  return 0;
}
int cuda_double_map(uintptr_t start, size_t bytes, unsigned long long handle) {
  Lock lock(state_mutex());
  auto known = memory().physical.find(handle);
  if (known == memory().physical.end()) return cudaErrorInvalidValue;
  make_usable((char*)start, bytes);
  memory().device[start] = {start + bytes, known->second.device};
  return 0;
}
int cuda_double_unmap(uintptr_t start, size_t bytes) {
  auto user = user_of(start, start + bytes);
  if (!user.empty()) report_violation("cuMemUnmap while \"%.200s\" uses the memory", user.c_str());
  Lock lock(state_mutex());
  auto first = memory().device.lower_bound(start), last = memory().device.lower_bound(start + bytes);
  memory().device.erase(first, last);
  forget_accesses(start, start + bytes, lock);
  madvise((void*)start, bytes, MADV_DONTNEED);
  mprotect((void*)start, bytes, PROT_NONE);
  return 0;
}

// ---- pinned memory

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  count("cudaHostAlloc");
  count("cudaHostAlloc bytes", bytes);
  tell("cudaHostAlloc", bytes, 0);
  size_t whole = rounded(bytes, HOST_PAGE_BYTES);
  void* start = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  if (auto error = pin(start, whole, false)) {
    munmap(start, whole);
    return error;
  }
  *pointer = start;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) {
  if (!pointer) return cudaSuccess;
  count("cudaFreeHost");
  tell("sync: cudaFreeHost", 0, 0);
  drain_all();
  size_t bytes;
  if (auto error = unpin(pointer, &bytes, "cudaFreeHost")) return error;
  munmap(pointer, bytes);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  count("cudaHostRegister");
  count("cudaHostRegister bytes", bytes);
  tell("cudaHostRegister", bytes, 0);
  return pin(pointer, bytes, true);
}
cudaError_t cudaHostUnregister(void* pointer) {
  count("cudaHostUnregister");
  tell("cudaHostUnregister", 0, 0);
  size_t bytes;
  return unpin(pointer, &bytes, "cudaHostUnregister");
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* pointer) {
  memset(out, 0, sizeof *out);
  out->device = -2;
  Lock lock(state_mutex());
  if (auto* range = range_at(memory().device, (uintptr_t)pointer)) {
    out->type = cudaMemoryTypeDevice;
    out->device = range->second.device;
    out->devicePointer = (void*)pointer;
  } else if (range_at(memory().pinned, (uintptr_t)pointer)) {
    out->type = cudaMemoryTypeHost;
    out->device = current_device();
    out->devicePointer = out->hostPointer = (void*)pointer;
  }
  return cudaSuccess;
}

}  // extern "C"
