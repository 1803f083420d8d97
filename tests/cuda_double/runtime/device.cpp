// The properties of the device and the last error.
#include <cstdio>
#include <cstring>

#include "runtime.h"

namespace cuda_double {
namespace {

thread_local cudaError_t last_error = cudaSuccess;

const char NAME[] = "CUDA double (no GPU), as an RTX 4090";

struct Attribute {
  cudaDeviceAttr attribute;
  int value;
};

const Attribute ATTRIBUTES[] = {
    {cudaDevAttrMaxThreadsPerBlock, 1024},
    {cudaDevAttrMaxBlockDimX, 1024},
    {cudaDevAttrMaxBlockDimY, 1024},
    {cudaDevAttrMaxBlockDimZ, 64},
    {cudaDevAttrMaxGridDimX, 2147483647},
    {cudaDevAttrMaxGridDimY, 65535},
    {cudaDevAttrMaxGridDimZ, 65535},
    {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
    {cudaDevAttrMaxSharedMemoryPerBlockOptin, 101376},
    {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 102400},
    {cudaDevAttrWarpSize, 32},
    {cudaDevAttrMultiProcessorCount, 128},
    {cudaDevAttrMaxThreadsPerMultiProcessor, 1536},
    {cudaDevAttrComputeCapabilityMajor, 8},
    {cudaDevAttrComputeCapabilityMinor, 9},
    {cudaDevAttrL2CacheSize, 72 << 20},
    {cudaDevAttrMemoryClockRate, 10501000},
    {cudaDevAttrClockRate, 2520000},
    {cudaDevAttrGlobalMemoryBusWidth, 384},
    {cudaDevAttrUnifiedAddressing, 1},
    {cudaDevAttrConcurrentKernels, 1},
    {cudaDevAttrCooperativeLaunch, 1},
    {cudaDevAttrHostRegisterSupported, 1},
};

bool exists(int device) { return device >= 0 && device < settings().num_devices; }

}  // namespace

cudaError_t fail(cudaError_t error, const char* function) {
  last_error = error;
  if (settings().is_verbose && error != cudaErrorNotReady) fprintf(stderr, "cuda double: %s fails: %s\n", function, cudaGetErrorName(error));
  return error;
}

}  // namespace cuda_double

using namespace cuda_double;

extern "C" {

cudaError_t cudaGetLastError() {
  auto error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorHostMemoryAlreadyRegistered: return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered: return "cudaErrorHostMemoryNotRegistered";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    default: {
      static thread_local char text[64];
      snprintf(text, sizeof text, "cudaError %d", (int)error);
      return text;
    }
  }
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    default: return cudaGetErrorName(error);
  }
}

cudaError_t cudaGetDeviceCount(int* number) {
  *number = settings().num_devices;
  return *number ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (!exists(device)) return fail(cudaErrorInvalidDevice);
  current_device() = device;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (!exists(device)) return fail(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", NAME);
  memset(&p->uuid, device + 1, sizeof p->uuid);
  p->totalGlobalMem = settings().memory_bytes;
  p->major = 8;
  p->minor = 9;
  p->multiProcessorCount = 128;
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxThreadsPerMultiProcessor = 1536;
  p->maxBlocksPerMultiProcessor = 24;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 101376;
  p->sharedMemPerMultiprocessor = 102400;
  p->reservedSharedMemPerBlock = 1024;
  p->totalConstMem = 65536;
  p->l2CacheSize = 72 << 20;
  p->memoryBusWidth = 384;
  p->asyncEngineCount = 2;
  p->concurrentKernels = p->unifiedAddressing = p->canMapHostMemory = p->managedMemory = p->cooperativeLaunch = 1;
  p->hostRegisterSupported = p->streamPrioritiesSupported = p->canUseHostPointerForRegisteredMem = 1;
  p->pciBusID = device + 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (!exists(device)) return fail(cudaErrorInvalidDevice);
  *value = 0;
  for (auto& known : ATTRIBUTES)
    if (known.attribute == attribute) *value = known.value;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

}  // extern "C"
