"""`OffloadConfig`: every setting of an offloaded run, in one place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

from hf_lohan.config.values import (
    AUTO,
    ConfigError,
    SsdPath,
    check_choice,
    check_collectives,
    check_count,
    check_flag,
    check_flag_or_auto,
    check_interval,
    check_number,
    check_piece_size,
    check_seconds,
    check_size,
    read_yaml,
    refuse_unknown_keys,
    ssd_paths,
)
from hf_lohan.planner.collectives import ANY_EXACT_WAY, Collectives
from hf_lohan.planner.offload_plan import Activations
from hf_lohan.wording import format_bytes

Schedule: TypeAlias = Literal["optimized", "naive", "serial"]
OptimizerStateDtype: TypeAlias = Literal["float32", "bfloat16", "int8"]
Optimizer: TypeAlias = Literal["auto", "muon"]
SaveDtype: TypeAlias = Literal["auto", "bfloat16", "float32"]
DurabilitySetting: TypeAlias = Literal["auto", "step", "checkpoint"]
Clip: TypeAlias = Literal["auto", "defer", "speculate"]
ResidentRecords: TypeAlias = Literal["auto", "none"]
Experts: TypeAlias = Literal["auto", "streamed", "with_layer"]
ExpertCachePolicy: TypeAlias = Literal["auto", "lru", "off"]

ALL_AUTO = "lohan"
"""The word for offloading with every setting at its default, and the key to nest settings under."""
LEAST_NET_TIMEOUT_S = 120.0
"""Of "auto": a rank may still be compiling or reading its data when the others wait for it first."""
_SLOW_STEPS = 10
_MAX_IO_THREADS = 256
_MAX_CPU_THREADS = 1024
_SIZES = frozenset({"gpu_memory", "cpu_memory", "io_piece_bytes"})


@dataclass(kw_only=True, slots=True, frozen=True)
class OffloadConfig:
    """What an offloaded run may use and how it goes about it.

    Every value is checked and brought to the type shown here; sizes are bytes and may be given as "24GiB" or
    "24GB". Raises ConfigError, quoting the value and saying what is allowed.
    """

    gpu_memory: int | Literal["auto"] = AUTO
    """Most bytes of the compute device's memory for slots and activations that are kept; "auto" is 80% of what is
    free. What a layer or the head needs while it computes comes on top."""

    cpu_memory: int | Literal["auto"] = AUTO
    """Most bytes of host memory for the pools; "auto" is 60% of what is free."""

    ssd: tuple[SsdPath, ...] | Literal["auto"] = AUTO
    """Where the store lives: a path, a list of paths or of {path, capacity}; "auto": one the run chooses."""

    resident_records: ResidentRecords = AUTO
    """Which records have a copy in host memory and are not read from the SSD: "auto" is as many as `cpu_memory`
    has room for, those first that are read most often; "none" reads all from the SSD."""

    optimizer: Optimizer = AUTO
    """"muon" updates the matrices of the layers by `torch.optim.Muon`, at the learning rate of AdamW, and leaves the
    rest to the optimizer that the training arguments name; "auto" is that one for all."""

    optimizer_state_dtype: OptimizerStateDtype = "float32"
    """Type in which `exp_avg` and `exp_avg_sq` are stored. AdamW computes in float32 whatever it is; what is not
    float32 is rounded when it is stored, so that the training is no longer bit for bit that of torch in memory."""

    save_dtype: SaveDtype = AUTO
    """Type in which weights are saved that compute in bfloat16: by `save_model`, `save_pretrained`, `lohan export` and
    in checkpoints. "auto" is the one that they were loaded in, as with the stock Trainer: under `bf16=True` a float32
    model is saved in float32. "float32" writes the exact masters, twice the bytes; "bfloat16" what computes."""

    io_threads: int | Literal["auto"] = AUTO
    """Threads that read and write the store; "auto" is one per CPU, at least 2 and at most 8."""

    io_piece_bytes: int | Literal["auto"] = AUTO
    """Bytes of one read or write, a multiple of 4096; "auto" is 8 MiB."""

    prefetch_blocks: int | Literal["auto"] = AUTO
    """How many blocks to read ahead of the one that computes; "auto" is 2."""

    experts: Experts = AUTO
    """How the experts of a mixture come to the device: "with_layer", all of a layer at once; "streamed", one by one, so
    that two experts must find room, not two layers. The norm that clips is then summed over experts in float64, which
    is nearer to the true one than stock's and not the same bits. "auto" streams them where two layers and a gradient of
    all experts of one take more than half of `gpu_memory`, but goes on as a store that is there has them."""

    lazy_experts: bool | Literal["auto"] = AUTO
    """Whether an expert that streams, and that no token of a step went to, takes that step later: when it is needed, 5
    steps behind at the latest. These are the same steps, to the bit. Until then it is neither read nor written; when it
    is needed it is read with its moments. "auto": while the last steps left out a fifth of the experts or more, from
    where it pays; the tokens of an ordinary batch reach them all. For AdamW and Adam; what another optimizer updates
    takes each step at once."""

    expert_cache: ExpertCachePolicy = AUTO
    """Which experts have a copy in host memory while a model generates and its experts stream, where `cpu_memory` has
    room for some of them, after copies of all else: "auto" keeps those that were loaded most often; "lru" keeps those
    that were loaded last, which is better only if the preferred experts change every few tokens; "off" keeps the same
    experts all the time. With `resident_records: none` there are none. No number depends on it."""

    activations: Activations = AUTO
    """What a layer leaves for its backward: "recompute" drops it and makes it again; "swap" moves its input and the
    outputs of its matrix products and attention to host memory and the SSD, and makes only the cheap rest again; "keep"
    keeps it all on the device; "auto" takes for each what makes the step shortest, planned at the first forward."""

    chunked_loss: bool | Literal["auto"] = AUTO
    """Whether the loss takes the logits some tokens at a time, so that all of them are never there: "auto" is where
    they would take more than a sixteenth of `gpu_memory`. The loss is then the same but for the order of its sums."""

    schedule: Schedule = "optimized"
    """How the optimizer pipeline runs: "optimized" reads a chunk before it writes the last one, "naive"
    after, both during backward; "serial" updates only when backward has ended."""

    durability: DurabilitySetting = AUTO
    """"step" keeps two versions of all state, so that every step is a checkpoint; "checkpoint" keeps one, and
    a run that dies goes on from its last checkpoint; "auto" is "step" if both versions fit the SSD capacity."""

    commit_every: int | str = AUTO
    """How often a step is committed, so that a run that dies goes on from there: a number of steps, or a time such as
    "10min". Between commits, what has a copy in RAM is not written. "auto" is every step, but where the plan says that
    this makes steps longer: then so seldom that commits take 2% of the time, and at least every 10 minutes."""

    clip: Clip = AUTO
    """When `max_grad_norm` clips: "defer" updates after the norm is known, under the next forward; "speculate"
    updates in backward, and does it over if the norm clips, which writes twice; "auto" takes what is faster by its
    measurements, and guesses only while at most one of eight steps clips."""

    vertical_micro_batches: bool | Literal["auto"] = AUTO
    """With gradient accumulation: run all micro-batches of a step through a block before the next one, so that weights
    move once a step. What they leave for backward is there for all of them at once. "auto" does so under Trainer where
    the plan says that it pays and all numbers stay the same; a log line says what keeps it from it."""

    max_skipped_steps: int = 5
    """A step whose gradients are not finite is skipped; so many of them in a row end the run."""

    cpu_threads: int | Literal["auto"] = AUTO
    """Threads for arithmetic on the CPU, the optimizer's among them; "auto" is one per CPU."""

    collectives: Collectives = ANY_EXACT_WAY
    """How several ranks exchange weights and gradients: "exact" in the fastest way that rounds nothing, by the plan;
    "quantized" in int8 and int4 between nodes, as ZeRO++ does, which rounds. Or a table: `forward` sends weights
    "exact", rounded to "int8", or as the "delta" of a step; `backward` reads them from all nodes ("world") or from a
    copy in each node ("node": in "ram" or on the "ssd"); `gradients` are sent "exact", in "int8" or "int4". The plan
    chooses what the table leaves out, and rounds nothing unasked."""

    net_timeout: int | float | Literal["auto"] = AUTO
    """Seconds after which a rank that the others wait for counts as lost; "auto" is ten times the slowest step so far,
    and at least 120 seconds."""

    trace: bool = False
    """Keep what each lane did when, task by task, and write it as `lohan/trace.json` when training ends."""

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.clip == "speculate" and self.commit_every not in (AUTO, 1):
            raise ConfigError(
                f"clip: 'speculate' undoes a step by going back to the commit before it, and commit_every is "
                f"{self.commit_every!r}; set commit_every to 1, or clip to 'defer'"
            )

    @classmethod
    def load(cls, value: OffloadSource = None, /, **overrides: Any) -> OffloadConfig:
        """A config from any of its spellings; keywords override what it says.

        ``value`` is None or "lohan" (every setting at its default), the path of a YAML file, a mapping, or an
        OffloadConfig. Raises ConfigError for unknown keys, values that are not allowed, and unreadable files.
        """
        config = cls._load(value)
        if not overrides:
            return config
        refuse_unknown_keys(overrides, SETTINGS, what="offload setting")
        return replace(config, **overrides)

    @classmethod
    def _load(cls, value: object) -> OffloadConfig:
        match value:
            case None | "lohan":
                return cls()
            case OffloadConfig():
                return value
            case Mapping():
                return cls._from_settings(_unnest(value))
            case str() | os.PathLike():
                path = _file_named(value)
                content = read_yaml(path, "offload config")
                settings = _unnest({} if content is None else content, where=f"{path}: ")
                try:
                    return cls._from_settings(settings)
                except ConfigError as error:
                    raise ConfigError(f"{path}: {error}") from None
        raise ConfigError(
            f"offload={value!r} is not allowed; "
            f"give {ALL_AUTO!r}, the path of a YAML file, a dict, an OffloadConfig or None"
        )

    @classmethod
    def _from_settings(cls, settings: Mapping[Any, Any]) -> OffloadConfig:
        refuse_unknown_keys(settings, SETTINGS, what="offload setting")
        return cls(**settings)

    def resolve(
        self, *, host_memory_bytes: int, device_memory_bytes: int, num_cpus: int, default_ssd_path: str
    ) -> OffloadConfig:
        """This config with every "auto" replaced for this machine; only an SSD's capacity may stay "auto"."""
        automatic: dict[str, Any] = {
            "gpu_memory": device_memory_bytes * 8 // 10,
            "cpu_memory": host_memory_bytes * 6 // 10,
            "ssd": default_ssd_path,
            "io_threads": max(2, min(8, num_cpus)),
            "io_piece_bytes": 8 * 1024 * 1024,
            "prefetch_blocks": 2,
            "cpu_threads": max(1, num_cpus),
        }
        unsaid = {name: value for name, value in automatic.items() if getattr(self, name) == AUTO}
        return replace(self, **unsaid)

    @property
    def is_resolved(self) -> bool:
        """Whether no setting is "auto", but for those that the run itself decides: an SSD's capacity (then its free
        space), `resident_records`, `optimizer`, `save_dtype`, `experts`, `lazy_experts`, `expert_cache`,
        `activations`, `chunked_loss`, `durability`, `commit_every`, `clip`, `vertical_micro_batches` and
        `net_timeout`."""
        return all(getattr(self, name) != AUTO for name in SETTINGS if name not in _DECIDED_LATER)

    def to_dict(self) -> dict[str, Any]:
        """The settings in JSON's types; `load` makes an equal config of them."""
        settings = {name: getattr(self, name) for name in SETTINGS}
        if self.ssd != AUTO:
            settings["ssd"] = [{"path": ssd.path, "capacity": ssd.capacity} for ssd in self.ssd]
        settings["collectives"] = self.collectives.to_setting()
        return settings

    def net_timeout_s(self, slowest_step_s: float = 0.0) -> float:
        """How long to wait for a rank, after steps of which the slowest took so long."""
        if self.net_timeout == AUTO:
            return max(LEAST_NET_TIMEOUT_S, _SLOW_STEPS * slowest_step_s)
        return float(self.net_timeout)


OffloadSource: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | OffloadConfig | None"

_DECIDED_LATER = (
    *("resident_records", "optimizer", "save_dtype", "experts", "lazy_experts", "expert_cache", "activations"),
    *("chunked_loss", "durability", "commit_every", "clip", "vertical_micro_batches", "net_timeout"),
)

SETTINGS = tuple(setting.name for setting in fields(OffloadConfig))

_CHECKS: dict[str, Callable[[str, object], object]] = {
    "gpu_memory": check_size,
    "cpu_memory": check_size,
    "ssd": lambda _name, value: ssd_paths(value),
    "resident_records": partial(check_choice, allowed=get_args(ResidentRecords)),
    "optimizer": partial(check_choice, allowed=get_args(Optimizer)),
    "optimizer_state_dtype": partial(check_choice, allowed=get_args(OptimizerStateDtype)),
    "save_dtype": partial(check_choice, allowed=get_args(SaveDtype)),
    "io_threads": partial(check_count, most=_MAX_IO_THREADS),
    "io_piece_bytes": check_piece_size,
    "prefetch_blocks": check_count,
    "experts": partial(check_choice, allowed=get_args(Experts)),
    "lazy_experts": check_flag_or_auto,
    "expert_cache": partial(check_choice, allowed=get_args(ExpertCachePolicy)),
    "activations": partial(check_choice, allowed=get_args(Activations)),
    "chunked_loss": check_flag_or_auto,
    "schedule": partial(check_choice, allowed=get_args(Schedule)),
    "durability": partial(check_choice, allowed=get_args(DurabilitySetting)),
    "commit_every": check_interval,
    "clip": partial(check_choice, allowed=get_args(Clip)),
    "vertical_micro_batches": check_flag_or_auto,
    "max_skipped_steps": check_number,
    "cpu_threads": partial(check_count, most=_MAX_CPU_THREADS),
    "collectives": check_collectives,
    "net_timeout": check_seconds,
    "trace": check_flag,
}
assert tuple(_CHECKS) == SETTINGS, "every setting has its check"


def setting_rows(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, value) for reading; a second SSD has a row of its own, without a name."""
    for name, value in settings.items():
        for row, text in enumerate(_texts(name, value)):
            yield "" if row else name, text


def _texts(name: str, value: Any) -> list[str]:
    if name == "ssd" and isinstance(value, list):
        return [f"{ssd['path']} ({_capacity(ssd['capacity'])})" for ssd in value]
    return [format_bytes(value) if name in _SIZES and isinstance(value, int) else str(value)]


def _capacity(capacity: int | str) -> str:
    return f"at most {format_bytes(capacity)}" if isinstance(capacity, int) else "free space"


def _unnest(content: object, *, where: str = "") -> Mapping[object, object]:
    """The settings in ``content``: at top level or all under the one key "lohan". Raises ConfigError."""
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"{where}{content!r} is not a table of settings; write 'key: value', e.g. 'cpu_memory: 32GiB'"
        )
    if ALL_AUTO not in content:
        return content
    if len(content) > 1:
        others = ", ".join(repr(key) for key in content if key != ALL_AUTO)
        raise ConfigError(f"{where}{others} beside the key {ALL_AUTO!r}; put every setting under {ALL_AUTO!r}, or none")
    inner = content[ALL_AUTO]
    return _unnest({} if inner is None else inner, where=where)


def _file_named(value: str | os.PathLike[str]) -> str:
    """The config file that ``value`` names. Raises ConfigError for a word that names none."""
    path = os.path.expanduser(os.fspath(value))
    if isinstance(value, os.PathLike) or path.endswith((".yaml", ".yml")) or os.path.isfile(path):
        return path
    raise ConfigError(f"offload={value!r} is neither {ALL_AUTO!r} (everything automatic) nor an existing YAML file")
