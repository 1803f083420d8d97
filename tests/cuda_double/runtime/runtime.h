// Declarations shared by the files of the runtime. All state is leaked, because it must outlive every static destructor.
#pragma once
#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "interface.h"

namespace cuda_double {

// ---- settings.cpp: the environment variables CUDA_DOUBLE_*

struct Settings {
  bool computes, is_async, finds_races, is_verbose;
  double copy_delay_s, kernel_delay_s, copy_bytes_per_s;
  long long memory_bytes, context_bytes, pin_limit_bytes;  // a test may change the first and the last
  long allocations_before_failure;                         // -1: no allocation fails
  unsigned seed;
  int num_devices;
};
Settings& settings();

// ---- counts.cpp: numbers, the listener, violations. They have a separate lock, and may be called with or without `Lock`.

void count(const std::string& name, long by = 1);
void count_launch(const char* kernel);
void count_peak(const char* name, long now);  // keeps the maximum
// Calls the listener, which may wait for Python's global lock. `Lock` must not be held.
void tell(const char* what, long long bytes, unsigned stream);
void report_violation(const char* format, ...) __attribute__((format(printf, 1, 2)));  // `Lock` must not be held
void this_thread_is_a_worker();  // workers call no listener, because the host may wait for them with Python's lock held
cudaError_t fail(cudaError_t error, const char* function = __builtin_FUNCTION());

// ---- one lock for streams, events, memory and races. A function that needs the lock takes it as an argument.

using Lock = std::unique_lock<std::mutex>;
std::mutex& state_mutex();
std::condition_variable& something_finished();

// ---- races.cpp

// The number of tasks of each stream that are known to be done, by index of the stream.
using Clock = std::vector<unsigned long>;
void join(Clock& clock, const Clock& other);
unsigned new_clock_index(const Lock&);

struct Stream;
void check_races(Stream* stream, const char* what, const std::vector<Access>& accesses, bool is_poison = false);
void host_learns(const Clock& clock, const Lock&);
void stream_learns_from_host(Stream* stream, const Lock&);
void forget_accesses(uintptr_t start, uintptr_t stop, const Lock&);

// ---- streams.cpp

struct Task {
  std::function<void()> run;
  const char* what;
  std::vector<Access> accesses;
  double delay_s;
};

struct Stream {
  unsigned id = 0;  // 0: the default stream
  int device = 0;
  unsigned clock_index = 0;
  Clock clock;
  std::deque<Task> queue;
  const Task* running = nullptr;
  bool has_worker = false;
  unsigned random = 0;
  std::condition_variable work;
  bool is_idle() const { return queue.empty() && !running; }
};

Stream* stream_of(cudaStream_t handle);
void enqueue(Stream* stream, const char* what, double delay_s, std::vector<Access> accesses, std::function<void()> run);
void drain(Stream* stream);
void drain_all();
double random_fraction(Stream* stream);
// Returns the queued task that uses these bytes, or "".
std::string user_of(uintptr_t start, uintptr_t stop);
int& current_device();

// ---- memory.cpp

enum class Place { PAGEABLE, PINNED, DEVICE };
Place place_of(const void* pointer);
bool leaves_its_allocation(const void* pointer, size_t bytes);
struct MemoryNow {
  long long device_bytes, pinned_bytes;  // summed over all devices
};
MemoryNow memory_now();

}  // namespace cuda_double
