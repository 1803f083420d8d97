// libcuda.so.1: the driver functions that torch calls directly. All others are stubs that return success.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cstring>

#include "interface.h"

#undef cuDevicePrimaryCtxRelease
#undef cuMemGetInfo

static int context;  // the only context; its address is the handle

extern "C" {

int cuda_double_driver_stub() { return 0; }

CUresult cuInit(unsigned) {
  int number;
  return cudaGetDeviceCount(&number) ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString((cudaError_t)error);
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "an error of the CUDA double's driver";
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* number) {
  cudaGetDeviceCount(number);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* text, int size, CUdevice device) {
  cudaDeviceProp properties;
  cudaGetDeviceProperties(&properties, device);
  strncpy(text, properties.name, size);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return (CUresult)cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, device);
}

CUresult cuCtxGetCurrent(CUcontext* out) {
  *out = (CUcontext)&context;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice* device) { return (CUresult)cudaGetDevice(device); }
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice) { return cuCtxGetCurrent(out); }
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }

CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) { return (CUresult)cudaMemGetInfo(free_bytes, total_bytes); }
CUresult cuPointerGetAttribute(void* out, CUpointer_attribute attribute, CUdeviceptr pointer) {
  cudaPointerAttributes facts;
  cudaPointerGetAttributes(&facts, (void*)pointer);
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned*)out = facts.type; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int*)out = facts.device; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr*)out = pointer; break;
    default: *(int*)out = 0;
  }
  return facts.type ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// ---- memory in pieces, for torch's expandable segments

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = 2 << 20;
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties, unsigned long long) {
  return (CUresult)cuda_double_create_physical(bytes, properties->location.id, handle);
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return (CUresult)cuda_double_release_physical(handle); }
CUresult cuMemAddressReserve(CUdeviceptr* start, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  return (CUresult)cuda_double_reserve_addresses(bytes, (uintptr_t*)start);
}
CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes) { return (CUresult)cuda_double_free_addresses(start, bytes); }
CUresult cuMemMap(CUdeviceptr start, size_t bytes, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
  return (CUresult)cuda_double_map(start, bytes, handle);
}
CUresult cuMemUnmap(CUdeviceptr start, size_t bytes) { return (CUresult)cuda_double_unmap(start, bytes); }
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
CUresult cuMemExportToShareableHandle(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long) {
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction) {
  *value = 0;
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule* module, const void*) {
  *module = (CUmodule)&context;
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) { return cuModuleLoadData(module, image); }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) {
  *function = (CUfunction)&context;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* number, CUfunction, int, size_t) {
  *number = 2;
  return CUDA_SUCCESS;
}

}  // extern "C"
