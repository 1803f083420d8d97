"""Model profiles by arithmetic: a GPT-like decoder of any size, small random models, and machines for plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from hf_lohan.costs import (
    BlockProfile,
    CpuProfile,
    DeviceProfile,
    HardwareProfile,
    ModelProfile,
    OperationProfile,
    RecordTraffic,
    SizeClass,
    SsdProfile,
    TrainingSetup,
)

GB = 10**9


def decoder(
    hidden: int, num_layers: int, batch_size: int, sequence_length: int, vocabulary: int, *, ffn_factor: int = 4
) -> ModelProfile:
    """Return OPT's shape in bfloat16. The last product of a layer is not listed, because backward does not need its
    output.
    """
    num_tokens = batch_size * sequence_length
    wide = ffn_factor * hidden

    def product(index: int, width: int) -> OperationProfile:
        return OperationProfile(
            name=f"aten.addmm#{index}", flops=2.0 * num_tokens * hidden * width, output_bytes=2 * num_tokens * width
        )

    attention = OperationProfile(
        name="aten._scaled_dot_product_flash_attention#0",
        flops=4.0 * num_tokens * sequence_length * hidden,
        output_bytes=2 * num_tokens * hidden,
    )
    operations = (*(product(index, hidden) for index in range(3)), attention, product(3, hidden), product(4, wide))
    layer_flops = sum(operation.flops for operation in operations) + 2.0 * num_tokens * hidden * wide
    num_layer_params = (4 + 2 * ffn_factor) * hidden**2 + (9 + ffn_factor) * hidden
    layers = [
        _block(f"layers.{index}", SizeClass.LAYER, num_layer_params, layer_flops)
        | {
            "input_bytes": 2 * num_tokens * hidden,
            "operations": operations,
            "saved_bytes": (14 + 5 * ffn_factor) * num_tokens * hidden,
        }
        for index in range(num_layers)
    ]
    embedding = _block("embed", SizeClass.OUTER, (vocabulary + sequence_length) * hidden, 0.0)
    head = _block("head", SizeClass.OUTER, 0, 2.0 * num_tokens * hidden * vocabulary)
    return ModelProfile(
        blocks=tuple(BlockProfile(**block) for block in (embedding, *layers, head)),
        batch_size=batch_size,
        sequence_length=sequence_length,
        param_itemsize=2,
    )


def _block(name: str, size_class: SizeClass, num_params: int, flops: float) -> dict[str, Any]:
    return {
        "name": name,
        "size_class": size_class,
        "num_params": num_params,
        "num_trainable_params": num_params,
        "param_bytes": 2 * num_params,
        "flops": flops,
    }


def machine(
    *,
    flops_per_s: float = 100.0,
    link_bytes_per_s: float = 50.0,
    ssd_read_bytes_per_s: float = 20.0,
    ssd_write_bytes_per_s: float = 10.0,
    optimizer_params_per_s: float = 1e9,
    gpu_memory_bytes: int = 10**9,
    cpu_memory_bytes: int = 10**9,
    ssd_capacity_bytes: int = 10**12,
    **more: Any,
) -> HardwareProfile:
    """Return a slow machine, so that small numbers give whole seconds. `more` goes to HardwareProfile."""
    return HardwareProfile(
        device=DeviceProfile(flops_per_s=flops_per_s, memory_bytes=gpu_memory_bytes),
        h2d_bytes_per_s=link_bytes_per_s,
        d2h_bytes_per_s=link_bytes_per_s,
        ssd=(
            SsdProfile(
                read_bytes_per_s=ssd_read_bytes_per_s,
                write_bytes_per_s=ssd_write_bytes_per_s,
                capacity_bytes=ssd_capacity_bytes,
            ),
        ),
        cpu=CpuProfile(memory_bytes=cpu_memory_bytes, optimizer_params_per_s=optimizer_params_per_s),
        **more,
    )


def tiny_model(
    operations: list[tuple[float, int]], *, num_layers: int = 1, num_params: int = 100, input_bytes: int = 50
) -> ModelProfile:
    """Return layers whose operations have these (FLOPs, output bytes)."""
    layer = {
        "num_params": num_params,
        "num_trainable_params": num_params,
        "param_bytes": 2 * num_params,
        "flops": sum(flops for flops, _ in operations) + 10.0,
        "input_bytes": input_bytes,
        "saved_bytes": sum(output_bytes for _, output_bytes in operations),
        "operations": tuple(
            OperationProfile(name=f"aten.mm#{index}", flops=flops, output_bytes=output_bytes)
            for index, (flops, output_bytes) in enumerate(operations)
        ),
    }
    blocks = [BlockProfile(name=f"layers.{i}", size_class=SizeClass.LAYER, **layer) for i in range(num_layers)]
    return ModelProfile(blocks=tuple(blocks), batch_size=1, sequence_length=8, param_itemsize=2)


def paper_setup(**changes: Any) -> TrainingSetup:
    """Return the setup of LoHan's paper: 2P bytes of weights, 14P of states, no records in RAM, updates in backward."""
    values: dict[str, Any] = {
        "gpu_memory_bytes": 0,
        "cpu_memory_bytes": 10**9,
        "state_bytes_per_param": 12,
        "update_reads_param": False,
        "counts_fill": False,
        "durability": "checkpoint",
        "clip": "none",
    }
    return TrainingSetup(**values | changes)


def records_of(model: ModelProfile, state_bytes_per_param: int = 12) -> tuple[RecordTraffic, ...]:
    """Return a record of weights and a record of all states for each block, with the bytes that a step reads."""
    records = []
    for block in model.blocks:
        trained_bytes = block.num_trainable_params * model.param_itemsize
        state_bytes = block.num_trainable_params * state_bytes_per_param
        fetched_bytes = 2 * block.param_bytes
        for kind, num_bytes, fetched, updated in (
            ("param", block.param_bytes, fetched_bytes, trained_bytes),
            ("states", state_bytes, 0, state_bytes),
        ):
            records.append(
                RecordTraffic(
                    block=block.name,
                    kind=kind,
                    num_bytes=num_bytes,
                    read_bytes_per_step=fetched + updated,
                    update_read_bytes=updated,
                )
            )
    return tuple(record for record in records if record.num_bytes)


operation_lists = st.lists(st.tuples(st.integers(1, 400).map(float), st.integers(1, 200)), min_size=1, max_size=5)
tiny_models = st.builds(
    tiny_model,
    operation_lists,
    num_layers=st.integers(1, 2),
    num_params=st.integers(1, 400),
    input_bytes=st.integers(1, 100),
)


def join(models: list[ModelProfile]) -> ModelProfile:
    """Return one model with the layers of all."""
    blocks = [block for model in models for block in model.blocks]
    named = tuple(replace(block, name=f"layers.{index}") for index, block in enumerate(blocks))
    return replace(models[0], blocks=named)


mixed_models = st.lists(tiny_models, min_size=1, max_size=4).map(join)
"""Models whose layers differ."""
rates = st.floats(1.0, 500.0)
machines = st.builds(
    machine,
    flops_per_s=rates,
    link_bytes_per_s=rates,
    ssd_read_bytes_per_s=rates,
    ssd_write_bytes_per_s=rates,
    optimizer_params_per_s=rates,
    gpu_memory_bytes=st.integers(1500, 6000),
    ssd_capacity_bytes=st.integers(10**5, 10**6),
    duplex_bytes_per_s=st.none() | rates,
    ssd_mixed_bytes_per_s=st.none() | rates,
)
"""Most devices have memory for a layer. Drives have room for the states and some activations."""
setups = st.builds(
    TrainingSetup,
    gpu_memory_bytes=st.integers(0, 3000),
    cpu_memory_bytes=st.integers(0, 20_000),
    activation_cpu_bytes=st.none() | st.integers(0, 1000),
    state_bytes_per_param=st.sampled_from([8.0, 10.0, 12.0]),
    update_reads_param=st.booleans(),
    clip=st.sampled_from(["none", "defer", "speculate", "auto"]),
    clip_rate=st.floats(0.0, 1.0),
    num_micro_batches=st.integers(1, 3),
    durability=st.sampled_from(["step", "checkpoint"]),
    spilled_gradient_bytes=st.integers(0, 1200),
    turnaround_bytes=st.integers(0, 300),
    counts_fill=st.booleans(),
)
