// The environment variables that define the device. README.md lists them.
#include <cstdlib>
#include <cstring>

#include "runtime.h"

namespace cuda_double {
namespace {

const char* text_of(const char* name) {
  const char* text = getenv((std::string("CUDA_DOUBLE_") + name).c_str());
  return text && *text ? text : nullptr;
}

double number_of(const char* name, double otherwise) {  // such as 24G, 450M or 1K
  const char* text = text_of(name);
  if (!text) return otherwise;
  char* unit;
  double value = strtod(text, &unit);
  switch (*unit) {
    case 'K': case 'k': return value * (1ll << 10);
    case 'M': case 'm': return value * (1ll << 20);
    case 'G': case 'g': return value * (1ll << 30);
    default: return value;
  }
}

bool is_on(const char* name, bool otherwise) { return number_of(name, otherwise) != 0; }

int visible_devices(int number) {
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) return number;
  if (!*visible || *visible == '-') return 0;
  int named = 1;
  for (const char* c = visible; *c; c++) named += *c == ',';
  return named < number ? named : number;
}

Settings read() {
  Settings s;
  s.computes = is_on("COMPUTE", true);
  s.is_async = is_on("ASYNC", false);
  s.finds_races = is_on("RACES", false);
  s.is_verbose = is_on("VERBOSE", false);
  s.copy_delay_s = number_of("COPY_DELAY_US", 0) * 1e-6;
  s.kernel_delay_s = number_of("KERNEL_DELAY_US", 0) * 1e-6;
  s.copy_bytes_per_s = number_of("COPY_GBPS", 0) * 1e9;
  s.memory_bytes = (long long)number_of("MEMORY", 24ll << 30);
  s.context_bytes = (long long)number_of("CONTEXT", 450ll << 20);
  s.pin_limit_bytes = (long long)number_of("PIN_LIMIT", 1ll << 60);
  s.allocations_before_failure = (long)number_of("FAIL_ALLOCATION", 0) - 1;
  s.seed = (unsigned)number_of("SEED", 0);
  s.num_devices = visible_devices((int)number_of("DEVICES", 1));
  return s;
}

}  // namespace

Settings& settings() {
  static Settings* all = new Settings(read());
  return *all;
}

}  // namespace cuda_double
