// Operators with a kernel for CUDA, and no kernel or a different one for the CPU.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <map>

#include "kernels.h"

namespace cuda_double {
namespace {

class Arguments {  // the arguments of one call, by name
 public:
  Arguments(const c10::OperatorHandle& op, const Stack& stack) : schema_(op.schema()), stack_(stack) {}

  bool has(const char* name) const { return schema_.argumentIndexWithName(name).has_value(); }
  IValue operator[](const char* name) const {
    auto index = schema_.argumentIndexWithName(name);
    TORCH_CHECK(index, "cuda double: ", schema_.name(), " has no argument ", name);
    return stack_[*index];
  }
  Tensor tensor(const char* name) const {
    auto value = (*this)[name];
    return value.isTensor() ? value.toTensor() : Tensor();
  }
  std::optional<Tensor> optional_tensor(const char* name) const {
    auto value = tensor(name);
    return value.defined() && value.numel() ? std::optional<Tensor>(value) : std::nullopt;
  }
  std::optional<double> optional_double(const char* name) const {
    auto value = (*this)[name];
    return value.isNone() ? std::nullopt : std::optional<double>(value.toDouble());
  }
  std::vector<int64_t> numbers(const char* name) const { return (*this)[name].toIntVector(); }

 private:
  const c10::FunctionSchema& schema_;
  const Stack& stack_;
};

// ---- attention: the flash and memory-efficient kernels, computed by the CPU's flash attention if possible

const int64_t EFFICIENT_ROWS = 32;  // the efficient kernel pads its log-sum-exp to a multiple of this

struct Attention {  // one call, forward or backward
  Arguments arguments;
  bool is_efficient = arguments.has("attn_bias");
  bool is_causal = arguments["is_causal"].toBool();
  double dropout = arguments["dropout_p"].toDouble();
  Tensor query = arguments.tensor("query"), key = arguments.tensor("key"), value = arguments.tensor("value");
  std::optional<double> scale = arguments.optional_double("scale");
  std::optional<Tensor> bias = is_efficient ? arguments.optional_tensor("attn_bias") : std::nullopt;

  Attention(Arguments given) : arguments(given) {
    int64_t num_earlier = key.size(2) - query.size(2);
    if (!is_causal || is_efficient || num_earlier == 0) return;
    // With the flash kernel the last query sees the last key. The CPU's kernel has the first query see the first key.
    is_causal = false;
    bias = at::zeros({query.size(2), key.size(2)}, query.options());
    bias->masked_fill_(at::ones_like(*bias, at::kBool).triu(1 + num_earlier), -INFINITY);
  }

  // The CPU's kernel has no dropout and needs heads of one size.
  bool is_plain() const { return dropout == 0 && query.size(1) == key.size(1) && query.size(3) == value.size(3); }

  // Several query heads may share one head of keys and values.
  int64_t num_sharing() const { return query.size(1) / key.size(1); }
  Tensor shared(const Tensor& heads) const { return heads.to(at::kFloat).repeat_interleave(num_sharing(), 1); }
  Tensor summed(const Tensor& grads, const Tensor& like) const {
    return grads.unflatten(1, {key.size(1), num_sharing()}).sum(2).to(like.scalar_type());
  }

  double factor() const { return scale.value_or(1 / std::sqrt((double)query.size(3))); }
  Tensor scores() const {
    Tensor all = at::matmul(query.to(at::kFloat), shared(key).transpose(2, 3)) * factor();
    if (bias) all = all + *bias;
    if (is_causal) all = all.masked_fill(at::ones_like(all, at::kBool).triu(1), -INFINITY);
    return all;
  }
  // The dropout mask with its scale, which is the same for every call with this seed.
  Tensor kept(const Tensor& probabilities, int64_t seed) const {
    if (dropout == 0) return at::ones_like(probabilities);
    auto generator = at::detail::createCPUGenerator(seed);
    return at::empty_like(probabilities).bernoulli_(1 - dropout, generator) / (1 - dropout);
  }
};

void attention(const c10::OperatorHandle& op, Stack& stack) {
  Attention a(Arguments(op, stack));
  Tensor out, log_sum_exp, seed = at::zeros({}, at::kLong), offset = at::zeros({}, at::kLong);
  if (a.is_plain()) {
    std::tie(out, log_sum_exp) = at::_scaled_dot_product_flash_attention_for_cpu(a.query, a.key, a.value, 0.0, a.is_causal, a.bias, a.scale);
  } else {
    Tensor scores = a.scores(), probabilities = scores.softmax(3);
    if (a.dropout > 0) seed.random_(generator_of_draw());
    log_sum_exp = scores.logsumexp(3);
    out = at::matmul(probabilities * a.kept(probabilities, seed.item<int64_t>()), a.shared(a.value)).to(a.query.scalar_type());
  }
  if (!a.is_efficient) {
    Tensor state = at::zeros({2}, at::kLong);
    state.select(0, 0).copy_(seed);
    stack = {out, log_sum_exp, Tensor(), Tensor(), a.query.size(2), a.key.size(2), state, offset, at::zeros({0}, at::kLong)};
    return;
  }
  if (a.arguments["compute_log_sumexp"].toBool()) {
    int64_t missing = (EFFICIENT_ROWS - a.query.size(2) % EFFICIENT_ROWS) % EFFICIENT_ROWS;
    log_sum_exp = at::constant_pad_nd(log_sum_exp, {0, missing}, INFINITY);
  } else {
    log_sum_exp = log_sum_exp.slice(2, 0, 0);
  }
  stack = {out, log_sum_exp, seed, offset};
}

void attention_backward(const c10::OperatorHandle& op, Stack& stack) {
  Attention a(Arguments(op, stack));
  Tensor grad_out = a.arguments.tensor(a.is_efficient ? "grad_out_" : "grad_out"), out = a.arguments.tensor("out");
  Tensor log_sum_exp = a.arguments.tensor("logsumexp").slice(2, 0, a.query.size(2));
  Tensor grad_query, grad_key, grad_value;
  if (a.is_plain()) {
    std::tie(grad_query, grad_key, grad_value) = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, a.query, a.key, a.value, out, log_sum_exp, 0.0, a.is_causal, a.bias, a.scale);
  } else {
    Tensor grad = grad_out.to(at::kFloat), probabilities = (a.scores() - log_sum_exp.unsqueeze(3)).exp();
    Tensor kept = a.kept(probabilities, a.arguments.tensor("philox_seed").flatten()[0].item<int64_t>());
    Tensor grad_scores = at::matmul(grad, a.shared(a.value).transpose(2, 3)) * kept - (grad * out.to(at::kFloat)).sum(3, true);
    grad_scores = probabilities * grad_scores * a.factor();
    grad_query = at::matmul(grad_scores, a.shared(a.key)).to(a.query.scalar_type());
    grad_key = a.summed(at::matmul(grad_scores.transpose(2, 3), a.query.to(at::kFloat)), a.key);
    grad_value = a.summed(at::matmul((probabilities * kept).transpose(2, 3), grad), a.value);
  }
  stack = {grad_query, grad_key, grad_value};
  if (a.is_efficient) stack.emplace_back(Tensor());
}

// ---- RMS normalization

std::vector<int64_t> last_dims(int64_t number) {
  std::vector<int64_t> dims;
  for (int64_t i = 0; i < number; i++) dims.push_back(-1 - i);
  return dims;
}

void rms_norm(const c10::OperatorHandle& op, Stack& stack) {
  Arguments a(op, stack);
  Tensor input = a.tensor("input").to(at::kFloat), weight = a.tensor("weight");
  double epsilon = a.optional_double("eps").value_or(std::numeric_limits<float>::epsilon());
  Tensor inverse_root = at::rsqrt(at::mean(input * input, last_dims(a.numbers("normalized_shape").size()), true) + epsilon);
  Tensor out = input * inverse_root;
  if (weight.defined()) out = out * weight;
  stack = {out.to(a.tensor("input").scalar_type()), inverse_root};
}

void rms_norm_backward(const c10::OperatorHandle& op, Stack& stack) {
  Arguments a(op, stack);
  Tensor grad = a.tensor("grad_out").to(at::kFloat), input = a.tensor("input").to(at::kFloat), inverse_root = a.tensor("rstd"), weight = a.tensor("weight");
  int64_t num_inner = a.numbers("normalized_shape").size();
  std::vector<int64_t> outer;
  for (int64_t i = 0; i < input.dim() - num_inner; i++) outer.push_back(i);
  Tensor normal = input * inverse_root, scaled = weight.defined() ? grad * weight : grad;
  Tensor grad_input = inverse_root * (scaled - normal * at::mean(scaled * normal, last_dims(num_inner), true));
  Tensor grad_weight = weight.defined() ? (grad * normal).sum(outer).to(weight.scalar_type()) : Tensor();
  stack = {grad_input.to(a.tensor("input").scalar_type()), grad_weight};
}

// ---- others

void layer_norm_backward(const c10::OperatorHandle& op, Stack& stack) {  // CUDA's kernel has mean and rstd in float32
  auto dtype = Arguments(op, stack).tensor("input").scalar_type();
  bool is_short = dtype == at::kBFloat16 || dtype == at::kHalf;
  auto cast = [](Stack& values, at::ScalarType to) {
    for (auto& value : values)
      if (value.isTensor() && value.toTensor().defined()) value = IValue(value.toTensor().to(to));
  };
  if (is_short) cast(stack, at::kFloat);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  if (is_short) cast(stack, dtype);  // if the weight is in float32, the write to its gradient casts again
}

void convolution(const c10::OperatorHandle& op, Stack& stack) {
  Arguments a(op, stack);
  std::vector<int64_t> no_output_padding(a.numbers("padding").size(), 0);
  stack = {at::convolution(a.tensor("self"), a.tensor("weight"), {}, a.numbers("stride"), a.numbers("padding"), a.numbers("dilation"), false,
                           no_output_padding, a["groups"].toInt())};
}

void depthwise_convolution(const c10::OperatorHandle& op, Stack& stack) {
  Arguments a(op, stack);
  stack = {at::convolution(a.tensor("self"), a.tensor("weight"), a.optional_tensor("bias"), a.numbers("stride"), a.numbers("padding"),
                           a.numbers("dilation"), false, {0, 0}, a.tensor("self").size(1))};
}

void histogram(const c10::OperatorHandle& op, Stack& stack) {  // the CPU's kernel supports only floating point
  Arguments a(op, stack);
  Tensor self = a.tensor("self");
  Tensor values = at::isIntegralType(self.scalar_type(), true) ? self.to(at::kFloat) : self;
  stack = {at::histc(values, a["bins"].toInt(), a["min"].toScalar(), a["max"].toScalar()).to(self.scalar_type())};
}

void product_in_dtype(const c10::OperatorHandle& op, Stack& stack) {  // bfloat16 factors and a float32 product
  Arguments a(op, stack);
  auto dtype = a["out_dtype"].toScalarType();
  auto operand = [&](size_t index) { return stack[index].toTensor().to(dtype); };
  auto name = op.schema().name();
  if (name == "aten::mm") stack = {at::mm(operand(0), operand(1))};
  else if (name == "aten::bmm") stack = {at::bmm(operand(0), operand(1))};
  else if (name == "aten::addmm") stack = {at::addmm(operand(0), operand(1), operand(2))};
  else stack = {at::baddbmm(operand(0), operand(1), operand(2))};
}

void grouped_product_shapes(Stack& stack) {
  Tensor a = stack[0].toTensor(), b = stack[1].toTensor();
  auto dtype = stack[4].isNone() ? a.scalar_type() : stack[4].toScalarType();
  std::vector<int64_t> sizes;
  if (a.dim() == 2 && b.dim() == 2) sizes = {stack[2].toTensor().size(0), a.size(0), b.size(1)};
  else if (a.dim() == 2) sizes = {a.size(0), b.size(2)};
  else if (b.dim() == 2) sizes = {a.size(1), b.size(1)};
  else sizes = {a.size(0), a.size(1), b.size(2)};
  stack = {at::empty(sizes, a.options().dtype(dtype))};
}

void dropout(const c10::OperatorHandle& op, Stack& stack) {
  Arguments a(op, stack);
  Tensor input = a.tensor("input"), mask = at::empty_like(input, input.options().dtype(at::kBool));
  double kept = 1 - a["p"].toDouble();
  if (!a["train"].isNone() && !a["train"].toBool()) {
    stack = {input.clone(), mask.fill_(true)};
    return;
  }
  mask.bernoulli_(kept, generator_of_draw());
  stack = {input.mul(mask).mul_(kept == 0 ? 0 : 1 / kept), mask};
}

const std::map<std::string, Compute> SPECIAL = {
    {"aten::native_dropout", dropout},
    {"aten::_scaled_dot_product_flash_attention", attention},
    {"aten::_scaled_dot_product_flash_attention_backward", attention_backward},
    {"aten::_scaled_dot_product_efficient_attention", attention},
    {"aten::_scaled_dot_product_efficient_attention_backward", attention_backward},
    {"aten::_fused_rms_norm", rms_norm},
    {"aten::_fused_rms_norm_backward", rms_norm_backward},
    {"aten::native_layer_norm_backward", layer_norm_backward},
    {"aten::cudnn_convolution", convolution},
    {"aten::_conv_depthwise2d", depthwise_convolution},
    {"aten::histc", histogram},
    {"aten::mm.dtype", product_in_dtype},
    {"aten::bmm.dtype", product_in_dtype},
    {"aten::addmm.dtype", product_in_dtype},
    {"aten::baddbmm.dtype", product_in_dtype},
};

}  // namespace

const Compute* special_operator(const std::string& name) {
  auto known = SPECIAL.find(name);
  return known == SPECIAL.end() ? nullptr : &known->second;
}

bool compute_shapes(const std::string& name, Stack& meta) {
  if (name != "aten::_grouped_mm") return false;
  grouped_product_shapes(meta);
  return true;
}

}  // namespace cuda_double
