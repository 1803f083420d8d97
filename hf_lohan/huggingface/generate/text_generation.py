"""Generates text with a checkpoint that may be larger than RAM, and compares the time with a lower bound."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList, TextStreamer

from hf_lohan.device import Lane
from hf_lohan.engine import OffloadEngine
from hf_lohan.files import IoEngine
from hf_lohan.hardware.measurement import store_paths
from hf_lohan.hardware.ssd_rates import measure_ssds
from hf_lohan.huggingface.generate.generation import load_for_generation
from hf_lohan.huggingface.models.hub import Checkpoint
from hf_lohan.huggingface.offloaded_model import engine_of
from hf_lohan.huggingface.ranks import links_to_other_ranks
from hf_lohan.planning import bytes_per_token
from hf_lohan.ranks import Links
from hf_lohan.timeline import SSD_READ

_SCRATCH_BYTES, _BUFFER_BYTES = 128 << 20, 64 << 20
_MEASURING_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationFigures:
    """Figures of a generation. Each pass generates one token of each sequence. The first pass computes the prompt."""

    num_prompt_tokens: int
    num_passes: int
    load_s: float
    first_pass_s: float
    pass_s: float
    """Average seconds of the passes after the first. 0.0 if there was one pass."""
    read_bytes: float
    """Average number of bytes that a pass after the first reads from the drives."""
    missing_bytes: int
    """Bytes of weights that a pass must read, because the weights are not in slots and have no copy in RAM."""
    drive_bytes_per_s: float
    """Measured rate of reading from all drives of the store together. 0.0 if `missing_bytes` is 0."""
    num_expert_loads: int = 0
    """Number of loads of streamed experts in all passes."""
    num_experts_from_ram: int = 0
    """Number of these loads that read a copy in RAM."""

    @property
    def bound_s(self) -> float:
        """Lower bound of the seconds of a pass. The drives read the missing bytes, or fewer if slots kept weights."""
        num_bytes = min(self.missing_bytes, self.read_bytes)
        return num_bytes / self.drive_bytes_per_s if self.missing_bytes else 0.0


class PassClock(LogitsProcessor):
    """Logits processor that records the time and the bytes read so far in each pass. It does not change the scores."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        self.passes: list[tuple[float, int]] = []
        """(seconds of `time.perf_counter`, bytes read so far) at each pass."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._engine.device.record(Lane.COMPUTE).synchronize()
        self.passes.append((time.perf_counter(), self._engine.timeline.totals()[SSD_READ].num_bytes))
        return scores

    def per_pass(self) -> tuple[float, float]:
        """Return the average seconds and the average bytes read of the passes after the first."""
        (first_s, first_bytes), (last_s, last_bytes) = self.passes[0], self.passes[-1]
        num = max(1, len(self.passes) - 1)
        return (last_s - first_s) / num, (last_bytes - first_bytes) / num


def generate_text(
    path: str | Path,
    prompt: str,
    offload: Any = "lohan",
    *,
    write: Callable[[str], None],
    default_ssd_path: str | Path,
    max_new_tokens: int = 128,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    num_beams: int = 1,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> GenerationFigures:
    """Generate text, and pass it to ``write`` piece by piece, or at the end with beams. With ``temperature``, ``top_p``
    or ``seed`` tokens are sampled. With several beams, beam search chooses them. Otherwise the likeliest token is
    chosen. Raises the errors of `load_for_generation`, and ValueError for an empty prompt, a number that is not allowed
    or a folder without a tokenizer.

    With several ranks, all ranks generate the same tokens, and rank 0 writes them. Each rank's RAM and drives serve its
    shards of layers and its experts. The bytes and rates of the figures are sums of all ranks."""
    if max_new_tokens < 1 or num_beams < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} and num_beams={num_beams} must both be at least 1")
    if temperature is not None and temperature <= 0:
        raise ValueError(f"temperature={temperature} must be above 0; leave it out for the likeliest token")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1")
    is_sampled = any(value is not None for value in (temperature, top_p, seed))
    chosen = {name: value for name, value in (("temperature", temperature), ("top_p", top_p)) if value is not None}
    began_s = time.perf_counter()
    origin: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    tokenizer = _tokenizer_of(Checkpoint.open(path, origin))
    inputs = tokenizer(prompt, return_tensors="pt")
    num_prompt_tokens = inputs["input_ids"].shape[1]
    if not num_prompt_tokens:
        raise ValueError(f"prompt={prompt!r} has no tokens; give a prompt with text")
    model = load_for_generation(
        path,
        offload,
        max_length=num_prompt_tokens + max_new_tokens,
        num_sequences=num_beams,
        default_ssd_path=default_ssd_path,
        **origin,
    )
    engine = engine_of(model)
    assert engine is not None
    try:
        loaded_s = time.perf_counter()
        clock = PassClock(engine)
        settings: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "num_beams": num_beams,
            "do_sample": is_sampled,
            **chosen,
            "logits_processor": LogitsProcessorList([clock]),
        }
        links = links_to_other_ranks()
        write = write if links.ranks.rank == 0 else lambda _text: None  # rank 0 writes the same text
        if seed is None and is_sampled:  # all ranks draw the same tokens
            seed = int(links.all_gather("the seed of rank 0", str(secrets.randbits(63)).encode())[0])
        inputs = {name: tensor.to(engine.device.torch_device) for name, tensor in inputs.items()}
        with _seeded(seed, engine.device.torch_device):
            if num_beams == 1:
                streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
                streamer.on_finalized_text = lambda text, stream_end=False: write(text)
                model.generate(**inputs, **settings, streamer=streamer)
            else:
                tokens = model.generate(**inputs, **settings)[0, num_prompt_tokens:]
                write(tokenizer.decode(tokens, skip_special_tokens=True))
        pass_s, read_bytes = clock.per_pass()
        read_bytes, missing_bytes, drive_bytes_per_s = _bytes_of_all_ranks(engine, links, read_bytes)
        experts = engine.expert_loader.figures if engine.expert_loader is not None else None
        return GenerationFigures(
            num_prompt_tokens=num_prompt_tokens,
            num_passes=len(clock.passes),
            load_s=loaded_s - began_s,
            first_pass_s=clock.passes[0][0] - loaded_s,
            pass_s=pass_s,
            read_bytes=read_bytes,
            missing_bytes=missing_bytes,
            drive_bytes_per_s=drive_bytes_per_s,
            num_expert_loads=experts.num_loads if experts is not None else 0,
            num_experts_from_ram=experts.num_from_ram if experts is not None else 0,
        )
    finally:
        engine.close()


@contextlib.contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seed torch's generators in this context, and restore their state at the end. None changes nothing."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        torch.manual_seed(seed)
        yield


def _tokenizer_of(checkpoint: Checkpoint) -> Any:
    """Return the checkpoint's tokenizer. Raises ValueError if it cannot be read."""
    folder = Path(checkpoint.folder)
    checkpoint.read_config()  # errors of the config are raised first
    try:
        return AutoTokenizer.from_pretrained(folder, **{"trust_remote_code": False, **checkpoint.code})
    except (OSError, ValueError) as error:
        has_files = any(folder.glob("tokenizer*")) or any(folder.glob("*.model"))
        reason = " ".join(str(error).split()) if has_files else "there is no tokenizer.json or other tokenizer file"
        raise ValueError(
            f"{checkpoint.name!r} has no readable tokenizer ({reason}); save the model's tokenizer to that folder: "
            "tokenizer.save_pretrained(folder)"
        ) from None


def _bytes_of_all_ranks(engine: OffloadEngine, links: Links, read_bytes: float) -> tuple[float, int, float]:
    """Return `read_bytes`, `missing_bytes` and `drive_bytes_per_s` of `GenerationFigures`, each the sum of all ranks.
    ``read_bytes``: value of this rank. All ranks call this together, including ranks without missing bytes."""
    missing_bytes = bytes_per_token(engine.layout)
    links.barrier("the drives to be measured")  # all ranks measure at the same time, because they may share drives
    drive_bytes_per_s = _drive_bytes_per_s(engine) if missing_bytes else 0.0
    own = json.dumps([read_bytes, missing_bytes, drive_bytes_per_s]).encode()
    of_ranks = [json.loads(answer) for answer in links.all_gather("the bytes that were read", own)]
    read, missing, rates = zip(*of_ranks, strict=True)
    return sum(read), sum(missing), sum(rates)


def _drive_bytes_per_s(engine: OffloadEngine) -> float:
    """Measure the rate of all drives of the store together, with the run's I/O settings."""
    config = engine.config
    _, together = measure_ssds(
        store_paths(config),
        engine.device,
        partial(IoEngine, config.io_threads, config.io_piece_bytes),
        scratch_bytes=_SCRATCH_BYTES,
        buffer_bytes=_BUFFER_BYTES,
        budget_s=_MEASURING_S,
    )
    return together.read_bytes_per_s
