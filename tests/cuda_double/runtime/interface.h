// What the double offers beside CUDA's own functions: to the kernels on the CPU, and by ctypes to cuda_double.py.
#pragma once
#include <stddef.h>
#include <stdint.h>

struct Access {  // bytes that a task reads or writes
  uintptr_t start, stop;
  bool writes;
};

// Called in the thread that calls CUDA: "sync: ..." where the host waits, "copy ...", "cudaMalloc", "VIOLATION: ...".
typedef void (*cuda_double_listener)(const char* what, long long bytes, unsigned stream);

extern "C" {
int cuda_double_is_async();
void cuda_double_set_listener(cuda_double_listener listener);

// Counts: "name\tnumber\n" for each, at most `size` bytes. Returns how many bytes there are.
int cuda_double_write_counts(char* text, int size);
void cuda_double_count(const char* name, long by);
void cuda_double_reset_counts();
void cuda_double_report_violation(const char* text);

// Limits that a test may change while it runs. Both return the former one.
long long cuda_double_set_pin_limit(long long bytes);
long long cuda_double_set_memory(long long bytes);
// The `number`-th device allocation from now on fails (1: the next one; 0: none), and so does an immediate retry of it.
void cuda_double_fail_allocation(long number);

// Run `run(data)` in the order of a stream.
void cuda_double_enqueue(void* stream, const char* what, const Access* accesses, int num_accesses, void (*run)(void*), void* data);
// Fill memory that was given back, in the order of a stream.
void cuda_double_poison(void* stream, void* start, size_t bytes);
// What a kernel touched that ran at once, for the race finder.
void cuda_double_touch(void* stream, const char* what, const Access* accesses, int num_accesses);
void cuda_double_drain(void* stream);
void cuda_double_drain_all();

// Device memory by pieces (expandable segments), for the driver. 0 or a CUresult.
int cuda_double_create_physical(size_t bytes, int device, unsigned long long* handle);
int cuda_double_release_physical(unsigned long long handle);
int cuda_double_reserve_addresses(size_t bytes, uintptr_t* start);
int cuda_double_free_addresses(uintptr_t start, size_t bytes);
int cuda_double_map(uintptr_t start, size_t bytes, unsigned long long handle);
int cuda_double_unmap(uintptr_t start, size_t bytes);
}
