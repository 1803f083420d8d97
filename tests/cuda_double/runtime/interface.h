// Functions of the double in addition to those of CUDA, for the CPU kernels and, through ctypes, for cuda_double.py.
#pragma once
#include <stddef.h>
#include <stdint.h>

struct Access {  // bytes that a task reads or writes
  uintptr_t start, stop;
  bool writes;
};

// Called in the thread that calls CUDA, with "sync: ..." if the host waits, "copy ...", "cudaMalloc", "VIOLATION: ...".
typedef void (*cuda_double_listener)(const char* what, long long bytes, unsigned stream);

extern "C" {
int cuda_double_is_async();
void cuda_double_set_listener(cuda_double_listener listener);

// Writes "name\tnumber\n" for each count, at most `size` bytes. Returns the number of bytes of all counts.
int cuda_double_write_counts(char* text, int size);
void cuda_double_count(const char* name, long by);
void cuda_double_reset_counts();
void cuda_double_report_violation(const char* text);

// Change a limit during a test. Both return the former limit.
long long cuda_double_set_pin_limit(long long bytes);
long long cuda_double_set_memory(long long bytes);
// Makes the `number`-th device allocation from now on fail (1: the next one; 0: none), and also its immediate retry.
void cuda_double_fail_allocation(long number);

// Runs `run(data)` in the order of a stream.
void cuda_double_enqueue(void* stream, const char* what, const Access* accesses, int num_accesses, void (*run)(void*), void* data);
// Poisons freed memory, in the order of a stream.
void cuda_double_poison(void* stream, void* start, size_t bytes);
// Tells the race finder the accesses of a kernel that ran at once.
void cuda_double_touch(void* stream, const char* what, const Access* accesses, int num_accesses);
void cuda_double_drain(void* stream);
void cuda_double_drain_all();

// Device memory in pieces (expandable segments), for the driver. Return 0 or a CUresult.
int cuda_double_create_physical(size_t bytes, int device, unsigned long long* handle);
int cuda_double_release_physical(unsigned long long handle);
int cuda_double_reserve_addresses(size_t bytes, uintptr_t* start);
int cuda_double_free_addresses(uintptr_t start, size_t bytes);
int cuda_double_map(uintptr_t start, size_t bytes, unsigned long long handle);
int cuda_double_unmap(uintptr_t start, size_t bytes);
}
