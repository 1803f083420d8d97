// Each operator that has a kernel for CUDA gets one that calls the CPU's kernel on the same memory, in the order of the current
// stream, so the numbers are those of the CPU. Queued work holds addresses, never tensors: memory that is reused too early is
// overwritten, as on a GPU.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <set>

#include "../runtime/interface.h"
#include "kernels.h"

extern "C" void omp_set_num_threads(int);        // torch's OpenMP
extern "C" int MKL_Set_Num_Threads_Local(int);   // torch's MKL; returns the number before, 0 for the number of all threads

namespace cuda_double {
namespace {

using c10::DispatchKey;

// These operators keep torch's own kernels: they only make or describe memory, copy, or dispatch to other operators.
const std::set<std::string> KEPT = {
    "aten::empty.memory_format", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::record_stream", "aten::is_set_to",
    "aten::_local_scalar_dense", "aten::_fused_sdp_choice", "aten::_cudnn_init_dropout_state", "aten::_use_cudnn_ctc_loss",
    "aten::_use_cudnn_ctc_loss.Tensor", "aten::_nested_view_from_buffer", "aten::_pin_memory", "aten::is_pinned",
};

struct BelowTorch {  // hides calls of a kernel from autograd, modes and autocast
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard others{
      c10::DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PythonDispatcher, DispatchKey::AutocastCPU,
                           DispatchKey::AutocastCUDA, DispatchKey::Functionalize})};
};

// ---- views of one tensor on other devices

void take_flags(Tensor& alias, const Tensor& original) {
  if (original.is_conj()) alias._set_conj(true);
  if (original.is_neg()) alias._set_neg(true);
  if (original.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
}

Tensor on_cpu(const Tensor& tensor) {  // the same memory
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  Tensor alias = tensor.numel() ? at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options)
                                : at::empty_strided(tensor.sizes(), tensor.strides(), options);
  take_flags(alias, tensor);
  return alias;
}

Tensor on_meta(const Tensor& tensor) {  // the same shape
  Tensor alias = at::empty_strided(tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.scalar_type()).device(at::kMeta));
  take_flags(alias, tensor);
  return alias;
}

Tensor new_on_cuda(const Tensor& like) {
  auto here = at::Device(at::kCUDA, c10::cuda::current_device());
  return at::empty_strided(like.sizes(), like.strides(), at::TensorOptions().dtype(like.scalar_type()).device(here));
}

void add_access(std::vector<Access>& accesses, const Tensor& tensor, bool writes) {
  if (!tensor.defined() || !tensor.numel() || !tensor.is_cuda()) return;
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); dim++) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  auto start = (uintptr_t)tensor.data_ptr();
  accesses.push_back({start, start + (last + 1) * tensor.element_size(), writes});
}

// Returns the value with `map` applied to each of its tensors.
template <class Map>
IValue map_tensors(const IValue& value, Map map) {
  auto map_defined = [&](const Tensor& tensor) { return tensor.defined() ? map(tensor) : tensor; };
  if (value.isTensor()) return value.toTensor().defined() ? IValue(map(value.toTensor())) : value;
  if (value.isTensorList()) {
    std::vector<Tensor> all;
    for (const Tensor& tensor : value.toTensorList()) all.push_back(map_defined(tensor));
    return IValue(all);
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> all;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
      all.push_back(tensor ? std::optional<Tensor>(map_defined(*tensor)) : tensor);
    return IValue(all);
  }
  return value;
}

// ---- information from a schema

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// Returns the argument that is also a result (in place, out=).
std::optional<size_t> argument_of_result(const c10::FunctionSchema& schema, size_t result) {
  auto* alias = schema.returns()[result].alias_info();
  if (!alias || !alias->isWrite()) return std::nullopt;
  for (size_t i = 0; i < schema.arguments().size(); i++)
    if (is_written(schema.arguments()[i]) && schema.arguments()[i].alias_info()->beforeSets() == alias->beforeSets()) return i;
  return std::nullopt;
}

bool is_a_view(const c10::FunctionSchema& schema) {
  for (auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

bool returns_only_tensors(const c10::FunctionSchema& schema) {
  for (auto& result : schema.returns())
    if (result.type()->kind() != c10::TypeKind::TensorType && result.type()->kind() != c10::TypeKind::ListType) return false;
  return true;
}

// ---- one call of an operator

struct Call {
  c10::OperatorHandle op;
  std::string name;
  Stack arguments;
  void* stream;

  const c10::FunctionSchema& schema() const { return op.schema(); }
};

// A kernel computes in one thread. The number of threads changes the order of some sums (such as the gradients of a norm's weight),
// and a stream's thread would take the number that the program has set when its first kernel happens to run.
struct InOneThread {
  const int before = at::get_num_threads();  // initializes the thread, which would otherwise overwrite the number
  const int before_in_mkl = MKL_Set_Num_Threads_Local(1);
  InOneThread() { omp_set_num_threads(1); }
  ~InOneThread() {
    omp_set_num_threads(before);
    MKL_Set_Num_Threads_Local(before_in_mkl);
  }
};

void compute(const c10::OperatorHandle& op, const std::string& name, Stack& stack, const Draw& draw) {
  InOneThread here;
  compute_with(draw, [&] {
    if (auto* special = special_operator(name)) (*special)(op, stack);
    else op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), &stack);
  });
}

// Returns the results for torch: arguments that are results by the schema, and new tensors.
Stack results_of(const Call& call, Stack made) {
  for (size_t i = 0; i < call.schema().returns().size(); i++)
    if (auto argument = argument_of_result(call.schema(), i)) made[i] = call.arguments[*argument];
  return made;
}

// Computes while torch waits, so the sizes of the results need not be known before.
Stack call_at_once(const Call& call) {
  if (cuda_double_is_async()) cuda_double_drain(call.stream);
  auto& schema = call.schema();
  std::vector<Access> accesses;
  std::vector<std::pair<Tensor, Tensor>> to_write;  // device, value
  std::vector<std::pair<Tensor, Tensor>> to_grow;   // an empty out= argument and its stand-in
  Stack stack;
  for (size_t i = 0; i < call.arguments.size(); i++) {
    bool writes = is_written(schema.arguments()[i]);
    stack.push_back(map_tensors(call.arguments[i], [&](const Tensor& tensor) {
      if (!tensor.is_cuda()) return tensor;
      if (writes && tensor.numel() == 0) {
        to_grow.emplace_back(tensor, at::empty(tensor.sizes(), tensor.options().device(at::kCPU)));
        return to_grow.back().second;
      }
      add_access(accesses, tensor, writes);
      return on_cpu(tensor);
    }));
  }
  auto draw = prepare_draw(call.op, stack);
  compute(call.op, call.name, stack, draw);

  for (auto& [target, value] : to_grow)
    if (value.numel()) {
      target.resize_(value.sizes());
      add_access(accesses, target, true);
      to_write.emplace_back(target, value);
    }
  Stack made;
  for (size_t i = 0; i < stack.size(); i++)
    made.push_back(argument_of_result(schema, i) ? IValue() : map_tensors(stack[i], [&](const Tensor& value) {
      if (!value.device().is_cpu()) return value;
      Tensor result = new_on_cuda(value);
      add_access(accesses, result, true);
      if (value.numel()) to_write.emplace_back(result, value.resolve_conj());
      return result;
    }));
  // Another thread may have freed this memory meanwhile. Work queued on the memory runs first.
  if (cuda_double_is_async()) cuda_double_drain(call.stream);
  for (auto& [target, value] : to_write) on_cpu(target).copy_(value);
  cuda_double_touch(call.stream, call.name.c_str(), accesses.data(), (int)accesses.size());
  return results_of(call, std::move(made));
}

struct Job {  // a queued call
  c10::OperatorHandle op;
  std::string name;
  Stack stack;
  Draw draw;
  std::vector<std::pair<size_t, Tensor>> targets;  // the memory for the n-th tensor of the results
};

void run_job(void* data) {
  std::unique_ptr<Job> job((Job*)data);
  try {
    BelowTorch below;
    compute(job->op, job->name, job->stack, job->draw);
    size_t index = 0;
    for (auto& result : job->stack) {
      auto place = [&](const Tensor& value) {
        for (auto& [wanted, target] : job->targets)
          if (wanted == index && value.defined() && value.numel()) target.copy_(value);
        index++;
      };
      if (result.isTensorList())
        for (const Tensor& value : result.toTensorList()) place(value);
      else if (result.isTensor()) place(result.toTensor());
      else index++;
    }
  } catch (const std::exception& error) {
    cuda_double_report_violation(("the kernel of " + job->name + " failed: " + std::string(error.what()).substr(0, 200)).c_str());
  }
}

// Finds the shapes of the results on the meta device. Returns false if they depend on the data.
bool find_shapes(const Call& call, Stack& meta) {
  bool depends_on_data = call.op.hasTag(at::Tag::dynamic_output_shape) || call.op.hasTag(at::Tag::data_dependent_output);
  if (depends_on_data || !(special_operator(call.name) || returns_only_tensors(call.schema()))) return false;
  try {
    for (auto& argument : call.arguments) meta.push_back(map_tensors(argument, [](const Tensor& tensor) { return tensor.is_cuda() ? on_meta(tensor) : tensor; }));
    for (auto& value : meta)
      if (value.isDevice()) value = IValue(at::Device(at::kMeta));
    if (!compute_shapes(call.name, meta)) call.op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::Meta), &meta);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// Puts the call into its stream's queue.
Stack call_in_stream(const Call& call) {
  auto& schema = call.schema();
  Stack meta;
  if (!find_shapes(call, meta)) {
    cuda_double_count(("blocking: " + call.name + " (the sizes of its results are in its data)").c_str(), 1);
    return call_at_once(call);
  }
  for (size_t i = 0; i < schema.returns().size(); i++)  // out= arguments that must grow
    if (auto argument = argument_of_result(schema, i))
      if (call.arguments[*argument].isTensor() && meta[i].isTensor() && call.arguments[*argument].toTensor().sizes() != meta[i].toTensor().sizes())
        call.arguments[*argument].toTensor().resize_(meta[i].toTensor().sizes());

  std::vector<Access> accesses;
  auto job = std::make_unique<Job>(Job{call.op, call.name, {}, {}, {}});
  for (size_t i = 0; i < call.arguments.size(); i++) {
    bool writes = is_written(schema.arguments()[i]);
    job->stack.push_back(map_tensors(call.arguments[i], [&](const Tensor& tensor) {
      if (!tensor.is_cuda()) {  // a number on the host, which is read at the launch
        Tensor number = tensor.clone();
        // A clone is not a Python number, and a clone in float64 would make the operation compute in float64.
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) number.unsafeGetTensorImpl()->set_wrapped_number(true);
        return number;
      }
      add_access(accesses, tensor, writes);
      return on_cpu(tensor);
    }));
  }
  job->draw = prepare_draw(call.op, job->stack);

  Stack made;
  size_t index = 0;
  for (size_t i = 0; i < meta.size(); i++) {
    bool is_argument = argument_of_result(schema, i).has_value();
    bool has_tensors = meta[i].isTensorList() || (meta[i].isTensor() && meta[i].toTensor().defined());
    if (!has_tensors) index++;
    made.push_back(map_tensors(meta[i], [&](const Tensor& shape) {
      size_t here = index++;
      if (is_argument || !shape.is_meta()) return shape;
      Tensor result = new_on_cuda(shape);
      add_access(accesses, result, true);
      job->targets.emplace_back(here, on_cpu(result));
      return result;
    }));
  }
  cuda_double_enqueue(call.stream, call.name.c_str(), accesses.data(), (int)accesses.size(), run_job, job.get());
  job.release();
  return results_of(call, std::move(made));
}

// ---- poison: memory freed to the caching allocator is filled with NaN, in the order of its stream

std::atomic<bool> is_to_poison{false};

void poison_what_is_freed() {
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const c10::CachingDeviceAllocator::TraceEntry& entry) {
    if (entry.action_ != c10::CachingDeviceAllocator::TraceEntry::FREE_COMPLETED) return;
    c10::cuda::CUDAGuard its_device(entry.device_);  // the default stream of each device has the same handle
    cuda_double_poison(entry.stream_, (void*)entry.addr_, entry.size_);
  });
}

// ---- registration

void kernel(const c10::OperatorHandle& op, Stack* stack) {
  if (is_to_poison && c10::cuda::CUDACachingAllocator::get()->initialized() && is_to_poison.exchange(false)) poison_what_is_freed();
  BelowTorch below;
  size_t num_arguments = op.schema().arguments().size();
  auto given = torch::jit::last(*stack, num_arguments);
  Call call{op, full_name(op), Stack(given.begin(), given.end()), nullptr};
  c10::OptionalDeviceGuard guard;
  for (auto& value : call.arguments) {
    map_tensors(value, [&](const Tensor& tensor) {
      if (tensor.is_cuda() && !guard.current_device()) guard.reset_device(tensor.device());
      return tensor;
    });
    if (guard.current_device()) break;
  }
  call.stream = c10::cuda::getCurrentCUDAStream().stream();
  Stack results = cuda_double_is_async() ? call_in_stream(call) : call_at_once(call);
  C10_CUDA_KERNEL_LAUNCH_CHECK();  // as after each launch, raises an error left by an earlier call
  torch::jit::drop(*stack, num_arguments);
  for (size_t i = 0; i < op.schema().returns().size(); i++) stack->push_back(std::move(results[i]));
}

struct Copy {
  Tensor to, from;
};

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  BelowTorch below;
  bool is_plain = self.scalar_type() == source.scalar_type() && self.is_contiguous() && source.is_contiguous() && self.sizes() == source.sizes() &&
                  self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg();
  bool is_within_device = self.is_cuda() && source.is_cuda() && self.device() == source.device();
  if (is_plain || !is_within_device || !self.numel()) return at::native::copy_(self, source, non_blocking);  // by cudaMemcpyAsync
  if (self.is_same(source)) return self;
  c10::cuda::CUDAGuard guard(self.device());
  std::vector<Access> accesses;
  add_access(accesses, source, false);
  add_access(accesses, self, true);
  auto run = [](void* data) {
    std::unique_ptr<Copy> copy((Copy*)data);
    BelowTorch below;
    copy->to.copy_(copy->from);
  };
  cuda_double_enqueue(c10::cuda::getCurrentCUDAStream().stream(), "copy_", accesses.data(), (int)accesses.size(), run,
                      new Copy{on_cpu(self), on_cpu(source)});
  return self;
}

bool is_replaced(const c10::OperatorHandle& op) {
  auto name = full_name(op);
  if (KEPT.count(name) || name.rfind("aten::set_", 0) == 0) return false;
  if (name.find("sparse") != std::string::npos || name.find("nested") != std::string::npos) return false;
  return !is_a_view(op.schema());
}

}  // namespace
}  // namespace cuda_double

using namespace cuda_double;

extern "C" int cuda_double_install_kernels() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  struct : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;  // torch warns about each replaced kernel
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  int number = 0;
  for (auto& name : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(DispatchKey::CUDA)) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op || !op->hasSchema() || !is_replaced(*op)) continue;
    library->impl(full_name(*op).substr(sizeof "aten::" - 1).c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel>());
    number++;
  }
  library->impl("copy_", TORCH_FN(copy_));
  return number;
}

extern "C" void cuda_double_poison_freed_memory() { is_to_poison = true; }  // from the first kernel on
