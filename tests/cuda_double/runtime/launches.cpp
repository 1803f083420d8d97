// Launches of torch's own kernels. No kernel runs; each launch is counted by name.
#include <dlfcn.h>

#include <cstring>
#include <unordered_map>

#include "runtime.h"

namespace cuda_double {
namespace {

std::unordered_map<const void*, const char*>& kernel_names() {
  static auto* all = new std::unordered_map<const void*, const char*>;
  return *all;
}

struct Configuration {  // valid between a push and its pop
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
};
thread_local Configuration configuration;

cudaError_t launch(const void* function, cudaStream_t stream) {
  const char* name = "without a name";
  {
    Lock lock(state_mutex());
    auto known = kernel_names().find(function);
    if (known != kernel_names().end()) name = known->second;
  }
  tell(name, 0, stream_of(stream)->id);
  count_launch(name);
  return cudaSuccess;
}

}  // namespace
}  // namespace cuda_double

using namespace cuda_double;

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  Lock lock(state_mutex());
  kernel_names()[function] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, struct CUstream_st* stream) {
  configuration = {grid, block, shared_bytes, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared_bytes = configuration.shared_bytes;
  *(void**)stream = configuration.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t stream) { return launch((const void*)kernel, stream); }
cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t stream) { return launch(function, stream); }
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t stream) { return launch(function, stream); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) { return launch(function, config->stream); }

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  out->ptxVersion = out->binaryVersion = 86;  // cub needs an architecture that torch was compiled for
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* number, const void*, int, size_t) {
  *number = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* number, const void*, int, size_t, unsigned) {
  *number = 2;
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
  static char* memory = new char[1 << 16]();
  *pointer = memory;
  return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* status) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  *function = nullptr;
  if (driver)
    for (auto name : {std::string(symbol), std::string(symbol) + "_v2", std::string("cuda_double_driver_stub")})
      if (!*function) *function = dlsym(driver, name.c_str());
  if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"
