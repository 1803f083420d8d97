"""`OffloadConfig`: every setting of an offloaded run, in one place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

from hf_lohan.annexes import missing_for
from hf_lohan.config.values import (
    AUTO,
    ConfigError,
    SsdPath,
    check_choice,
    check_chunk,
    check_collectives,
    check_count,
    check_flag,
    check_flag_or_auto,
    check_interval,
    check_number,
    check_piece_size,
    check_quantize,
    check_seconds,
    check_size,
    read_yaml,
    refuse_unknown_keys,
    ssd_paths,
)
from hf_lohan.planner.collectives import ANY_EXACT_WAY, Collectives
from hf_lohan.planner.offload_plan import Activations, Solver
from hf_lohan.planner.pool_plan import SLOTS_TENTHS
from hf_lohan.planner.quantization import FORM_OF_THE_CHECKPOINT, Quantization
from hf_lohan.wording import format_bytes

Schedule: TypeAlias = Literal["optimized", "naive", "serial"]
OptimizerStateDtype: TypeAlias = Literal["auto", "float32", "bfloat16", "int8"]
Optimizer: TypeAlias = Literal["auto", "muon"]
SaveDtype: TypeAlias = Literal["auto", "bfloat16", "float32"]
DurabilitySetting: TypeAlias = Literal["auto", "step", "checkpoint"]
Clip: TypeAlias = Literal["auto", "defer", "speculate"]
ResidentRecords: TypeAlias = Literal["auto", "none"]
Experts: TypeAlias = Literal["auto", "streamed", "with_layer"]
ExpertParallel: TypeAlias = Literal["auto", "none", "node", "world"]
ExpertCachePolicy: TypeAlias = Literal["auto", "lru", "off"]
Transport: TypeAlias = Literal["auto", "host", "nccl"]
Embedding: TypeAlias = Literal["auto", "whole", "rows"]

ALL_AUTO = "lohan"
"""As a value: offloading with every setting at its default. As a key: the table that holds all settings."""
FITS_OR_NOT = "auto"
"""Value of a Trainer's `offload` that offloads only if the training does not fit the device."""
OFFLOAD_VARIABLE = "LOHAN_OFFLOAD"
"""Environment variable with the default of `offload`."""
DEVICE_TENTHS, HOST_TENTHS = SLOTS_TENTHS, 6
"""Tenths of the free memory of the device and of the host that "auto" allows."""
LEAST_NET_TIMEOUT_S = 120.0
"""Smallest timeout that "auto" chooses. In the first steps a rank may still compile or read its data."""
_SLOW_STEPS = 10
_MAX_IO_THREADS = 256
_MAX_CPU_THREADS = 1024
_MAX_SEQUENCE_RANKS = 1024
_SIZES = frozenset({"gpu_memory", "device_memory", "cpu_memory", "io_piece_bytes"})


@dataclass(kw_only=True, slots=True, frozen=True)
class OffloadConfig:
    """The settings of an offloaded run.

    Every value is checked and converted to the type shown here. Sizes are in bytes and may be written as "24GiB" or
    "24GB". Raises ConfigError with the value and what is allowed.
    """

    gpu_memory: int | Literal["auto"] = AUTO
    """Maximum memory of the compute device for slots and kept activations; "auto" is 80% of the free memory. The
    working memory of a layer or the head is not included."""

    device_memory: int | Literal["auto"] = AUTO
    """Maximum memory of the compute device for all that a training step takes: slots, kept activations, the working
    memory of a layer or the head, and what the device's allocator holds beyond them. A batch whose step needs more ends
    the run before its forward. Use it for a card that also drives a screen, or to try long sequences in little memory.
    `gpu_memory: auto` is 80% of this size if it is less than the free memory. "auto" is the memory that is free when a
    step is planned, and a batch that needs more is only warned of."""

    cpu_memory: int | Literal["auto"] = AUTO
    """Maximum host memory for buffers, copies of records and swapped activations; "auto" is 60% of the free memory."""

    ssd: tuple[SsdPath, ...] | Literal["auto"] = AUTO
    """Directory of the store: a path, or a list of paths or of {path, capacity}. With "auto" the run chooses one."""

    resident_records: ResidentRecords = AUTO
    """Which records have a copy in host memory, so that they are not read from the SSD: "auto" copies as many as fit
    `cpu_memory`, those that are read most often first; "none" reads all records from the SSD."""

    optimizer: Optimizer = AUTO
    """"auto" updates all parameters with the optimizer of the training arguments. "muon" updates the matrices of the
    layers like `torch.optim.Muon`, at the learning rate of AdamW, and all other parameters like "auto"."""

    optimizer_state_dtype: OptimizerStateDtype = AUTO
    """Type in which `exp_avg` and `exp_avg_sq` are stored. AdamW always computes in float32. "bfloat16" and "int8"
    round the moments when they are stored, so training no longer equals torch's to the bit. "auto" is "float32", or
    "int8" for a Trainer whose `optim` names an 8-bit AdamW, such as `adamw_8bit`."""

    quantize: Quantization = FORM_OF_THE_CHECKPOINT
    """In which form frozen matrices of the layers are stored, read and sent to the device: "nf4" and "fp4" pack them in
    4 bits and "int8" in 8, with the bits of bitsandbytes; "none" stores the working dtype; "auto" keeps the form of the
    checkpoint. A table sets `method` and the rest: `double` (true: the scales are packed as well), `block` (64 elements
    share a scale) and `skip` (modules that are not packed). Weights are decoded before they compute, so adapters train
    as over the decoded weights."""

    save_dtype: SaveDtype = AUTO
    """Type in which bfloat16 weights are saved by `save_model`, `save_pretrained`, `lohan export` and in checkpoints.
    "auto" is the type in which they were loaded, as in the stock Trainer: with `bf16=True` a float32 model is saved in
    float32. "float32" writes the exact masters, which take twice the bytes; "bfloat16" writes the working weights."""

    io_threads: int | Literal["auto"] = AUTO
    """Threads that read and write the store; "auto" is one for each CPU, at least 2 and at most 8."""

    io_piece_bytes: int | Literal["auto"] = AUTO
    """Bytes that one system call reads or writes, a multiple of 4096; "auto" is 8 MiB."""

    gpu_direct: bool | Literal["auto"] = AUTO
    """Whether weights and swapped activations go between the SSDs and the GPU past host memory (GPUDirect Storage).
    "auto" does so where a trial reads and writes faster than through host memory. true ends the run if the machine
    cannot. It needs a data-center or professional GPU, and nvidia-fs or p2pdma for its drives; a GeForce has none.
    Checksums are then computed on the GPU. The setting changes no number."""

    prefetch_blocks: int | Literal["auto"] = AUTO
    """Number of blocks that are read ahead of the computing block; "auto" is 2."""

    embedding: Embedding = AUTO
    """How the input embeddings are loaded to the device. "whole" loads the table. "rows" loads only the rows of a
    batch's tokens, and only their gradients leave the device. Several ranks get rows from the ranks that own them, and
    between machines only rows are sent, which `collectives` never rounds. It changes no number on a CPU; on a GPU, the
    norm of one rank for clipping adds the table's gradient in another order. Embeddings that are tied to the head, and
    tables that are used in another way, are loaded whole. "auto" is "whole"."""

    experts: Experts = AUTO
    """How the experts of a mixture are loaded to the device. "with_layer" loads all experts of a layer at once.
    "streamed" loads them one by one, so that only two experts must fit, not two layers. It sums the norm for clipping
    over experts in float64, which is closer to the true norm than stock torch's but does not equal it to the bit.
    "auto" streams experts if two layers and the gradients of all experts of a layer take more than half of
    `gpu_memory`. In an existing store, the choice is already made."""

    expert_parallel: ExpertParallel = AUTO
    """Whether ranks divide the experts of a mixture among themselves. "world" gives each expert to one rank, which
    alone reads, updates and writes it; the tokens of all ranks go there. "node" does the same for the ranks of one
    machine. Both stream experts one by one, and are refused for a model without such experts. "none" loads all experts
    on each rank, with their layers. "auto" divides experts if several ranks stream them."""

    balance_experts: int | Literal["auto"] | Literal[False] = AUTO
    """Whether ranks of a machine compute rows for each other's experts (`expert_parallel`), so that all compute about
    the same number. It has an effect in training with several ranks on a machine. A number is the least number of rows,
    of one rank for one expert, that a rank other than the expert's owner computes, because the expert's weights must go
    there as well. The setting changes no result. false always computes rows at their owner. "auto" is false."""

    lazy_experts: bool | Literal["auto"] = AUTO
    """Whether the update of a streamed expert that received no tokens in a step is delayed until the expert is needed,
    by at most 5 steps. The result is the same, to the bit. The expert is not read or written before the delayed update,
    which reads it with its moments. "auto" delays updates while at least a fifth of the experts received no tokens in
    the last steps; with fewer, delaying saves nothing. Only for AdamW and Adam."""

    expert_cache: ExpertCachePolicy = AUTO
    """Which streamed experts have a copy in host memory during generation, if `cpu_memory` has room for only some of
    them: "auto" keeps the experts that were loaded most often; "lru" keeps those that were loaded last, which is better
    only if the preferred experts change every few tokens; "off" always keeps the same experts. With
    `resident_records: none` there are no copies. The setting changes no number."""

    activations: Activations = AUTO
    """What happens to a layer's activations until its backward: "recompute" drops them and computes them again; "swap"
    moves the layer's input and the outputs of matrix products and attention to host memory and the SSD, and recomputes
    only the cheap rest; "keep" leaves all of them on the device; "auto" chooses one of these for each activation at the
    first forward, so that the step is shortest."""

    solver: Solver = AUTO
    """How the plan for `activations: auto` is found. "algorithm_1" is LoHan's, by the sum of lanes. "migration" books
    the time of lanes, as TeraIO does, and needs one rank. "auto" is "algorithm_1", and `lohan plan` also simulates the
    plans of the others. The setting changes no number."""

    chunked_loss: bool | Literal["auto"] = AUTO
    """Whether the logits are computed for some tokens at a time, so that they never all exist at once. "auto" does so
    if they would take more than a sixteenth of `gpu_memory`. Only the order of sums in the loss changes."""

    chunked_layers: int | Literal["auto"] | Literal[False] = AUTO
    """Tokens that a layer computes at a time, for sequences whose layers do not fit the device. Rows are cut from each
    other first, and a longer row is cut within, where each chunk attends to the chunks before it. Only the order of
    sums changes. "auto" runs whole layers until a batch does not fit the device; the number that the plan then chooses
    stays for the run, and a resumed run keeps it. false always runs whole layers."""

    sequence_ranks: int = 1
    """Ranks of a machine that compute one row together, for rows that are too long for one device. Each has two pieces
    of every row of a Trainer's batch, so that all have equally much attention to compute. Keys and values go through
    the memory that the ranks share, so any length and any number of heads is possible. Ranks of one row get the same
    batch. The loss is that of all tokens, and only the order of sums changes. 1 gives each rank rows of its own."""

    schedule: Schedule = "optimized"
    """How the optimizer pipeline runs: "optimized" reads a chunk before it writes the previous one; "naive" reads it
    after that write; both run during backward. "serial" updates only after backward."""

    durability: DurabilitySetting = AUTO
    """"step" keeps two versions of all state, so that a run can resume from every committed step; "checkpoint" keeps
    one, so that a run can resume only from its last checkpoint; "auto" is "step" if the SSD has room for two."""

    commit_every: int | str = AUTO
    """How often a step is committed, so that a run can resume from it: a number of steps, or a time such as "10min".
    Records with a copy in RAM are written only for commits. "auto" commits every step unless this makes steps longer;
    in that case commits take 2% of the time, and are at most 10 minutes apart."""

    clip: Clip = AUTO
    """How updates wait for the norm of `max_grad_norm`: "defer" updates when the norm is known, during the next
    forward; "speculate" updates in backward, and repeats the update if the norm clips, which writes twice; "auto"
    chooses the way that was measured to be faster, and speculates only while at most one of eight steps clips."""

    vertical_micro_batches: bool | Literal["auto"] = AUTO
    """Whether gradient accumulation runs all micro-batches of a step through a block before the next block, so that
    weights move once per step. The activations of all micro-batches exist at once. "auto" does so in Trainer if the
    plan predicts a shorter step and no number changes; if not, the log says why."""

    max_skipped_steps: int = 5
    """A step with gradients that are not finite is skipped. The run ends after this many skipped steps in a row."""

    cpu_threads: int | Literal["auto"] = AUTO
    """Threads for arithmetic on the CPU, such as the optimizer's; "auto" is one for each CPU, also where
    OMP_NUM_THREADS says otherwise. A model that computes on the CPU adds in an order that depends on them, as in
    torch."""

    collectives: Collectives = ANY_EXACT_WAY
    """How several ranks exchange weights and gradients. "exact" is the fastest way that rounds nothing, according to
    the plan. "quantized" rounds to int8 and int4 between nodes and within them, as ZeRO++ does. A table sets single
    parts: `forward` sends weights "exact", rounded to "int8", or as the "delta" of a step; `backward` reads weights
    from all nodes ("world"), from a copy in each node ("node", which may be in "ram" or on the "ssd"), or from one copy
    that a number of ranks keep among them, a multiple of the ranks of a node; `gradients` are sent "exact", in "int8"
    or in "int4"; `within` is the link between a node's RAM and each of its devices, where "int8" and "int4" round
    gradients to 8 or 4 bits, and both round weights to 8. The plan chooses the parts that the table leaves out, and
    never chooses one that rounds."""

    transport: Transport = AUTO
    """How the ranks of a machine get a block's weights to their GPUs, and gradients from them. "host" copies the whole
    block from RAM to each GPU, and each gradient to RAM. "nccl" copies a part of the block to each GPU, and NCCL sends
    the parts from GPU to GPU, and each gradient to one GPU, which adds them. Packed and coded weights go as they are,
    and each GPU decodes them. It needs several GPUs in a machine that reach each other's memory, and is refused where
    it cannot be used. It has not been run on GPUs yet, so "auto" is "host". No number depends on it."""

    net_timeout: int | float | Literal["auto"] = AUTO
    """Seconds to wait for a rank before it counts as lost; "auto" is ten times the slowest step so far, but at least
    120 seconds."""

    trace: bool = False
    """Whether every task of every lane is recorded and written to `lohan/trace.json` at the end of training."""

    hub_model_card: bool = True
    """Whether the model card that Trainer writes gets the tag `hf_lohan` and three lines about the run."""

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.clip == "speculate" and self.commit_every not in (AUTO, 1):
            raise ConfigError(
                f"clip: 'speculate' needs a commit of every step to return to, and commit_every is "
                f"{self.commit_every!r}; set commit_every to 1, or clip to 'defer'"
            )

        if self.solver == "migration" and self.activations != AUTO:
            raise ConfigError(
                f"solver: 'migration' chooses what is swapped, and activations: {self.activations!r} leaves it no "
                "choice; set activations to auto, or solver to auto"
            )

        if self.sequence_ranks > 1:
            self._refuse_beside_sequence_ranks()
        slots, whole = self.gpu_memory, self.device_memory
        if isinstance(slots, int) and isinstance(whole, int) and slots > whole:
            raise ConfigError(
                f"gpu_memory: {slots} bytes is more than device_memory: {whole} bytes, which also counts a step's "
                "working memory; lower gpu_memory or set it to auto, or raise device_memory"
            )
        if (missing := missing_for(self)) is not None:
            raise ConfigError(missing)

    def _refuse_beside_sequence_ranks(self) -> None:
        """Raise ConfigError for settings that need the whole rows of a batch on each rank."""
        refused = {
            "vertical_micro_batches: true, which runs micro-batches in threads; set vertical_micro_batches to false": (
                self.vertical_micro_batches is True
            ),
            "experts: 'streamed', which runs all tokens of a layer at once; set experts to with_layer": (
                self.experts == "streamed"
            ),
            f"expert_parallel: {self.expert_parallel!r}, which sends tokens to other ranks; set expert_parallel to "
            "none": self.expert_parallel in ("node", "world"),
        }
        for what, is_set in refused.items():
            if is_set:
                raise ConfigError(f"sequence_ranks: {self.sequence_ranks} cannot be combined with {what}")

    @classmethod
    def load(cls, value: OffloadSource = None, /, **overrides: Any) -> OffloadConfig:
        """Return the config that ``value`` describes. Keywords override its settings.

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
                if value == FITS_OR_NOT:
                    raise ConfigError(
                        f"offload={value!r} is for a Trainer, which knows its batches; give {ALL_AUTO!r} here, or the "
                        "path of a YAML file"
                    )
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
        """Return this config with each "auto" that depends on the machine replaced. SSD capacities may stay "auto"."""
        allowed_bytes = device_memory_bytes
        if isinstance(self.device_memory, int):
            allowed_bytes = min(allowed_bytes, self.device_memory)
        automatic: dict[str, Any] = {
            "gpu_memory": allowed_bytes * DEVICE_TENTHS // 10,
            "cpu_memory": host_memory_bytes * HOST_TENTHS // 10,
            "ssd": self.ssd_paths(default_ssd_path),
            "optimizer_state_dtype": self.moment_dtype,
            "io_threads": max(2, min(8, num_cpus)),
            "io_piece_bytes": 8 * 1024 * 1024,
            "prefetch_blocks": 2,
            "cpu_threads": max(1, num_cpus),
        }
        unsaid = {name: value for name, value in automatic.items() if getattr(self, name) == AUTO}
        return replace(self, **unsaid)

    def ssd_paths(self, default: str | os.PathLike[str]) -> tuple[SsdPath, ...]:
        """Return the paths of `ssd`. With "auto" it is the folder ``default``, whose name is no pattern."""
        return (SsdPath(os.fspath(default)),) if self.ssd == AUTO else self.ssd

    def with_device_memory(self, num_bytes: int) -> OffloadConfig:
        """Return this resolved config with another `device_memory`, and with the part of it that "auto" allows for
        `gpu_memory`, unless `gpu_memory` is another size."""
        if self.device_memory == AUTO or self.gpu_memory != self.device_memory * DEVICE_TENTHS // 10:
            return replace(self, device_memory=num_bytes)
        return replace(self, device_memory=num_bytes, gpu_memory=num_bytes * DEVICE_TENTHS // 10)

    def with_all_activations_kept(self) -> OffloadConfig:
        """Return this config for a model whose layers cannot be recomputed."""
        return replace(self, activations="keep", solver=AUTO)

    @property
    def is_resolved(self) -> bool:
        """Whether no setting is "auto", except an SSD's capacity (its free space) and the settings in `_DECIDED_LATER`,
        which the run itself decides."""
        return all(getattr(self, name) != AUTO for name in SETTINGS if name not in _DECIDED_LATER)

    @property
    def moment_dtype(self) -> Literal["float32", "bfloat16", "int8"]:
        """Type in which moments are stored. With "auto" it is float32."""
        return "float32" if self.optimizer_state_dtype == AUTO else self.optimizer_state_dtype

    def to_dict(self) -> dict[str, Any]:
        """Return the settings in JSON's types. `load` turns them into an equal config."""
        settings = {name: getattr(self, name) for name in SETTINGS}
        if self.ssd != AUTO:
            settings["ssd"] = [{"path": ssd.path, "capacity": ssd.capacity} for ssd in self.ssd]
        settings["collectives"] = self.collectives.to_setting()
        settings["quantize"] = self.quantize.to_setting()
        return settings

    def net_timeout_s(self, slowest_step_s: float = 0.0) -> float:
        """Return how many seconds to wait for a rank if the slowest step so far took ``slowest_step_s``."""
        if self.net_timeout == AUTO:
            return max(LEAST_NET_TIMEOUT_S, _SLOW_STEPS * slowest_step_s)
        return float(self.net_timeout)


def offload_of_environment(*, may_fit: bool = True) -> str | None:
    """Return the default of `offload` from the environment, or None. ``may_fit``: whether the caller can choose not to
    offload. Raises ConfigError for a wrong value."""
    value = os.environ.get(OFFLOAD_VARIABLE)
    if value and (value != FITS_OR_NOT or not may_fit):
        try:
            OffloadConfig.load(value)
        except ConfigError as error:
            raise ConfigError(f"{OFFLOAD_VARIABLE} in the environment: {error}") from None
    return value or None


OffloadSource: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | OffloadConfig | None"

_DECIDED_LATER = (
    *("device_memory", "gpu_direct"),
    *("resident_records", "optimizer", "save_dtype", "embedding", "experts", "expert_parallel", "balance_experts"),
    *("lazy_experts", "expert_cache", "activations", "solver"),
    *("chunked_loss", "chunked_layers", "durability", "commit_every", "clip", "vertical_micro_batches", "transport"),
    "net_timeout",
)

SETTINGS = tuple(setting.name for setting in fields(OffloadConfig))

_CHECKS: dict[str, Callable[[str, object], object]] = {
    "gpu_memory": check_size,
    "device_memory": check_size,
    "cpu_memory": check_size,
    "ssd": lambda _name, value: ssd_paths(value),
    "resident_records": partial(check_choice, allowed=get_args(ResidentRecords)),
    "optimizer": partial(check_choice, allowed=get_args(Optimizer)),
    "optimizer_state_dtype": partial(check_choice, allowed=get_args(OptimizerStateDtype)),
    "quantize": check_quantize,
    "save_dtype": partial(check_choice, allowed=get_args(SaveDtype)),
    "io_threads": partial(check_count, most=_MAX_IO_THREADS),
    "io_piece_bytes": check_piece_size,
    "gpu_direct": check_flag_or_auto,
    "prefetch_blocks": check_count,
    "embedding": partial(check_choice, allowed=get_args(Embedding)),
    "experts": partial(check_choice, allowed=get_args(Experts)),
    "expert_parallel": partial(check_choice, allowed=get_args(ExpertParallel)),
    "balance_experts": partial(check_chunk, unit="rows"),
    "lazy_experts": check_flag_or_auto,
    "expert_cache": partial(check_choice, allowed=get_args(ExpertCachePolicy)),
    "activations": partial(check_choice, allowed=get_args(Activations)),
    "solver": partial(check_choice, allowed=get_args(Solver)),
    "chunked_loss": check_flag_or_auto,
    "chunked_layers": check_chunk,
    "sequence_ranks": partial(check_number, most=_MAX_SEQUENCE_RANKS),
    "schedule": partial(check_choice, allowed=get_args(Schedule)),
    "durability": partial(check_choice, allowed=get_args(DurabilitySetting)),
    "commit_every": check_interval,
    "clip": partial(check_choice, allowed=get_args(Clip)),
    "vertical_micro_batches": check_flag_or_auto,
    "max_skipped_steps": check_number,
    "cpu_threads": partial(check_count, most=_MAX_CPU_THREADS),
    "collectives": check_collectives,
    "transport": partial(check_choice, allowed=get_args(Transport)),
    "net_timeout": check_seconds,
    "trace": check_flag,
    "hub_model_card": check_flag,
}
assert tuple(_CHECKS) == SETTINGS, "every setting has its check"


def setting_rows(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, value) rows to print. Each SSD after the first has a row without a name."""
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
    """Return the settings in ``content``, at its top level or in its table "lohan". Raises ConfigError."""
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"{where}{content!r} is not a table of settings; write 'key: value', e.g. 'cpu_memory: 32GiB'"
        )
    if ALL_AUTO not in content:
        return content
    if len(content) > 1:
        others = ", ".join(repr(key) for key in content if key != ALL_AUTO)
        raise ConfigError(f"{where}{others} beside the key {ALL_AUTO!r}; put all settings under {ALL_AUTO!r}, or none")
    inner = content[ALL_AUTO]
    return _unnest({} if inner is None else inner, where=where)


def _file_named(value: str | os.PathLike[str]) -> str:
    """Return the path of the config file ``value``. Raises ConfigError if ``value`` names no file."""
    path = os.path.expanduser(os.fspath(value))
    if isinstance(value, os.PathLike) or path.endswith((".yaml", ".yml")) or os.path.isfile(path):
        return path
    raise ConfigError(f"offload={value!r} is neither {ALL_AUTO!r} (everything automatic) nor an existing YAML file")
