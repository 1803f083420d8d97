// Copies and sets of memory. With CUDA_DOUBLE_ASYNC=1 they may run late.
#include <cstdio>
#include <cstring>

#include "runtime.h"

namespace cuda_double {
namespace {

double delay_of(Stream* stream, size_t bytes) {
  double delay_s = settings().copy_bytes_per_s > 0 ? bytes / settings().copy_bytes_per_s : 0;
  if (settings().copy_delay_s > 0) delay_s += settings().copy_delay_s * random_fraction(stream);
  return delay_s;
}

bool fits(cudaMemcpyKind kind, bool from_device, bool to_device) {
  switch (kind) {
    case cudaMemcpyHostToDevice: return !from_device && to_device;
    case cudaMemcpyDeviceToHost: return from_device && !to_device;
    case cudaMemcpyDeviceToDevice: return from_device && to_device;
    case cudaMemcpyHostToHost: return !from_device && !to_device;
    default: return true;
  }
}

void check_bounds(const void* pointer, size_t bytes, const char* what) {
  if (bytes && leaves_its_allocation(pointer, bytes)) report_violation("%s runs past the end of its device allocation", what);
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t handle, bool blocks) {
  if (!bytes) return cudaSuccess;
  Stream* stream = stream_of(handle);
  Place source = place_of(from), target = place_of(to);
  bool from_device = source == Place::DEVICE, to_device = target == Place::DEVICE;
  if (!fits(kind, from_device, to_device))
    report_violation("a copy of kind %d goes from %s to %s", (int)kind, from_device ? "the device" : "the host", to_device ? "the device" : "the host");
  check_bounds(from, bytes, "the source of a copy");
  check_bounds(to, bytes, "the target of a copy");

  bool is_pageable = from_device != to_device && (source == Place::PAGEABLE || target == Place::PAGEABLE);
  std::string name = std::string("copy ") + (from_device ? "d" : "h") + "2" + (to_device ? "d" : "h") + (is_pageable ? " pageable" : "");
  count(name);
  count(name + " bytes", bytes);
  count(name + " on stream " + std::to_string(stream->id) + ", bytes", bytes);
  tell(name.c_str(), bytes, stream->id);

  // The driver copies pageable memory through its own buffer, and the host waits for that copy.
  if (is_pageable || blocks) {
    std::string how = is_pageable ? "copy with pageable memory" : "cudaMemcpy";
    count("blocking: " + how);
    tell(("sync: " + how).c_str(), bytes, stream->id);
  }
  enqueue(stream, to_device ? (from_device ? "copy d2d" : "copy h2d") : from_device ? "copy d2h" : "copy h2h", delay_of(stream, bytes),
          {{(uintptr_t)from, (uintptr_t)from + bytes, false}, {(uintptr_t)to, (uintptr_t)to + bytes, true}}, [=] { memmove(to, from, bytes); });
  if (is_pageable || blocks) drain(stream);
  return cudaSuccess;
}

cudaError_t set(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  count("memset");
  check_bounds(pointer, bytes, "a memset");
  enqueue(stream_of(stream), "memset", 0, {{(uintptr_t)pointer, (uintptr_t)pointer + bytes, true}}, [=] { memset(pointer, value, bytes); });
  return cudaSuccess;
}

}  // namespace
}  // namespace cuda_double

using namespace cuda_double;

extern "C" {

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) { return copy(to, from, bytes, kind, 0, true); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(to, from, bytes, kind, stream, false);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, cudaMemcpyDefault, stream, false);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  for (size_t row = 0; row < height; row++) copy((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width, kind, stream, false);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) { return set(pointer, value, bytes, stream); }
cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  set(pointer, value, bytes, 0);
  drain(stream_of(0));
  return cudaSuccess;
}

void cuda_double_poison(void* handle, void* start, size_t bytes) {
  Stream* stream = stream_of((cudaStream_t)handle);
  std::vector<Access> whole{{(uintptr_t)start, (uintptr_t)start + bytes, true}};
  if (settings().finds_races) check_races(stream, "poison", whole, true);
  enqueue(stream, "poison", 0, {}, [=] { memset(start, 0xFF, bytes); });  // every float is NaN
}

}  // extern "C"
