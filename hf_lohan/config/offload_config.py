"""`OffloadConfig`: every setting of an offloaded run, in one place."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, TypeAlias

from hf_lohan.annexes import missing_for
from hf_lohan.config.former_names import refuse_former_names, with_present_names
from hf_lohan.config.tables import (
    ChunkSettings,
    ExpertSettings,
    RankSettings,
    Switches,
    check_fields,
    check_table,
    choice,
    setting,
    table,
)
from hf_lohan.config.values import (
    AUTO,
    ConfigError,
    SsdPath,
    check_flag,
    check_interval,
    check_number,
    check_quantize,
    check_size,
    check_ssd,
    or_auto,
    read_yaml,
    refuse_unknown_keys,
)
from hf_lohan.costs.offload_plan import Activations
from hf_lohan.costs.pool_plan import SLOTS_TENTHS
from hf_lohan.costs.quantization import FORM_OF_THE_CHECKPOINT, Quantization
from hf_lohan.wording import format_bytes

OptimizerStateDtype: TypeAlias = Literal["auto", "float32", "bfloat16", "int8"]
Optimizer: TypeAlias = Literal["auto", "muon"]
SaveDtype: TypeAlias = Literal["auto", "bfloat16", "float32"]
DurabilitySetting: TypeAlias = Literal["auto", "step", "checkpoint"]
Embedding: TypeAlias = Literal["auto", "whole", "rows"]

ALL_AUTO = "lohan"
"""`offload` with this value gives every setting its default. In a file, this key has a table with all settings."""
FITS_OR_NOT = "auto"
"""With this value of `offload`, a Trainer offloads only if the training does not fit the device."""
OFFLOAD_VARIABLE = "LOHAN_OFFLOAD"
"""Environment variable that has the default value of `offload`."""
DEVICE_TENTHS = SLOTS_TENTHS
"""`gpu_memory: auto` is this many tenths of the device's free memory."""
_MAX_CPU_THREADS = 1024
_IO_PIECE_BYTES = 8 << 20
_BESIDE_BYTES = 6 << 30
"""Host memory that `cpu_memory: auto` leaves for CUDA, libraries, workers of the data loader, and the page cache."""
_SIZES = frozenset({"gpu_memory", "device_memory", "cpu_memory"})


def ram_of_auto(free_bytes: int, *, memory_is_host: bool) -> int:
    """Return the value of `cpu_memory: auto` in bytes, if ``free_bytes`` of host memory are free."""
    least_bytes = free_bytes * 6 // 10
    if memory_is_host:  # slots and working memory are in host memory too
        return least_bytes
    return max(least_bytes, min(free_bytes * 85 // 100, free_bytes - _BESIDE_BYTES))


@dataclass(kw_only=True, slots=True, frozen=True)
class FreeResources:
    """The resources of a machine that a run may use."""

    host_memory_bytes: int
    device_memory_bytes: int
    num_cpus: int
    default_ssd_path: str
    memory_is_host: bool = True
    """Whether the device computes in host memory."""

    def slots_bytes(self, config: OffloadConfig) -> int:
        """Return the value of `gpu_memory: auto` in bytes."""
        device_bytes = self.device_memory_bytes
        if config.device_memory != AUTO:
            device_bytes = min(device_bytes, config.device_memory)
        elif self.memory_is_host:  # both budgets are in the same memory
            device_bytes = max(device_bytes // 10, min(device_bytes, self.host_memory_bytes - self.ram_bytes(config)))
        return device_bytes * DEVICE_TENTHS // 10

    def ram_bytes(self, config: OffloadConfig) -> int:
        """Return `cpu_memory`, or the value of `cpu_memory: auto`, in bytes."""
        if config.cpu_memory != AUTO:
            return config.cpu_memory
        return ram_of_auto(self.host_memory_bytes, memory_is_host=self.memory_is_host)


@dataclass(kw_only=True, slots=True, frozen=True)
class OffloadConfig:
    """The settings of an offloaded run.

    Every value is checked and converted to the type shown here. Sizes are in bytes and may be written as "24GiB" or
    "24GB". Raises ConfigError with the value and what is allowed.
    """

    gpu_memory: int | Literal["auto"] = setting(AUTO, check_size, here=lambda config, free: free.slots_bytes(config))
    """Maximum memory of the compute device for slots and kept activations, without the working memory of a layer or the
    head. "auto" is 80% of the free memory. If the device computes in host memory, it is 80% of the memory that
    `cpu_memory` leaves free."""

    device_memory: int | Literal["auto"] = setting(AUTO, check_size)
    """Maximum memory of the compute device for a whole training step: slots, kept activations, the working memory of a
    layer or the head, and unused memory that the device's allocator holds. If the step of a batch needs more, the run
    ends before the forward. Set a size for a card that also drives a screen, or to try long sequences in little memory.
    If this size is less than the free memory, `gpu_memory: auto` is 80% of it. "auto" is the memory that is free when a
    step is planned. If a batch needs more, the run only logs a warning."""

    cpu_memory: int | Literal["auto"] = setting(AUTO, check_size, here=lambda config, free: free.ram_bytes(config))
    """Maximum host memory for buffers, copies of records and swapped activations. "auto" is 85% of the free memory, or
    all but 6 GiB if that is less, but at least 60%. The 6 GiB are for other uses, such as workers of the data loader.
    If the device computes in host memory, "auto" is 60%."""

    ssd: tuple[SsdPath, ...] | Literal["auto"] = setting(
        AUTO, check_ssd, here=lambda config, free: config.ssd_paths(free.default_ssd_path)
    )
    """Directory of the store: a path, or a list of paths or of {path, capacity}. With "auto" the run chooses one."""

    optimizer: Optimizer = setting(AUTO, choice(Optimizer))
    """"auto" updates all parameters with the optimizer of the training arguments. "muon" updates the matrices of the
    layers like `torch.optim.Muon`, at the learning rate of AdamW, and all other parameters like "auto"."""

    optimizer_state_dtype: OptimizerStateDtype = setting(
        AUTO,
        choice(OptimizerStateDtype),
        here=lambda config, _: "int8" if config.stochastic_rounding else config.moment_dtype,
    )
    """Type in which `exp_avg` and `exp_avg_sq` are stored. AdamW always computes in float32. "bfloat16" and "int8"
    round the moments when they are stored, so training is no longer bitwise equal to torch. "auto" is "float32", or
    "int8" for a Trainer whose `optim` names an 8-bit AdamW, such as `adamw_8bit`."""

    stochastic_rounding: bool = setting(False, check_flag)
    """Whether bfloat16 weights have no float32 masters. AdamW then computes each new weight in float32 and rounds it up
    or down at random, without bias. Moments are stored in int8. The training state takes 4.25 bytes a parameter instead
    of 12, and training is no longer bitwise equal to torch. Only AdamW with bfloat16 weights supports it."""

    quantize: Quantization = setting(FORM_OF_THE_CHECKPOINT, check_quantize)
    """Form in which frozen matrices of the layers are stored, read and sent to the device: "nf4" and "fp4" pack them in
    4 bits and "int8" in 8, bitwise equal to bitsandbytes; "none" stores the working dtype; "auto" keeps the form of the
    checkpoint. A table has the keys `method`, `double` (true: the scales are packed as well), `block` (number of
    elements that share a scale, by default 64) and `skip` (modules that are not packed). Weights are decoded before
    they are used, so adapters train exactly as over the decoded weights."""

    save_dtype: SaveDtype = setting(AUTO, choice(SaveDtype))
    """Type in which `save_model`, `save_pretrained`, `lohan export` and checkpoints save bfloat16 weights. "auto" is
    the type in which they were loaded, as in the stock Trainer: with `bf16=True` a float32 model is saved in float32.
    "float32" writes the exact masters, which take twice the bytes. "bfloat16" writes the working weights."""

    activations: Activations = setting(AUTO, choice(Activations))
    """Where the activations of a layer are until its backward. "recompute" drops them and computes them again. "inputs"
    does the same, and moves inputs of layers that do not fit the device to host memory and the SSD. "swap" moves the
    layer's input and the outputs of matrix products and attention to host memory and the SSD, and recomputes only the
    other, cheap operations. "keep" leaves all activations on the device. "auto" chooses one of these for each
    activation at the first forward, so that the step is shortest."""

    chunks: ChunkSettings = table(ChunkSettings)
    """Computes layers and the loss for some tokens at a time, so that long rows fit. Only the order of sums changes."""

    vertical_micro_batches: bool | Literal["auto"] = setting(AUTO, or_auto(check_flag))
    """Whether gradient accumulation runs all micro-batches of a step through a block before the next block, so that
    weights move once per step. The activations of all micro-batches exist at once. With "auto", Trainer does so if the
    plan predicts a shorter step and no number changes. Otherwise the log says why."""

    embedding: Embedding = setting(AUTO, choice(Embedding))
    """How the input embeddings are loaded to the device. "whole" loads the table. "rows" loads only the rows of a
    batch's tokens, and only the gradients of these rows leave the device. With several ranks, each row is sent by the
    rank that owns it. Only rows are sent between machines, and `ranks.collectives` never rounds them. "rows" changes no
    number on a CPU. On a GPU, with one rank, the norm for clipping sums the table's gradient in another order. A table
    is always loaded whole if it is tied to the head or not only used for lookups. "auto" is "whole"."""

    experts: ExpertSettings = table(ExpertSettings)
    """How the experts of a mixture are loaded, divided among ranks, updated and cached. A string sets the key `load`,
    as in `experts: streamed`."""

    ranks: RankSettings = table(RankSettings)
    """How several ranks work together."""

    durability: DurabilitySetting = setting(AUTO, choice(DurabilitySetting))
    """"step" keeps two versions of all state, so that a run can resume from every committed step. "checkpoint" keeps
    one, so that a run can resume only from its last checkpoint. "auto" is "step" if two versions fit the SSD."""

    commit_every: int | str = setting(AUTO, check_interval)
    """How often a step is committed, so that a run can resume from it: a number of steps, or a time such as "10min".
    Records with a copy in RAM are written only for commits. "auto" commits every step unless this makes steps longer or
    writes over 64 MiB more. In that case commits take at most 2% of the time and write at most 2 MB a second (a
    consumer drive endures four times this rate for five years), but one step in 10 minutes is always committed. Every
    step is still committed if rare commits would make steps 3% longer."""

    max_skipped_steps: int = setting(5, check_number)
    """A step with gradients that are not finite is skipped. The run ends after this many skipped steps in a row."""

    prefetch_blocks: int | Literal["auto"] = setting(AUTO, or_auto(check_number), here=lambda *_: 2)
    """Number of blocks that are read ahead of the computing block; "auto" is 2."""

    cpu_threads: int | Literal["auto"] = setting(
        AUTO, or_auto(partial(check_number, most=_MAX_CPU_THREADS)), here=lambda _, free: max(1, free.num_cpus)
    )
    """Number of threads for arithmetic on the CPU, such as the optimizer. "auto" is one for each CPU, whatever
    OMP_NUM_THREADS is. If the model computes on the CPU, the order of its sums depends on this number, as in torch."""

    gpu_direct: bool | Literal["auto"] = setting(AUTO, or_auto(check_flag))
    """Whether weights and swapped activations move between the SSDs and the GPU without passing through host memory
    (GPUDirect Storage). "auto" does so if a trial reads and writes faster than through host memory. With true, the run
    ends if the machine lacks support. GPUDirect Storage needs a data-center or professional GPU, not a GeForce, and
    nvidia-fs or p2pdma for the drives. Checksums are then computed on the GPU. The setting changes no number."""

    trace: bool = setting(False, check_flag)
    """Whether every task of every lane is recorded and written to `lohan/trace.json` at the end of training."""

    hub_model_card: bool = setting(True, check_flag)
    """Whether the model card that Trainer writes gets the tag `hf_lohan` and three lines about the run."""

    switches: Switches = table(Switches)
    """Not public. In a config, the names of its keys begin with "_"."""

    def __new__(cls, **settings: Any) -> OffloadConfig:
        refuse_former_names({name: settings[name] for name in settings.keys() - cls.__dataclass_fields__.keys()})
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self, OffloadConfig)
        if self.switches.clip == "speculate" and self.commit_every not in (AUTO, 1):
            raise ConfigError(
                f"_clip: 'speculate' may return to the previous step, so it needs a commit of every step, and "
                f"commit_every is {self.commit_every!r}; set commit_every to 1, or _clip to 'defer'"
            )

        if self.stochastic_rounding and self.optimizer_state_dtype not in (AUTO, "int8"):
            raise ConfigError(
                "stochastic_rounding: true stores moments in int8, and optimizer_state_dtype is "
                f"{self.optimizer_state_dtype!r}; leave optimizer_state_dtype out"
            )
        if self.switches.solver == "migration" and self.activations != AUTO:
            raise ConfigError(
                f"_solver: 'migration' chooses the activations that are swapped, and activations: "
                f"{self.activations!r} leaves it no choice; set activations to auto, or _solver to auto"
            )

        if self.ranks.per_row > 1:
            self._refuse_beside_ranks_of_a_row()
        slots, whole = self.gpu_memory, self.device_memory
        if isinstance(slots, int) and isinstance(whole, int) and slots > whole:
            raise ConfigError(
                f"gpu_memory: {slots} bytes is more than device_memory: {whole} bytes, which also counts a step's "
                "working memory; lower gpu_memory or set it to auto, or raise device_memory"
            )
        if (missing := missing_for(self)) is not None:
            raise ConfigError(missing)

    def _refuse_beside_ranks_of_a_row(self) -> None:
        """Raise ConfigError if ranks share rows and another setting needs whole rows on each rank."""
        refused = {
            "vertical_micro_batches: true, which runs micro-batches in threads; set vertical_micro_batches to false": (
                self.vertical_micro_batches is True
            ),
            "experts.load: 'streamed', which runs all tokens of a layer at once; set experts to with_layer": (
                self.experts.load == "streamed"
            ),
            f"experts.parallel: {self.experts.parallel!r}, which sends tokens to other ranks; set experts.parallel to "
            "none": self.experts.parallel in ("node", "world"),
        }
        for what, is_set in refused.items():
            if is_set:
                raise ConfigError(f"ranks.per_row: {self.ranks.per_row} cannot be combined with {what}")

    @classmethod
    def load(cls, value: OffloadSource = None, /, **overrides: Any) -> OffloadConfig:
        """Return the config that ``value`` describes. Keywords override its settings.

        ``value`` is None or "lohan" (every setting at its default), the path of a YAML file, a mapping, or an
        OffloadConfig. Raises ConfigError for unknown keys, values that are not allowed, and unreadable files.
        """
        config = cls._load(value)
        return config._with(overrides) if overrides else config

    @classmethod
    def _load(cls, value: object) -> OffloadConfig:
        match value:
            case None | "lohan":
                return cls()
            case OffloadConfig():
                return value
            case Mapping():
                return cls()._with(with_present_names(_unnest(value)))
            case str() | os.PathLike():
                if value == FITS_OR_NOT:
                    raise ConfigError(
                        f"offload={value!r} is for a Trainer, which knows its batches; give {ALL_AUTO!r} here, or the "
                        "path of a YAML file"
                    )
                path = _file_named(value)
                content = read_yaml(path, "offload config")
                settings = with_present_names(_unnest({} if content is None else content, where=f"{path}: "))
                try:
                    return cls()._with(settings)
                except ConfigError as error:
                    raise ConfigError(f"{path}: {error}") from None
        raise ConfigError(
            f"offload={value!r} is not allowed; "
            f"give {ALL_AUTO!r}, the path of a YAML file, a dict, an OffloadConfig or None"
        )

    def _with(self, settings: Mapping[Any, Any]) -> OffloadConfig:
        """Return this config with other ``settings``. `table.key` sets one key of a table, and `_key` a switch."""
        refuse_former_names(settings)
        known = [*SETTINGS, *(name for name in _KEYS if not name.startswith("_"))]
        refuse_unknown_keys((name for name in settings if name not in _KEYS), known, what="offload setting")
        for of in TABLES:  # a string sets one key of a table, and the other keys stay
            if of.WORD is not None and isinstance(settings.get(of.NAME), str):
                word = {of.key_of(of.WORD): settings[of.NAME]}
                settings = {**word, **{name: value for name, value in settings.items() if name != of.NAME}}
        changes = {name: value for name, value in settings.items() if name not in _KEYS}
        for name in settings.keys() & _KEYS.keys():
            own_table, key = _KEYS[name]
            given = changes.get(own_table)
            if isinstance(given, Mapping) and key in given:
                raise ConfigError(f"{name} is given twice, as {name!r} and in the table {own_table!r}; give it once")
            own = getattr(self, own_table)
            changes[own_table] = replace(
                own if given is None else check_table(own_table, given, of=type(own)), **{key: settings[name]}
            )
        return replace(self, **changes)

    def resolve(self, *, memory_limit_bytes: int | None = None, **free_resources: Any) -> ResolvedConfig:
        """Replace each "auto" that depends on the machine, and return the config. SSD capacities may stay "auto".
        ``memory_limit_bytes`` is the maximum host memory of a rank, or None for no limit. ``free_resources`` are the
        fields of `FreeResources`. Raises ConfigError if `cpu_memory` is larger than the limit."""
        free = FreeResources(**free_resources)
        if memory_limit_bytes is not None and self.cpu_memory != AUTO and self.cpu_memory > memory_limit_bytes:
            most = ram_of_auto(memory_limit_bytes, memory_is_host=free.memory_is_host)
            raise ConfigError(
                f"cpu_memory: {format_bytes(self.cpu_memory)} is more than the {format_bytes(memory_limit_bytes)} that "
                f"the container or job allows each rank; set cpu_memory to at most {most} ({format_bytes(most)}) or to "
                "auto, or raise the limit"
            )
        values: dict[str, Any] = {}
        for own in fields(OffloadConfig):
            value, here = getattr(self, own.name), own.metadata["here"]
            values[own.name] = here(self, free) if here is not None and value == AUTO else value
        threads, piece_bytes = self.switches.io_threads, self.switches.io_piece_bytes
        return ResolvedConfig(
            **values,
            io_threads=max(2, min(8, free.num_cpus)) if threads == AUTO else threads,
            io_piece_bytes=_IO_PIECE_BYTES if piece_bytes == AUTO else piece_bytes,
        )

    def ssd_paths(self, default: str | os.PathLike[str]) -> tuple[SsdPath, ...]:
        """Return the paths of `ssd`. "auto" is the folder ``default``. Braces in its name are not placeholders."""
        return (SsdPath(os.fspath(default)),) if self.ssd == AUTO else self.ssd

    @property
    def moment_dtype(self) -> Literal["float32", "bfloat16", "int8", "int8_stochastic"]:
        """The form in which moments are stored. "auto" is float32."""
        if self.stochastic_rounding:
            return "int8_stochastic"
        return "float32" if self.optimizer_state_dtype == AUTO else self.optimizer_state_dtype

    def to_dict(self, *, with_dots: bool = False) -> dict[str, Any]:
        """Return the settings in JSON's types, for `load`. ``with_dots``: return each key of a table as `table.key`,
        and also all switches."""
        settings = {name: getattr(self, name) for name in SETTINGS}
        if self.ssd != AUTO:
            settings["ssd"] = [{"path": ssd.path, "capacity": ssd.capacity} for ssd in self.ssd]
        for name in ("quantize", *(of.NAME for of in TABLES)):
            settings[name] = settings[name].to_setting()
        fixed = dict(self.switches.to_setting())
        if with_dots:
            for name in (of.NAME for of in TABLES):
                settings |= {f"{name}.{key}": value for key, value in settings.pop(name).items()}
        else:
            fixed = dict(sorted(fixed.items() - Switches().to_setting().items()))
        return settings | {f"_{name}": value for name, value in fixed.items()}


@dataclass(kw_only=True, slots=True, frozen=True)
class ResolvedConfig(OffloadConfig):
    """The settings of a run on a machine. The model or the plan decides values that are still "auto"."""

    gpu_memory: int
    cpu_memory: int
    ssd: tuple[SsdPath, ...]
    """Paths of the store. A capacity of "auto" is the free space."""
    optimizer_state_dtype: Literal["float32", "bfloat16", "int8"]
    prefetch_blocks: int
    cpu_threads: int
    io_threads: int
    io_piece_bytes: int

    def resolve(self, **resources: Any) -> ResolvedConfig:
        """Return this config, because it is already resolved."""
        return self

    def with_device_memory(self, num_bytes: int) -> ResolvedConfig:
        """Return this config with another `device_memory`. If `gpu_memory` is the share of `device_memory` that "auto"
        allows, it becomes this share of ``num_bytes``."""
        if self.device_memory == AUTO or self.gpu_memory != self.device_memory * DEVICE_TENTHS // 10:
            return replace(self, device_memory=num_bytes)
        return replace(self, device_memory=num_bytes, gpu_memory=num_bytes * DEVICE_TENTHS // 10)

    def with_all_activations_kept(self) -> ResolvedConfig:
        """Return this config for a model whose layers cannot be recomputed."""
        return replace(self, activations="keep", switches=replace(self.switches, solver=AUTO))


def offload_of_environment(*, may_fit: bool = True) -> str | None:
    """Return the default value of `offload` from the environment, or None. ``may_fit``: whether the caller accepts
    "auto", which may choose not to offload. Raises ConfigError for a wrong value."""
    value = os.environ.get(OFFLOAD_VARIABLE)
    if value and (value != FITS_OR_NOT or not may_fit):
        try:
            OffloadConfig.load(value)
        except ConfigError as error:
            raise ConfigError(f"{OFFLOAD_VARIABLE} in the environment: {error}") from None
    return value or None


OffloadSource: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | OffloadConfig | None"

SETTINGS = tuple(own.name for own in fields(OffloadConfig) if own.name != Switches.NAME)
"""The public settings."""
TABLES = (ExpertSettings, ChunkSettings, RankSettings)
_KEYS = {f"{of.NAME}.{own.name}": (of.NAME, own.name) for of in TABLES for own in fields(of)}
_KEYS |= {f"_{own.name}": (Switches.NAME, own.name) for own in fields(Switches)}
"""Maps names of single keys, such as `experts.load` and `_clip`, to (table, key)."""


def setting_rows(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, value) rows to print. Each SSD and each key of a table after the first has a row without a name."""
    for name, value in settings.items():
        for row, text in enumerate(_texts(name, value)):
            yield "" if row else name, text


def _texts(name: str, value: Any) -> list[str]:
    if name == "ssd" and isinstance(value, list):
        return [f"{ssd['path']} ({_capacity(ssd['capacity'])})" for ssd in value]
    if isinstance(value, dict):
        # A table within a table gets one row.
        return [f"{key}: {v if isinstance(v, dict) else _texts(key, v)[0]}" for key, v in value.items()]
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
        raise ConfigError(f"{where}{others} outside the key {ALL_AUTO!r}; put all settings under {ALL_AUTO!r}, or none")
    inner = content[ALL_AUTO]
    return _unnest({} if inner is None else inner, where=where)


def _file_named(value: str | os.PathLike[str]) -> str:
    """Return the path of the config file ``value``. Raises ConfigError if ``value`` names no file."""
    path = os.path.expanduser(os.fspath(value))
    if isinstance(value, os.PathLike) or path.endswith((".yaml", ".yml")) or os.path.isfile(path):
        return path
    raise ConfigError(f"offload={value!r} is neither {ALL_AUTO!r} (everything automatic) nor an existing YAML file")
