"""The tables, which group settings that belong together, and the functions that declare settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, get_args

from hf_lohan.config.values import (
    AUTO,
    ConfigError,
    check_choice,
    check_chunk,
    check_collectives,
    check_flag,
    check_number,
    check_piece_size,
    check_seconds,
    check_share,
    or_auto,
    refuse_unknown_keys,
)
from hf_lohan.costs.collectives import ANY_EXACT_WAY, Collectives
from hf_lohan.costs.offload_plan import Solver

Schedule: TypeAlias = Literal["optimized", "naive", "serial"]
Clip: TypeAlias = Literal["auto", "defer", "speculate"]
ResidentRecords: TypeAlias = Literal["auto", "none"]
LoadExperts: TypeAlias = Literal["auto", "streamed", "with_layer"]
ExpertParallel: TypeAlias = Literal["auto", "none", "node", "world"]
ExpertCachePolicy: TypeAlias = Literal["auto", "lru", "off"]
Transport: TypeAlias = Literal["auto", "host", "nccl"]

LEAST_TIMEOUT_S = 120.0
"""Smallest timeout that "auto" chooses. In the first steps a rank may still compile or read its data."""
_SLOW_STEPS = 10
_MAX_IO_THREADS = 256
_MAX_RANKS_PER_ROW = 1024

SettingCheck: TypeAlias = Callable[[str, object], object]
"""Takes a setting's name and value. Returns the value to store, or raises ConfigError."""


def setting(default: Any, check: SettingCheck, *, here: Callable[[Any, Any], object] | None = None) -> Any:
    """Declare a setting as a field. `docs/settings.md` has the docstring of the field. ``here`` returns the value of
    "auto" from the config and the `FreeResources` of a machine. Without it, the run or its plan decides later."""
    return field(default=default, metadata={"check": check, "here": here})


def choice(of: Any) -> SettingCheck:
    """Return the check of a setting whose values are the strings of a Literal."""
    return partial(check_choice, allowed=get_args(of))


def check_fields(settings: Any, declared_by: type, key_of: Callable[[str], str] = str) -> None:
    """Check the values of settings, and convert them. ``key_of`` returns the name of a field in errors."""
    for own in fields(declared_by):
        object.__setattr__(settings, own.name, own.metadata["check"](key_of(own.name), getattr(settings, own.name)))


@dataclass(kw_only=True, slots=True, frozen=True)
class SettingTable:
    """Settings that belong together. In a config they are the keys of a table."""

    NAME: ClassVar[str]
    WORD: ClassVar[str | None] = None
    """The key that a string in place of the table sets."""

    def __post_init__(self) -> None:
        check_fields(self, type(self), self.key_of)

    @classmethod
    def key_of(cls, name: str) -> str:
        """Return the name of the setting for a field of the table."""
        return f"{cls.NAME}.{name}"

    def to_setting(self) -> dict[str, Any]:
        """Return the table in JSON's types."""
        return asdict(self)


AnyTable = TypeVar("AnyTable", bound=SettingTable)


def check_table(name: str, value: object, *, of: type[AnyTable]) -> AnyTable:
    """Convert a mapping, or a string in place of it, to an instance of ``of``. Raises ConfigError."""
    keys = [own.name for own in fields(of)]
    match value:
        case SettingTable() if isinstance(value, of):
            return value
        case str() if of.WORD is not None:
            return of(**{of.WORD: value})
        case Mapping():
            refuse_unknown_keys(value, keys, what=f"key of {name}")
            return of(**value)
    words = ""
    if of.WORD is not None:
        allowed = next(own for own in fields(of) if own.name == of.WORD).metadata["check"].keywords["allowed"]
        words = f"one of {', '.join(map(repr, allowed))}, or "
    raise ConfigError(f"{name}: {value!r} is not allowed; give {words}a table with one or more of {', '.join(keys)}")


def table(of: type[SettingTable]) -> Any:
    """Declare a table of settings as a field."""
    return setting(of(), partial(check_table, of=of))


@dataclass(kw_only=True, slots=True, frozen=True)
class ExpertSettings(SettingTable):
    NAME = "experts"
    WORD = "load"

    load: LoadExperts = setting(AUTO, choice(LoadExperts))
    """How experts are loaded to the device. "with_layer" loads all experts of a layer at once. "streamed" loads them
    one by one, so that only two experts must fit, not two layers. It sums the norm for clipping over experts in
    float64. This norm is closer to the true norm than stock torch's norm, but not bitwise equal. "auto" streams
    experts if two layers and the gradients of all experts of a layer take more than half of `gpu_memory`. A run with an
    existing store keeps the choice of the store."""

    parallel: ExpertParallel = setting(AUTO, choice(ExpertParallel))
    """Whether ranks divide the experts among themselves. "world" gives each expert to one rank. Only this rank reads,
    updates and writes the expert, and all ranks send their tokens for the expert to it. "node" does the same within
    each machine. Both stream experts one by one, and are refused for a model whose experts cannot be streamed. "none"
    loads all experts on each rank, with their layers. "auto" divides experts if several ranks stream them."""

    balance: int | Literal["auto"] | Literal[False] = setting(AUTO, partial(check_chunk, unit="rows"))
    """Whether ranks of a machine compute rows of tokens for each other's experts (`experts.parallel`), so that all
    ranks compute about equally many rows. Only training with several ranks on a machine uses it. A number is a
    threshold: if a rank has fewer rows for an expert, the owner computes them, because another rank would need the
    expert's weights. It changes no result. false computes all rows on the owner. "auto" is false."""

    lazy: bool | Literal["auto"] = setting(AUTO, or_auto(check_flag))
    """Whether the update of a streamed expert that received no tokens in a step is delayed until the expert is needed,
    by at most 5 steps. The result is bitwise equal. The expert and its moments are not read or written until then.
    "auto" delays updates while at least a fifth of the experts received no tokens in the last steps, because otherwise
    a delay saves nothing. Only AdamW and Adam support it."""

    cache: ExpertCachePolicy = setting(AUTO, choice(ExpertCachePolicy))
    """Which streamed experts have a copy in host memory during generation, if only some of them fit `cpu_memory`.
    "auto" keeps the experts that were loaded most often. "lru" keeps the experts that were loaded last, which is better
    only if the preferred experts change every few tokens. "off" always keeps the same experts. It changes no number."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ChunkSettings(SettingTable):
    NAME = "chunks"

    loss: bool | Literal["auto"] = setting(AUTO, or_auto(check_flag))
    """Whether the logits are computed for some tokens at a time, so that they never all exist at once. "auto" does so
    if they would take more than a sixteenth of `gpu_memory`."""

    layers: int | Literal["auto"] | Literal[False] = setting(AUTO, check_chunk)
    """Number of tokens that a layer computes at a time, for sequences whose layers do not fit the device. A batch is
    split between rows first. A row with more tokens is split into chunks, and each chunk attends to the chunks before
    it. "auto" runs whole layers until a batch does not fit the device. Then the plan chooses a number, and the run and
    resumed runs keep it. false always runs whole layers."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RankSettings(SettingTable):
    NAME = "ranks"

    collectives: Collectives = setting(ANY_EXACT_WAY, check_collectives)
    """How ranks exchange weights and gradients. With "exact", the plan chooses the fastest way that does not round.
    "quantized" rounds to int8 and int4 between nodes and within them, as ZeRO++ does. A table sets individual parts.
    `forward` sends weights "exact", rounded to "int8", or as the "delta" of a step. `backward` reads weights from all
    nodes ("world"), or from a copy in each node: in RAM ("ram"), on the SSDs ("ssd"), or where the plan chooses
    ("node"). A number is the number of ranks that share a copy, a multiple of the ranks of a node. `gradients` are sent
    "exact", in "int8" or in "int4". `within` is the link between a node's RAM and each of its devices: "int8" and
    "int4" round gradients to 8 or 4 bits there, and both round weights to 8 bits. The plan chooses the parts that the
    table leaves out, and never chooses a part that rounds."""

    transport: Transport = setting(AUTO, choice(Transport))
    """How the ranks of a machine move weights to their GPUs and gradients from their GPUs. "host" copies the whole
    block from RAM to each GPU, and each gradient to RAM. "nccl" copies a part of the block to each GPU. NCCL then sends
    the parts from GPU to GPU, and sends each gradient to one GPU, which adds them. Packed and coded weights are sent
    without decoding. "nccl" needs several GPUs in a machine that reach each other's memory, and is refused otherwise.
    It has not been run on GPUs yet, so "auto" is "host". No number depends on it."""

    timeout: int | float | Literal["auto"] = setting(AUTO, or_auto(check_seconds))
    """Seconds to wait for a rank before it counts as lost. "auto" is ten times the slowest step so far, but at least
    120 seconds."""

    per_row: int = setting(1, partial(check_number, most=_MAX_RANKS_PER_ROW))
    """Number of ranks of a machine that compute one row together, for rows that are too long for one device. Each rank
    has two pieces of every row of a Trainer's batch, so that all ranks compute equally much attention. Keys and values
    go through the RAM that the ranks share, so any length and any number of heads is possible. Ranks that share rows
    get the same batch. The loss counts all tokens, and only the order of sums changes. With 1, ranks share no rows."""

    def to_setting(self) -> dict[str, Any]:
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return own | {"collectives": self.collectives.to_setting()}

    def timeout_s(self, slowest_step_s: float = 0.0) -> float:
        """Return the seconds to wait for a rank, if the slowest step so far took ``slowest_step_s``."""
        if self.timeout == AUTO:
            return max(LEAST_TIMEOUT_S, _SLOW_STEPS * slowest_step_s)
        return float(self.timeout)


@dataclass(kw_only=True, slots=True, frozen=True)
class Switches(SettingTable):
    """Choices that a run makes by itself, and that tests and studies fix. Their keys in a config begin with "_", such
    as `_clip`. They are not public settings."""

    NAME = "switches"

    @classmethod
    def key_of(cls, name: str) -> str:
        return f"_{name}"

    schedule: Schedule = setting("optimized", choice(Schedule))
    """"optimized" reads a chunk of optimizer states before it writes the previous chunk, and "naive" reads it after
    that write. Both update during backward. "serial" updates only after backward."""

    clip: Clip = setting(AUTO, choice(Clip))
    """How updates wait for the norm with `max_grad_norm`. "defer" updates during the next forward. "speculate" updates
    in backward, and repeats the updates if the norm clips. "auto" measures both."""

    parked: float | Literal["auto"] = setting(AUTO, or_auto(check_share))
    """Fraction of the updates in backward that are postponed to the next forward, and applied before their blocks are
    used. With "auto" the plan chooses it."""

    solver: Solver = setting(AUTO, choice(Solver))
    """How the plan for `activations: auto` is found. "algorithm_1" adds up the time of each lane. "migration" reserves
    time on each lane, as TeraIO does, and supports one rank only. "auto" is "algorithm_1"."""

    resident_records: ResidentRecords = setting(AUTO, choice(ResidentRecords))
    """Records with a copy in host memory: none, or as many as fit `cpu_memory`, beginning with the most read."""

    io_threads: int | Literal["auto"] = setting(AUTO, or_auto(partial(check_number, most=_MAX_IO_THREADS)))
    """Number of threads that read and write the store. "auto" is one for each CPU, at least 2 and at most 8."""

    io_piece_bytes: int | Literal["auto"] = setting(AUTO, check_piece_size)
    """Bytes that one system call reads or writes; "auto" is 8 MiB."""
