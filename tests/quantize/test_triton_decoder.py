"""The Triton kernels decode with the bits of the torch operations, also in a step of training. `tests/gpu` compares on
CUDA."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from packed_forms import FORMS, decoded
from python_runs import run_python
from short_runs import short_arguments
from torch import Tensor

import hf_lohan
from hf_lohan.quantize import FourBitForm, PackedForm, packed_form
from hf_lohan.testing.models import tiny_model, tiny_rows

HAS_TRITON = importlib.util.find_spec("triton") is not None
in_interpreter = pytest.mark.skipif(
    not HAS_TRITON or os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton, and TRITON_INTERPRET=1"
)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the kernels, with which this test also decodes on the CPU."""
    from hf_lohan.quantize import triton_decoder

    monkeypatch.setattr(packed_form, "kernels_for", lambda tensor: triton_decoder)
    return triton_decoder


def random_bytes(form: PackedForm, num_units: int, seed: int) -> tuple[Tensor, Tensor]:
    """All codes, and scales of any size, NaN and infinity among them."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(numel: int) -> Tensor:
        return torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=generator)

    codes, scales = drawn(num_units * form.unit_codes_bytes), drawn(num_units * form.unit_scales_bytes)
    if isinstance(form, FourBitForm) and form.quantization.double:
        num_outer = -(-form.quantization.num_scales(form.unit_numel) // 256)
        for unit in scales.view(num_units, -1):  # the mean is added to all scales, so no number here may be too large
            unit[: 4 * (num_outer + 1)].view(torch.float32).normal_(generator=generator)
    return codes, scales


def bits_of(values: Tensor) -> Tensor:
    """The bits of numbers, and one value for every NaN."""
    return values.masked_fill(values.isnan(), 1.25).view(torch.int32 if values.dtype.itemsize == 4 else torch.int16)


@in_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMS)
def test_kernels_have_the_bits_of_torch(
    name: str, dtype: torch.dtype, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, num_units = FORMS[name]
    drawn = [random_bytes(form, num_units, seed) for seed in range(4)]
    expected = [decoded(form, num_units, *of_seed, [], dtype) for of_seed in drawn]
    assert torch.cat(expected).unique().numel() > 40
    kernels: ModuleType = request.getfixturevalue("kernels")
    monkeypatch.setattr(kernels, "_BYTES_PER_PROGRAM", 256)
    for (codes, scales), values in zip(drawn, expected, strict=True):
        cuts = [one - one % form.cut_bytes for one in (codes.numel() // 3, codes.numel() // 2 + 1)]
        for some in ([], cuts):
            found = decoded(form, num_units, codes, scales, some, dtype)
            assert torch.equal(bits_of(found), bits_of(values))


@in_interpreter
@pytest.mark.parametrize("setting", ["nf4", {"method": "fp4", "double": False}, "int8"])
def test_a_training_step_launches_kernels_for_each_load(
    setting: Any, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    tiny_model("llama", hidden_size=64, num_hidden_layers=6).to(torch.bfloat16).save_pretrained(tmp_path / "base")

    def trained(name: str) -> tuple[list[float], dict[str, Tensor], int]:
        torch.manual_seed(1)
        adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
        trainer = hf_lohan.Trainer(
            str(tmp_path / "base"),
            short_arguments(tmp_path / name, max_steps=2, per_device_train_batch_size=8),
            train_dataset=tiny_rows(16),
            peft_config=adapters,
            offload={"cpu_memory": "6MiB", "gpu_memory": "550KiB", "quantize": setting},
        )
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        tensors = {name: value.clone() for name, value in peft.get_peft_model_state_dict(trainer.model).items()}
        engine = trainer.offload_engine
        assert engine is not None
        num_packed = sum(len(tuple(block.packed_slices)) for block in engine.layout.blocks)
        engine.close()
        return losses, tensors, num_packed

    expected = trained("torch")
    kernels: ModuleType = request.getfixturevalue("kernels")
    launches, launch = Counter[str](), kernels._launch

    def counted(kernel: Any, *arguments: Any, **settings: Any) -> None:
        launches[kernel.fn.__name__] += 1
        launch(kernel, *arguments, **settings)

    monkeypatch.setattr(kernels, "_launch", counted)
    found = trained("triton")
    assert found[0] == expected[0] and len(found[0]) == 2
    assert all(torch.equal(found[1][name], tensor) for name, tensor in expected[1].items())
    # Layers do not stay in their slots, so each packed weight is decoded in each of two steps.
    assert launches.keys() == {"_matrix_kernel" if setting == "int8" else "_four_bit_kernel"}
    assert launches.total() >= 2 * found[2] > 0


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton: pip install hf-lohan[triton]")
def test_kernels_in_the_interpreter() -> None:
    """The interpreter must be chosen before Triton is imported, so the tests above run in another process."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("this process runs them itself")
    run = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, TRITON_INTERPRET="1")
    assert f"{3 * len(FORMS) + 3} passed" in run.stdout, run.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton: pip install hf-lohan[triton]")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled in the interpreter")
def test_scales_of_scales_are_rounded_by_themselves_on_cuda() -> None:
    """Compiling needs no GPU. A product fused with the sum of the mean would change bits."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.language import int32

    from hf_lohan.quantize import triton_decoder

    tensors = {"codes": "*u8", "scales": "*u8", "outer": "*fp32", "values": "*fp32", "scale_values": "*fp32"}
    numbers = ("num_bytes", "first", "stop", "origin", "block", "num_outer", "width", "height")
    arguments = tensors | {"out": "*bf16"} | dict.fromkeys(numbers, "i32")
    constants: dict[str, Any] = {"IS_DOUBLE": True, "IS_TRANSPOSED": False, "SCALES_PER_SCALE": 256, "NUM_BYTES": 1024}
    constants["INDEX"] = int32
    source = ASTSource(
        triton_decoder._four_bit_kernel,
        {**arguments, **dict.fromkeys(constants, "constexpr")},
        constexprs={(len(arguments) + k,): value for k, value in enumerate(constants.values())},
    )
    target = GPUTarget("cuda", 90, 32)
    apart, fused = (compile(source, target=target, options={"enable_fp_fusion": on}).asm["ptx"] for on in (False, True))
    assert "mul.rn.f32" in apart and not [word for word in ("fma.", ".ftz") if word in apart]
    assert "fma." in fused, "nothing to fuse, so this test could not fail"
