"""A batch that is much longer than the planned one gets a plan, and memory for its activations, before its forward. One
that needs more than `device_memory`, or whose shared keys need more than `cpu_memory`, ends the run before its forward.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from covering import slow_but
from engines import ONE_GENERATOR
from planned_models import TINY_EFFORT

from hf_lohan.activations.layer_runs import RowMemory
from hf_lohan.config import OffloadConfig
from hf_lohan.costs import BudgetError, HardwareProfile
from hf_lohan.device import CpuDevice
from hf_lohan.device.host_stack import HostStack
from hf_lohan.engine import EngineEvents, OffloadEngine, ParameterAccess, drain_model, open_tiers
from hf_lohan.engine.planned_memory import PlannedMemory
from hf_lohan.hardware import measure_computing
from hf_lohan.huggingface.attention import run_layers_in_chunks
from hf_lohan.huggingface.offloaded_model import enable_recompute
from hf_lohan.huggingface.sequences import ROWS, cut_rows, sharing_rows
from hf_lohan.optim import OffloadAdamW
from hf_lohan.planning import PlannedStep, RunPlan, StepShape, lay_out, run_plan
from hf_lohan.planning.layout import OffloadLayout
from hf_lohan.planning.run_plan import CHUNK_TOKENS, RUN_ID
from hf_lohan.planning.tracing import TracedModel
from hf_lohan.ranks import Links
from hf_lohan.testing.models import tiny_batch, tiny_model
from hf_lohan.testing.thread_ranks import run_ranks

SHORT, LONG = 16, 120
MACHINE = {
    "device": {"flops_per_s": 1e9, "memory_bytes": 1 << 34, "shares_cpu": True},
    "h2d_bytes_per_s": 1e10,
    "d2h_bytes_per_s": 1e10,
    "ssd": [{"read_bytes_per_s": 5e9, "write_bytes_per_s": 5e9, "capacity_bytes": 1 << 40}],
    "cpu": {"memory_bytes": 1 << 34, "optimizer_params_per_s": 1e9},
}


@dataclass
class Run:
    """A run with a step for each length."""

    plan: RunPlan
    losses: list[float] = field(default_factory=list)
    memory: list[tuple[int, int, int]] = field(default_factory=list)
    """After each step the RAM for activations, the bytes on the SSD since the start, and the swapped bytes since the
    start."""
    keys: list[tuple[int, int, int]] = field(default_factory=list)
    """After each step of ranks that share rows, the planned bytes of RAM for keys, the largest number of bytes so far,
    and all bytes of RAM of this rank."""
    planned: list[StepShape] = field(default_factory=list)
    """Shapes of the batches for which a plan was asked."""
    num_measured: int = 0
    """How many times the hardware was measured."""
    error: str = ""
    """The error of the forward that ended the run. The exception itself would keep the engine alive."""
    num_begun: int = 0
    """Number of blocks that this forward began."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def run_lengths(
    lengths: Sequence[int | Sequence[int]],
    folder: Path,
    links: Links | None = None,
    *,
    batch_size: int = 2,
    after_step: Callable[[OffloadEngine, int], object] = lambda _engine, _step: None,
    **settings: Any,
) -> Run:
    """Train one step with each length, or with the lengths of several micro-batches, on swapped activations."""
    links = links or Links.alone()
    with ONE_GENERATOR:
        model, device = tiny_model("llama"), CpuDevice()
    asked = {"activations": "swap", "_io_threads": 1, "ssd": str(folder / f"{links.ranks.rank}"), **settings}
    config = OffloadConfig.load(asked).resolve(
        host_memory_bytes=1 << 34, device_memory_bytes=1 << 34, num_cpus=2, default_ssd_path=""
    )
    steps = [[length] if isinstance(length, int) else list(length) for length in lengths]
    holds, ranks = max(map(len, steps)) > 1, links.ranks
    layout = lay_out(model, config, working_dtype=torch.float32, hold_gradients=holds, memory_is_host=True, ranks=ranks)
    tiers = open_tiers(layout, config, device, links)
    drain_model(layout.blocks, ParameterAccess(tiers.store, layout.blocks, tiers.states, links))
    plan = RunPlan(model, layout, config, device, tiers.store.durability, links)
    run = Run(plan)

    def measured(_traced: TracedModel, _shape: StepShape) -> HardwareProfile:
        run.num_measured += 1
        return HardwareProfile.from_mapping(MACHINE)

    def plan_batches(shape: StepShape, layout: OffloadLayout) -> PlannedStep | None:
        run.planned.append(shape)
        return plan.plan_batches(shape, layout)

    plan._measured = measured  # type: ignore[method-assign]
    begun: list[str] = []
    events = EngineEvents(
        plan=plan_batches,
        step_began=lambda steps: plan.step_began(steps.clip_rate, is_as_planned=steps.is_as_planned),
        block_began=lambda _phase, block: begun.append(block.name),
    )
    engine = OffloadEngine(model, layout, tiers, config, events)
    enable_recompute(model, engine)
    if tiers.row_memory is not None:
        layers = {layer: name for name, layer in model.named_modules() if layer in layout.model_blocks.layers}
        plan.may_cut(run_layers_in_chunks(model, engine.activations, layers, tiers.row_memory))
    try:
        optimizer = OffloadAdamW(model.parameters(), engine=engine)
        for seed, step in enumerate(steps):
            for number, length in enumerate(step):
                engine.announce_backward(is_final=number == len(step) - 1)
                begun.clear()
                try:
                    batch = tiny_batch(seed=seed + 100 * number, batch_size=batch_size, sequence_length=length)
                    loss = loss_of(model, batch, tiers.row_memory)
                except BudgetError as error:
                    run.error, run.num_begun = str(error), len(begun)
                    run.weights = {name: engine.parameters.read_parameter(name) for name, _ in model.named_parameters()}
                    return run
                loss.backward()
                run.losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            after_step(engine, seed)
            swapper = engine.activations.swapper
            run.memory.append((tiers.shared_ram.num_bytes, swapper.spilled_bytes, swapper.swapped_bytes))
            if tiers.row_memory is not None and plan.plan is not None:
                keys_bytes = tiers.row_memory.peak_bytes
                planned_bytes = plan.plan.prediction.tier_bytes["cpu"]["shared_keys"]
                run.keys.append((planned_bytes, keys_bytes, taken_bytes(engine) + keys_bytes // links.ranks.num_ranks))
        engine.wait_for_updates()
        run.weights = {name: engine.parameters.read_parameter(name) for name, _ in model.named_parameters()}
        return run
    finally:
        engine.close()


def loss_of(model: Any, batch: dict[str, torch.Tensor], memory: RowMemory | None) -> torch.Tensor:
    """Return the loss of a batch, or of this rank's part of it."""
    if memory is None:
        return model(**batch).loss  # type: ignore[no-any-return]
    ranks = memory.links.ranks
    own = cut_rows(batch, ranks.rank, ranks.num_ranks)
    rows = own.pop(ROWS)
    with sharing_rows(model, rows, own["shift_labels"]):
        num_items = batch["labels"][:, 1:].numel()
        return model(**own, num_items_in_batch=num_items).loss  # type: ignore[no-any-return]


def taken_bytes(engine: OffloadEngine) -> int:
    """Return the RAM that a rank has allocated, without that for keys."""
    layout, staging = engine.planned_memory.layout, engine.planned_memory._staging
    fixed_bytes = layout.plan.cpu_pool_bytes + layout.exchange_bytes + layout.resident_bytes
    staging_bytes = staging.num_buffers * staging.buffer_bytes if staging is not None else 0
    return fixed_bytes + staging_bytes + engine.tiers.shared_ram.num_bytes


@pytest.fixture(autouse=True)
def unmeasured_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of computing stay for longer batches, so that two plans are for the same machine. Measuring them would take
    a second of CPU in each run."""
    monkeypatch.setattr(run_plan, "measure_computing", lambda profile, *_args, **_options: profile)


@pytest.fixture
def measured_again(unmeasured_computing: None, monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The shapes with which the device was measured again."""
    found: list[list[Any]] = []

    def measure(profile: HardwareProfile, *args: Any, matrix_shapes: list[Any], **options: Any) -> HardwareProfile:
        found.append(matrix_shapes)
        return measure_computing(profile, *args, matrix_shapes=matrix_shapes, **options)

    monkeypatch.setattr(run_plan, "measure_computing", measure)
    monkeypatch.setattr(run_plan, "_MEASURING_AGAIN", TINY_EFFORT)
    return found


def test_the_device_is_measured_again_for_much_longer_batches(tmp_path: Path, measured_again: list[list[Any]]) -> None:
    """In the middle of a run, whose numbers stay."""
    lengths = [SHORT, SHORT + 8, 3 * SHORT, 4 * SHORT, LONG]
    run = run_lengths(lengths, tmp_path / "varying")
    rows = [max(shape.num_rows for shape in shapes) for shapes in measured_again]
    assert rows == [2 * 3 * SHORT, 2 * LONG]
    now, true = run.plan.now, HardwareProfile.from_mapping(MACHINE)
    assert now is not None and now.hardware.device.flops_per_s != true.device.flops_per_s
    assert replace(now.hardware, device=true.device) == true
    assert run.losses == run_lengths(lengths, tmp_path / "recomputed", activations="recompute").losses


def test_a_device_that_cannot_be_measured_again_keeps_its_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_args: Any, **_options: Any) -> HardwareProfile:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(run_plan, "measure_computing", fail)
    run = run_lengths([SHORT, LONG], tmp_path)
    assert run.plan.now is not None and run.plan.now.shape.sequence_length == LONG
    assert run.plan.now.hardware == HardwareProfile.from_mapping(MACHINE)
    assert "cannot be measured again" in caplog.text


def test_a_longer_batch_is_planned_for(tmp_path: Path) -> None:
    lengths = [SHORT, SHORT, LONG, SHORT, LONG]
    run = run_lengths(lengths, tmp_path / "varying")
    first, now = run.plan.first, run.plan.now
    assert first is not None and now is not None
    assert (first.shape.sequence_length, now.shape.sequence_length) == (SHORT, LONG)
    assert now.plan.prediction.step_s > first.plan.prediction.step_s
    assert run.num_measured == 1  # measuring the drives again would take seconds, in the middle of a run
    ram, _, swapped = zip(*run.memory, strict=True)
    assert ram[0] == ram[1] < ram[2] == ram[4]
    short_bytes, long_bytes = swapped[0], swapped[2] - swapped[1]
    assert long_bytes == pytest.approx(short_bytes * LONG / SHORT, rel=0.01)  # nothing stays on the device
    assert swapped[4] - swapped[3] == long_bytes
    assert run.losses == run_lengths(lengths, tmp_path / "recomputed", activations="recompute").losses


def test_a_run_that_goes_back_to_another_plan_plans_its_next_batch(tmp_path: Path) -> None:
    go_back = lambda engine, step: engine.plan_again() if step == 1 else None  # noqa: E731
    run = run_lengths([LONG, SHORT, SHORT], tmp_path / "again", after_step=go_back)
    assert [shape.sequence_length for shape in run.planned] == [LONG, SHORT]


class Cuts:
    """Layers that may run in chunks."""

    def cut(self, chunk_tokens: int | None) -> None:
        self.chunk_tokens = chunk_tokens


def planned_in_chunks(file: Path, chunk_tokens: int, facts: dict[str, Any] | None = None) -> RunPlan:
    """Return a run, which continues from a commit with these facts, after a batch for which its plan has this number
    of tokens in a chunk."""
    config: Any = OffloadConfig()
    plan = RunPlan(None, None, config, CpuDevice(), None)  # type: ignore[arg-type]
    plan.may_cut(Cuts(), str(file))  # type: ignore[arg-type]
    if facts is not None:
        plan.resume(facts)
    assert plan.facts[CHUNK_TOKENS] is None
    plan._try_to_plan = lambda *_args: None  # type: ignore[method-assign]
    planned: Any = SimpleNamespace(
        plan=SimpleNamespace(chunk_tokens=chunk_tokens), layout=SimpleNamespace(collectives=None)
    )
    plan._with_common_chunks(planned, StepShape(1, 1), may_run_together=False)
    return plan


def test_a_resumed_run_decides_the_chunks_that_it_had_decided_after_the_commit(tmp_path: Path) -> None:
    """The measured times of another process may lead to another number, and so to other bits."""
    file = tmp_path / "chunk_tokens.json"
    begun: Any = RunPlan(None, None, OffloadConfig(), CpuDevice(), None)  # type: ignore[arg-type]
    before_decision = begun.facts
    first = planned_in_chunks(file, 256, before_decision)
    assert first.chunk_tokens == 256
    assert first.facts == {**before_decision, CHUNK_TOKENS: 256}
    assert planned_in_chunks(file, 512, before_decision).chunk_tokens == 256
    assert first.resume(before_decision), "the plan in use has chunks, and the commit has none"
    assert first.chunk_tokens is None
    assert not first.resume(before_decision)


def test_chunks_that_another_run_decided_in_the_same_folder_say_nothing(tmp_path: Path) -> None:
    """Of a run that begins, and of one that continues from a checkpoint of elsewhere before its first commit."""
    file = tmp_path / "chunk_tokens.json"
    for facts in (None, {CHUNK_TOKENS: None, RUN_ID: "another"}, {CHUNK_TOKENS: None}):
        planned_in_chunks(file, 256)
        assert planned_in_chunks(file, 512, facts).chunk_tokens == 512
    old = {CHUNK_TOKENS: None}  # a version without names of runs made both
    file.write_text(json.dumps({CHUNK_TOKENS: 128}))
    assert planned_in_chunks(file, 512, old).chunk_tokens == 128


def test_what_a_longer_batch_puts_away_goes_on_to_the_ssd(tmp_path: Path) -> None:
    lengths = [SHORT, LONG, LONG]
    run = run_lengths(lengths, tmp_path / "small", cpu_memory="2500KB")
    _, spilled, swapped = zip(*run.memory, strict=True)
    assert 0 < spilled[1] - spilled[0] == spilled[2] - spilled[1]
    assert swapped[1] - swapped[0] == pytest.approx(swapped[0] * LONG / SHORT, rel=0.01)
    assert run.losses == run_lengths(lengths, tmp_path / "recomputed", activations="recompute").losses


def test_a_longer_micro_batch_after_a_shorter_one_leaves_the_device(tmp_path: Path) -> None:
    lengths = [[SHORT, SHORT], [SHORT, LONG], [SHORT, LONG]]
    run = run_lengths(lengths, tmp_path / "held", cpu_memory="5MiB")
    _, spilled, swapped = zip(*run.memory, strict=True)
    short_bytes = swapped[0] // 2
    assert swapped[1] - swapped[0] - short_bytes == pytest.approx(short_bytes * LONG / SHORT, rel=0.01)
    assert spilled[0] == 0 < spilled[1]
    assert run.losses == run_lengths(lengths, tmp_path / "recomputed", activations="recompute").losses


def test_only_steps_with_batches_of_the_planned_length_are_timed(tmp_path: Path) -> None:
    timed = run_lengths([SHORT, LONG, LONG, SHORT, LONG], tmp_path / "a").plan
    assert len(timed._steps) == 1  # the second of the long steps: the first made the plan, and the last has no end


def test_a_longer_batch_on_one_rank_is_planned_for_on_all(tmp_path: Path) -> None:
    lengths = [[SHORT, SHORT, SHORT, LONG], [SHORT, LONG, SHORT, SHORT]]

    def train(links: Links) -> Run:
        return run_lengths(lengths[links.ranks.rank], tmp_path, links)

    for run in run_ranks(2, train):
        assert [shape.sequence_length for shape in run.planned] == [SHORT, LONG]
        assert run.plan.now is not None and run.plan.now.shape.sequence_length == LONG
        assert run.num_measured == 1


def needed_bytes(length: int, folder: Path) -> int:
    """Return the memory of the device that a step with rows of this length needs."""
    plan = run_lengths([length], folder).plan.plan
    assert plan is not None
    return plan.least_device_bytes


def test_a_batch_that_does_not_fit_device_memory_is_refused_before_its_forward(tmp_path: Path) -> None:
    enough_bytes = needed_bytes(LONG // 2, tmp_path / "half")
    run = run_lengths([SHORT, LONG // 2, LONG], tmp_path / "refused", device_memory=enough_bytes)
    assert run.error and run.num_begun == 0
    assert f"for this batch of 2 x {LONG} tokens" in run.error
    assert f"more than device_memory of {enough_bytes} bytes" in run.error
    before = run_lengths([SHORT, LONG // 2], tmp_path / "before")
    assert run.losses == before.losses
    assert all(torch.equal(weight, before.weights[name]) for name, weight in run.weights.items())

    advised = re.search(r"set device_memory to at least (\d+)", run.error)
    assert advised is not None
    least_bytes = int(advised[1])
    assert run_lengths([SHORT, LONG], tmp_path / "least", device_memory=least_bytes).error == ""
    assert run_lengths([SHORT, LONG], tmp_path / "less", device_memory=least_bytes - 1024).error


def test_device_memory_bounds_batches_that_are_only_a_little_longer(tmp_path: Path) -> None:
    enough_bytes = needed_bytes(LONG, tmp_path / "all")
    run = run_lengths([LONG, LONG + 8], tmp_path / "longer", device_memory=enough_bytes)
    assert len(run.losses) == 1 and f"2 x {LONG + 8} tokens" in run.error


def test_a_batch_of_one_rank_that_does_not_fit_is_refused_on_all(tmp_path: Path) -> None:
    enough_bytes = needed_bytes(LONG // 2, tmp_path / "half")
    lengths = [[SHORT, SHORT], [SHORT, 2 * LONG]]

    def train(links: Links) -> Run:
        return run_lengths(lengths[links.ranks.rank], tmp_path, links, device_memory=enough_bytes)

    first, second = (run.error for run in run_ranks(2, train))
    assert first == second
    assert first.startswith("on rank 0, ") and f"2 x {2 * LONG} tokens" in first


def test_device_memory_that_is_smaller_than_the_slots_is_refused_with_the_least_that_works(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"device_memory, 65536 bytes") as refusal:
        run_lengths([SHORT], tmp_path / "tiny", device_memory="64KiB")
    advised = re.search(r"set device_memory to at least (\d+)", str(refusal.value))
    assert advised is not None
    with pytest.raises(BudgetError, match="smaller than two blocks"):
        run_lengths([SHORT], tmp_path / "less", device_memory=int(advised[1]) - 4)
    run_lengths([SHORT], tmp_path / "least", device_memory=int(advised[1]))


@pytest.mark.parametrize("device_memory", ["auto", "64MiB"])
def test_a_step_that_cannot_be_planned_is_refused_with_a_device_memory(
    device_memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: Any, **_options: Any) -> PlannedStep:
        raise ValueError("no trace")

    monkeypatch.setattr("hf_lohan.planning.run_plan.plan_step", fail)
    run = run_lengths([SHORT], tmp_path, device_memory=device_memory)
    assert ("this step cannot be planned: no trace; set it to auto" in run.error) == (device_memory != "auto")
    assert len(run.losses) == (device_memory == "auto")


# The keys of rows that ranks share.


def run_shared(lengths: Sequence[int], folder: Path, num_ranks: int = 2, **settings: Any) -> list[Run]:
    """Return the runs of ranks that share all rows."""
    asked = {"ranks.per_row": num_ranks, "cpu_memory": "8MiB", **settings}
    return run_ranks(num_ranks, lambda links: run_lengths(lengths, folder, links, **asked))


def keys_bytes(num_tokens: int, num_ranks: int) -> int:
    """Return the bytes of two layers of keys and values of the tiny Llama, and of float32 sums on each rank."""
    config = tiny_model("llama").config
    numel = num_tokens * 2 * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    return 2 * 4 * numel + num_ranks * 4 * numel


@pytest.mark.parametrize("num_ranks", slow_but([3], [2, 3]))
def test_planned_ram_has_the_keys_of_shared_rows(num_ranks: int, tmp_path: Path) -> None:
    lengths = [24, 120, 24, 126]
    for run in run_shared(lengths, tmp_path, num_ranks):
        # Whole rows of two batches, whose lengths the pieces of all ranks divide.
        assert [own_shape.sequence_length * num_ranks for own_shape in run.planned] == [24, 120, 126]
        longest = (24, 120, 120, 126)
        for (planned_bytes, peak_bytes, _), length in zip(run.keys, longest, strict=True):
            assert planned_bytes == peak_bytes == keys_bytes(2 * length, num_ranks)


def test_a_row_that_ranks_cannot_halve_is_planned_with_a_token_more(tmp_path: Path) -> None:
    ((planned_bytes, peak_bytes, _),) = run_shared([61], tmp_path)[0].keys
    assert (planned_bytes, peak_bytes) == (keys_bytes(2 * 62, 2), keys_bytes(2 * 61, 2))


@pytest.mark.slow
@pytest.mark.covering(0)
@pytest.mark.parametrize(("length", "at_once"), [(120, 120), (40, 64), pytest.param(16, 64, marks=pytest.mark.slow)])
def test_only_rows_that_chunks_see_together_have_keys_in_ram(length: int, at_once: int, tmp_path: Path) -> None:
    """Batches have 4 rows. Chunks have 32 tokens, so that 64 tokens of whole rows may be in RAM together."""
    ((planned_bytes, peak_bytes, _),) = run_shared([length], tmp_path, batch_size=4, **{"chunks.layers": 32})[0].keys
    assert planned_bytes == keys_bytes(at_once, 2)
    assert peak_bytes == keys_bytes(at_once if length != 40 else 40, 2)


@pytest.mark.slow
def test_keys_of_longer_rows_take_the_ram_of_activations(tmp_path: Path) -> None:
    """Copies of records stay, activations go on to the SSD, and no number changes."""
    lengths, settings = [SHORT, 4 * LONG, 4 * LONG, SHORT], {"cpu_memory": 3_700_000, "durability": "checkpoint"}
    runs = run_shared(lengths, tmp_path / "shared", **settings)
    roomy = run_shared(lengths, tmp_path / "roomy")
    for run, other in zip(runs, roomy, strict=True):
        assert run.losses == other.losses and len(run.losses) == 4
        assert all(torch.equal(weight, other.weights[name]) for name, weight in run.weights.items())
        now, first = run.plan.now, run.plan.first
        assert now is not None and first is not None
        assert now.layout.shared_key_bytes == keys_bytes(2 * 4 * LONG, 2) // 2
        assert now.layout.activation_bytes < first.layout.activation_bytes
        assert now.layout.resident_records == first.layout.resident_records != ()
        assert all(in_all <= settings["cpu_memory"] for _, _, in_all in run.keys)
        assert run.memory[0][1] == 0 < run.memory[1][1]


def test_copies_that_a_run_has_made_stay_although_longer_rows_need_their_ram(tmp_path: Path) -> None:
    settings = {"cpu_memory": 5_000_000, "durability": "checkpoint"}
    for run in run_shared([SHORT, 4 * LONG], tmp_path / "short_first", **settings):
        assert run.num_begun == 0 and len(run.losses) == 1
        assert re.search(r", \d+ bytes .*of records that the run has already copied and", run.error), run.error
        assert run.error.endswith("use shorter rows, or let the longest rows come first")
    for advised in ({"_resident_records": "none"}, {}):
        lengths = [SHORT, 4 * LONG] if advised else [4 * LONG, SHORT]
        for run in run_shared(lengths, tmp_path / f"advised{len(advised)}", **settings, **advised):
            assert run.error == "" and len(run.losses) == 2


def test_keys_that_do_not_fit_cpu_memory_are_refused_before_their_forward(tmp_path: Path) -> None:
    # Many rows instead of longer ones, because attention takes the square of a row's length.
    num_rows, length = 20, 5 * LONG
    for run in run_shared([SHORT, length], tmp_path / "refused", batch_size=num_rows, cpu_memory="4MiB"):
        assert run.num_begun == 0 and len(run.losses) == 1
        assert f"gradients ({num_rows} x {length} tokens that 2 ranks share by ranks.per_row)" in run.error
        assert f"it must hold {keys_bytes(num_rows * length, 2) // 2} bytes" in run.error
    advised = re.search(r"use shorter rows, or set cpu_memory to at least (\d+)", run.error)
    assert advised is not None
    for num_bytes, fits in ((int(advised[1]), True), (int(advised[1]) - 4096, False)):
        found = run_shared([length], tmp_path / f"{fits}", batch_size=num_rows, cpu_memory=num_bytes)
        assert [run.error == "" for run in found] == [fits, fits]


def test_longer_rows_do_not_take_ram_of_a_graph_that_is_kept() -> None:
    ram, expected = HostStack(CpuDevice(), 4096), list[int]()
    rows = SimpleNamespace(expect=expected.append, links=Links.alone())
    memory = PlannedMemory.__new__(PlannedMemory)
    memory._tiers, memory._staging = SimpleNamespace(row_memory=rows, shared_ram=ram), None  # type: ignore[assignment]
    memory.layout = SimpleNamespace(shared_key_bytes=0)  # type: ignore[assignment]
    longer: Any = SimpleNamespace(shared_key_bytes=1024, activation_ram_bytes=1024, activation_staging_bytes=0)
    place = ram.push(64)
    assert place is not None
    with pytest.raises(RuntimeError, match="activations of a forward without a backward"):
        memory._make_room_for_keys(longer)
    assert ram.num_bytes == 4096 and not expected
    ram.free(place[0])
    memory._make_room_for_keys(longer)
    assert ram.num_bytes == 1024 and expected == [1024]
