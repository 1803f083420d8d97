// Counts by name, the listener of calls, and violations.
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "runtime.h"

namespace cuda_double {
namespace {

struct Counts {
  std::mutex mutex;
  std::map<std::string, long> by_name, peaks, launches, violations;
};

Counts& counts() {
  static Counts* all = new Counts;
  return *all;
}

std::atomic<cuda_double_listener> listener{nullptr};
thread_local bool is_worker = false;

}  // namespace

void count(const std::string& name, long by) {
  Lock lock(counts().mutex);
  counts().by_name[name] += by;
}

void count_peak(const char* name, long now) {
  Lock lock(counts().mutex);
  long& peak = counts().peaks[name];
  if (now > peak) peak = now;
}

void count_launch(const char* kernel) {
  {
    Lock lock(counts().mutex);
    counts().launches[kernel]++;
  }
  if (settings().computes) report_violation("torch launched the CUDA kernel %.200s, which does nothing here: its numbers are rubbish", kernel);
}

void this_thread_is_a_worker() { is_worker = true; }

void tell(const char* what, long long bytes, unsigned stream) {
  if (is_worker) return;
  if (auto hears = listener.load()) hears(what, bytes, stream);
}

void report_violation(const char* format, ...) {
  char text[600] = "VIOLATION: ";
  const size_t prefix = sizeof "VIOLATION: " - 1;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text + prefix, sizeof text - prefix, format, arguments);
  va_end(arguments);
  text[strcspn(text, "\n")] = 0;  // keep one line: the rest of a torch error is its stack
  bool is_new;
  {
    Lock lock(counts().mutex);
    is_new = counts().violations[text + prefix]++ == 0;
  }
  if (is_new) fprintf(stderr, "cuda double: %s\n", text);
  tell(text, 0, 0);
}

}  // namespace cuda_double

using namespace cuda_double;

extern "C" {
void cuda_double_set_listener(cuda_double_listener one) { listener = one; }
void cuda_double_count(const char* name, long by) { count(name, by); }
void cuda_double_report_violation(const char* text) { report_violation("%s", text); }

int cuda_double_write_counts(char* text, int size) {
  auto memory = memory_now();
  count_peak("device bytes peak", memory.device_bytes);  // over all devices, even if nothing was allocated since a reset
  count_peak("pinned bytes peak", memory.pinned_bytes);
  Lock lock(counts().mutex);
  std::string all;
  auto add = [&](const char* prefix, const std::map<std::string, long>& numbers) {
    for (auto& [name, number] : numbers) all += prefix + name + "\t" + std::to_string(number) + "\n";
  };
  add("", counts().by_name);
  add("", {{"device bytes now", memory.device_bytes}, {"pinned bytes now", memory.pinned_bytes}});
  add("", counts().peaks);
  add("launched without effect: ", counts().launches);
  add("VIOLATION: ", counts().violations);
  snprintf(text, size, "%s", all.c_str());
  return (int)all.size();
}

void cuda_double_reset_counts() {  // keeps violations, which are always errors
  Lock lock(counts().mutex);
  counts().by_name.clear();
  counts().peaks.clear();
  counts().launches.clear();
}
}
