// What the files of the kernels share.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace cuda_double {

using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;

inline std::string full_name(const c10::OperatorHandle& op) {  // aten::add.Tensor
  auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

// special_operators.cpp: operators that the CPU lacks, by those that it has. From arguments on the CPU to results.
using Compute = std::function<void(const c10::OperatorHandle&, Stack&)>;
const Compute* special_operator(const std::string& name);
// Where the shape function for the meta device is stricter than the kernel on the CPU. False: there is none of ours.
bool compute_shapes(const std::string& name, Stack& meta);

// random_numbers.cpp: the CUDA generator keeps the state; a CPU generator made of it gives the numbers.
struct Draw {
  bool draws = false;
  bool by_argument = false;  // the operator is given its generator
  uint64_t seed = 0;
};
Draw prepare_draw(const c10::OperatorHandle& op, Stack& cpu_arguments);
void compute_with(const Draw& draw, const std::function<void()>& compute);
// For what draws within `compute`. The CPU's default generator is the program's too, which may set its state meanwhile.
at::Generator generator_of_draw();

}  // namespace cuda_double
