// Declarations shared by the files of the kernels.
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

inline std::string full_name(const c10::OperatorHandle& op) {  // such as aten::add.Tensor
  auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

// special_operators.cpp: operators that the CPU lacks, built from operators it has. Maps arguments on the CPU to results.
using Compute = std::function<void(const c10::OperatorHandle&, Stack&)>;
const Compute* special_operator(const std::string& name);
// Replaces shape functions of the meta device that are stricter than the CPU kernel. Returns false without a replacement.
bool compute_shapes(const std::string& name, Stack& meta);

// random_numbers.cpp: the CUDA generator holds the state, and a CPU generator made from that state draws the numbers.
struct Draw {
  bool draws = false;
  bool by_argument = false;  // the operator has a generator argument
  uint64_t seed = 0;
};
Draw prepare_draw(const c10::OperatorHandle& op, Stack& cpu_arguments);
void compute_with(const Draw& draw, const std::function<void()>& compute);
// The generator for draws within `compute`. The program may change the CPU's default generator meanwhile.
at::Generator generator_of_draw();

}  // namespace cuda_double
