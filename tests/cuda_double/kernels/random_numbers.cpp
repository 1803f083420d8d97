// Random numbers are drawn on the CPU. Their seed comes from the CUDA generator's seed and offset, so states can be saved and restored.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/cuda/CUDAFunctions.h>

#include <mutex>

#include "kernels.h"

namespace cuda_double {
namespace {

const uint64_t OFFSET_OF_A_DRAW = 4;  // the same as for a small CUDA kernel

std::mutex& default_generator_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

thread_local uint64_t seed_of_draw = 0;

}  // namespace

at::Generator generator_of_draw() { return at::detail::createCPUGenerator(seed_of_draw); }

Draw prepare_draw(const c10::OperatorHandle& op, Stack& cpu_arguments) {
  Draw draw;
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return draw;
  std::optional<at::Generator> given;
  auto place = op.schema().argumentIndexWithName("generator");
  if (place && cpu_arguments[*place].isGenerator()) given = cpu_arguments[*place].toGenerator();
  auto generator = given ? *given : at::globalContext().defaultGenerator(at::Device(at::kCUDA, c10::cuda::current_device()));
  if (generator.device().type() != at::kCUDA) return draw;
  std::lock_guard<std::mutex> lock(generator.mutex());
  uint64_t offset = generator.get_offset();
  generator.set_offset(offset + OFFSET_OF_A_DRAW);
  draw = {true, place.has_value(), generator.current_seed() * 0x9E3779B97F4A7C15ull + offset};
  if (draw.by_argument) cpu_arguments[*place] = IValue(at::detail::createCPUGenerator(draw.seed));
  return draw;
}

void compute_with(const Draw& draw, const std::function<void()>& compute) {
  if (!draw.draws || draw.by_argument) return compute();
  seed_of_draw = draw.seed;
  std::lock_guard<std::mutex> one_at_a_time(default_generator_mutex());
  auto generator = at::detail::getDefaultCPUGenerator();
  auto before = generator.get_state();
  generator.set_current_seed(draw.seed);
  compute();
  generator.set_state(before);
}

}  // namespace cuda_double
