"""The tables of settings: what several settings of one matter have in common, and how a setting is declared."""

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
    check_count,
    check_flag_or_auto,
    check_number,
    check_piece_size,
    check_seconds,
    check_share,
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
    """Declare a setting as a field. Its docstring stands in `docs/settings.md`. ``here`` makes the value of "auto" from
    the config and the `FreeResources` of a machine; without it, the run or its plan decides later."""
    return field(default=default, metadata={"check": check, "here": here})


def choice(of: Any) -> SettingCheck:
    """Return the check of a setting that is one of the words of a Literal."""
    return partial(check_choice, allowed=get_args(of))


def check_fields(settings: Any, declared_by: type, key_of: Callable[[str], str] = str) -> None:
    """Replace the values of settings by checked ones. ``key_of`` returns what errors call a field."""
    for own in fields(declared_by):
        object.__setattr__(settings, own.name, own.metadata["check"](key_of(own.name), getattr(settings, own.name)))


@dataclass(kw_only=True, slots=True, frozen=True)
class SettingTable:
    """Settings that belong together. A config has them below one key."""

    NAME: ClassVar[str]
    WORD: ClassVar[str | None] = None
    """The key that is meant if the table is a word."""

    def __post_init__(self) -> None:
        check_fields(self, type(self), self.key_of)

    @classmethod
    def key_of(cls, name: str) -> str:
        """Return the setting that sets one field."""
        return f"{cls.NAME}.{name}"

    def to_setting(self) -> dict[str, Any]:
        """Return the table in JSON's types."""
        return asdict(self)


AnyTable = TypeVar("AnyTable", bound=SettingTable)


def check_table(name: str, value: object, *, of: type[AnyTable]) -> AnyTable:
    """Convert a table, or its word, to an ``of``. Raises ConfigError."""
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
    float64, which is closer to the true norm than stock torch's but does not equal it to the bit. "auto" streams
    experts if two layers and the gradients of all experts of a layer take more than half of `gpu_memory`. In an
    existing store, the choice is already made."""

    parallel: ExpertParallel = setting(AUTO, choice(ExpertParallel))
    """Whether ranks divide the experts among themselves. "world" gives each expert to one rank, which alone reads,
    updates and writes it; the tokens of all ranks go there. "node" does the same for the ranks of one machine. Both
    stream experts one by one, and are refused for a model without such experts. "none" loads all experts on each rank,
    with their layers. "auto" divides experts if several ranks stream them."""

    balance: int | Literal["auto"] | Literal[False] = setting(AUTO, partial(check_chunk, unit="rows"))
    """Whether ranks of a machine compute rows for each other's experts (`experts.parallel`), so that all compute about
    the same number. It has an effect in training with several ranks on a machine. A number is the least number of rows,
    of one rank for one expert, that a rank other than the expert's owner computes, because the expert's weights must go
    there as well. It changes no result. false always computes rows at their owner. "auto" is false."""

    lazy: bool | Literal["auto"] = setting(AUTO, check_flag_or_auto)
    """Whether the update of a streamed expert that received no tokens in a step is delayed until the expert is needed,
    by at most 5 steps. The result is the same, to the bit. The expert is not read or written before the delayed update,
    which reads it with its moments. "auto" delays updates while at least a fifth of the experts received no tokens in
    the last steps; with fewer, delaying saves nothing. Only for AdamW and Adam."""

    cache: ExpertCachePolicy = setting(AUTO, choice(ExpertCachePolicy))
    """Which streamed experts have a copy in host memory during generation, if `cpu_memory` has room for only some of
    them: "auto" keeps the experts that were loaded most often; "lru" keeps those that were loaded last, which is better
    only if the preferred experts change every few tokens; "off" always keeps the same experts. It changes no number."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ChunkSettings(SettingTable):
    NAME = "chunks"

    loss: bool | Literal["auto"] = setting(AUTO, check_flag_or_auto)
    """Whether the logits are computed for some tokens at a time, so that they never all exist at once. "auto" does so
    if they would take more than a sixteenth of `gpu_memory`."""

    layers: int | Literal["auto"] | Literal[False] = setting(AUTO, check_chunk)
    """Tokens that a layer computes at a time, for sequences whose layers do not fit the device. Rows are cut from each
    other first, and a longer row is cut within, where each chunk attends to the chunks before it. "auto" runs whole
    layers until a batch does not fit the device; the number that the plan then chooses stays for the run, and a resumed
    run keeps it. false always runs whole layers."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RankSettings(SettingTable):
    NAME = "ranks"

    collectives: Collectives = setting(ANY_EXACT_WAY, check_collectives)
    """How ranks exchange weights and gradients. "exact" is the fastest way that rounds nothing, according to the plan.
    "quantized" rounds to int8 and int4 between nodes and within them, as ZeRO++ does. A table sets single parts:
    `forward` sends weights "exact", rounded to "int8", or as the "delta" of a step; `backward` reads weights from all
    nodes ("world"), from a copy in each node ("node", which may be in "ram" or on the "ssd"), or from one copy that a
    number of ranks keep among them, a multiple of the ranks of a node; `gradients` are sent "exact", in "int8" or in
    "int4"; `within` is the link between a node's RAM and each of its devices, where "int8" and "int4" round gradients
    to 8 or 4 bits, and both round weights to 8. The plan chooses the parts that the table leaves out, and never chooses
    one that rounds."""

    transport: Transport = setting(AUTO, choice(Transport))
    """How the ranks of a machine get a block's weights to their GPUs, and gradients from them. "host" copies the whole
    block from RAM to each GPU, and each gradient to RAM. "nccl" copies a part of the block to each GPU, and NCCL sends
    the parts from GPU to GPU, and each gradient to one GPU, which adds them. Packed and coded weights go as they are,
    and each GPU decodes them. It needs several GPUs in a machine that reach each other's memory, and is refused where
    it cannot be used. It has not been run on GPUs yet, so "auto" is "host". No number depends on it."""

    timeout: int | float | Literal["auto"] = setting(AUTO, check_seconds)
    """Seconds to wait for a rank before it counts as lost; "auto" is ten times the slowest step so far, but at least
    120 seconds."""

    per_row: int = setting(1, partial(check_number, most=_MAX_RANKS_PER_ROW))
    """Ranks of a machine that compute one row together, for rows that are too long for one device. Each has two pieces
    of every row of a Trainer's batch, so that all have equally much attention to compute. Keys and values go through
    the memory that the ranks share, so any length and any number of heads is possible. Ranks of one row get the same
    batch. The loss is that of all tokens, and only the order of sums changes. 1 gives each rank rows of its own."""

    def to_setting(self) -> dict[str, Any]:
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return own | {"collectives": self.collectives.to_setting()}

    def timeout_s(self, slowest_step_s: float = 0.0) -> float:
        """Return how many seconds to wait for a rank if the slowest step so far took ``slowest_step_s``."""
        if self.timeout == AUTO:
            return max(LEAST_TIMEOUT_S, _SLOW_STEPS * slowest_step_s)
        return float(self.timeout)


@dataclass(kw_only=True, slots=True, frozen=True)
class Switches(SettingTable):
    """What a run decides by itself, and what tests and studies fix: keys of a config that begin with "_", such as
    `_clip`. They are no public settings."""

    NAME = "switches"

    @classmethod
    def key_of(cls, name: str) -> str:
        return f"_{name}"

    schedule: Schedule = setting("optimized", choice(Schedule))
    """"optimized" reads a chunk of optimizer states before it writes the previous one; "naive" reads it after that
    write; both run during backward. "serial" updates only after backward."""

    clip: Clip = setting(AUTO, choice(Clip))
    """How updates wait for the norm of `max_grad_norm`: "defer" updates during the next forward; "speculate" updates in
    backward, and again if the norm clips; "auto" measures both."""

    parked: float | Literal["auto"] = setting(AUTO, check_share)
    """The share of updates in backward that wait for the next forward, which applies them before it uses their blocks;
    "auto" is the plan's."""

    solver: Solver = setting(AUTO, choice(Solver))
    """How the plan for `activations: auto` is found: "algorithm_1" by the sum of lanes, "migration" by their booked
    time, as TeraIO does, with one rank. "auto" is "algorithm_1"."""

    resident_records: ResidentRecords = setting(AUTO, choice(ResidentRecords))
    """Records with a copy in host memory: as many as fit `cpu_memory`, most read first, or none."""

    io_threads: int | Literal["auto"] = setting(AUTO, partial(check_count, most=_MAX_IO_THREADS))
    """Threads that read and write the store; "auto" is one for each CPU, at least 2 and at most 8."""

    io_piece_bytes: int | Literal["auto"] = setting(AUTO, check_piece_size)
    """Bytes that one system call reads or writes; "auto" is 8 MiB."""
