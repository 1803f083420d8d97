"""The parts of an engine that depend on the number of ranks. All other parts are the same for one rank and several."""

from __future__ import annotations

import logging
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from hf_lohan.compat.torch_private import writing_in_same_version
from hf_lohan.config import Collectives, ResolvedConfig
from hf_lohan.device import Device
from hf_lohan.engine.commits import CommitInterval
from hf_lohan.model import dtype_name
from hf_lohan.planning import OffloadLayout, StepShape, lending_bytes
from hf_lohan.ranks import (
    GRADIENTS_INT4,
    GRADIENTS_INT8,
    GRADIENTS_WITHIN,
    WEIGHTS_INT8,
    CodedTraffic,
    CommitAgreement,
    DeviceLanes,
    Links,
    MeasuredCodec,
    RankFailedError,
    Ranks,
    RanksDisagreeError,
    SharedRegion,
    StepAgreement,
    bytes_of,
    check_equal,
)
from hf_lohan.store import Store
from hf_lohan.updates import ParamGroups
from hf_lohan.weights import PeerWeightCache, RamPeerWeights, SsdPeerWeights
from hf_lohan.wording import format_bytes, percent

logger = logging.getLogger(__name__)

_KEPT_NAME = "kept_weights"
"""Name of the scratch file with weights of other nodes."""
_DIGEST_BYTES = 8
_SHAPE = struct.Struct("<qq")
_YES, _NO = b"yes", b"no"
_GRADIENT_CODECS = {"int8": GRADIENTS_INT8, "int4": GRADIENTS_INT4}
_HOPS = {"between": "to other nodes", "within": "between its RAM and its device"}
_NUM_MEASURED_STEPS = 3
"""Number of steps, from the first on, in which the coding error is measured. The error is then logged once."""


class LinkCodecs:
    """Codecs for data that one rank sends to other nodes, and to and from its device. Logs a lossy codec when it is
    made, and its error later."""

    def __init__(self, collectives: Collectives, links: Links) -> None:
        """Make the codecs, the same on all ranks."""
        self._links = links
        self._num_steps = 0
        self.weights: MeasuredCodec | None = None
        self.changes: CodedTraffic | None = None
        """Codec for weights, if only the changes of a step are sent."""
        self.gradients: MeasuredCodec | None = None
        self.weights_within: MeasuredCodec | None = None
        """Codec for weights that are sent to the device."""
        self.gradients_within: MeasuredCodec | None = None
        ranks, within = links.ranks, collectives.within
        if ranks.num_ranks == 1 and collectives != Collectives():
            logger.info("ranks.collectives=%s has no effect, because there is one rank", collectives.to_setting())
            return
        if ranks.num_nodes == 1 and replace(collectives, within="exact") != Collectives():
            logger.info(
                "ranks.collectives=%s has no effect between machines, because all ranks are on one machine",
                collectives.to_setting(),
            )
        if ranks.num_nodes > 1 and collectives.forward == "int8":
            self.weights = MeasuredCodec("weights", WEIGHTS_INT8)
        if ranks.num_nodes > 1 and collectives.gradients != "exact":
            self.gradients = MeasuredCodec("gradients", _GRADIENT_CODECS[collectives.gradients])
        if within != "exact":
            self.weights_within = MeasuredCodec("weights", WEIGHTS_INT8, "within", same_as=self.weights)
            self.gradients_within = MeasuredCodec("gradients", GRADIENTS_WITHIN[within], "within")
        for lane in self.all if ranks.rank == 0 else ():
            assert isinstance(lane, MeasuredCodec)
            logger.warning(
                "collectives: %s are sent between %s in int%d, which rounds them, so this run differs from a run with "
                "'exact'",
                lane.name,
                "machines" if lane.hop == "between" else "a machine's RAM and its devices",
                lane.codec.num_bits,
            )

    def count_changes(self) -> CodedTraffic:
        """Send only a step's changes of weights to other nodes from now on. Returns the counter of their bytes."""
        self.changes = CodedTraffic("weights")
        return self.changes

    @property
    def rounds_weights(self) -> bool:
        """Whether devices compute with rounded weights."""
        return self.weights is not None or self.weights_within is not None

    @property
    def all(self) -> list[CodedTraffic]:
        lanes = (self.weights, self.changes, self.gradients, self.weights_within, self.gradients_within)
        return [lane for lane in lanes if lane is not None]

    def end_step(self) -> None:
        """Log the coding error and stop measuring it after the first steps."""
        self._num_steps += 1
        if self._num_steps != _NUM_MEASURED_STEPS:
            return
        for lane in self.all:
            lane.stop_measuring()
            if lane.relative_rms is not None and lane.flushed_fraction is not None:
                logger.info(
                    "rank %d sent %s %s in %d steps with a relative error of %s (root mean square); %s of the values "
                    "became zero; %s were sent instead of %s",
                    self._links.ranks.rank,
                    lane.name,
                    _HOPS[lane.hop],
                    self._num_steps,
                    percent(lane.relative_rms),
                    percent(lane.flushed_fraction),
                    format_bytes(lane.sent_bytes),
                    format_bytes(lane.exact_bytes),
                )

    def figures(self) -> dict[str, Any]:
        """Return the bytes that this rank has sent, by lane. Lanes with a codec also have the uncoded bytes and the
        coding error. `waited_s`: the seconds in which this rank waited for each other rank. Empty for a single
        rank."""
        if self._links.ranks.num_ranks == 1:
            return {}
        coded = {
            lane.key: {
                "exact_bytes": lane.exact_bytes,
                "sent_bytes": lane.sent_bytes,
                "relative_rms_error": lane.relative_rms,
                "flushed_fraction": lane.flushed_fraction,
            }
            for lane in self.all
        }
        sent = {str(lane): num_bytes for lane, num_bytes in self._links.sent_bytes.items()}
        waited_s = {str(rank): round(seconds, 6) for rank, seconds in self._links.waited_s.items()}
        return {"sent_bytes": sent, "coded": coded, "waited_s": waited_s}


def check_equal_layout(layout: OffloadLayout, config: ResolvedConfig, links: Links) -> None:
    """Raise RanksDisagreeError if models, layouts or settings differ between ranks. All ranks call this together."""
    advice = "give all ranks the same settings, and the same model with the same weights frozen"
    check_equal("the model and its layout", partial(_layout_values, layout, config), links, advice)


def _layout_values(layout: OffloadLayout, config: ResolvedConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "collectives": config.ranks.collectives.to_setting(),
        "transport": config.ranks.transport,
    }
    parts = [(block, part) for block in layout.blocks for part in block.slices]
    model = {
        part.name: f"{'trained' if part.trainable else 'frozen'}, {tuple(part.shape)} of {dtype_name(dtype)}"
        for dtype, part in ((block.master.working_dtype, part) for block, part in parts)
    }
    places = {
        f"the location of {part.name} from element {part.first} on": (
            f"{block.name}, element {part.start}, {part.packed or block.master.rule}"
        )
        for block, part in parts
    }
    memory: dict[str, Any] = {
        "embedding": "whole" if layout.model_blocks.table is None else "rows",
        "holds_gradients": layout.holds_gradients,
        "keeps_gradient_dtypes": layout.keeps_gradient_dtypes,
    }
    if config.ranks.transport == "nccl" and layout.packs:
        # Devices exchange packed weights in pieces of this size.
        memory["staging_buffer_bytes"] = layout.plan.staging_buffer_bytes
    return {**settings, **model, **memory, **places}


def check_equal_groups(groups: ParamGroups, links: Links) -> None:
    """Raise RanksDisagreeError if a rank has other param groups. All ranks call this together."""
    advice = "give the optimizers of all ranks the same arguments and parameters"
    check_equal("the param groups", lambda: {**groups.values(), **groups.places()}, links, advice)


def open_device_transport(config: ResolvedConfig, device: Device, links: Links) -> DeviceLanes | None:
    """Connect the devices of a node's ranks, or return None if all data go through host memory. All ranks call this
    together. Raises ValueError with the reason if the `transport` that is set cannot be used."""
    ranks = links.ranks
    if ranks.num_ranks == 1:
        check_device_transport(ranks, config)
        return None
    if config.ranks.transport != "nccl":
        return None
    identities = links.all_gather("the identities of devices", device.identity.encode())
    on_this_node = [identities[rank].decode() for rank in ranks.on_this_node if rank != ranks.rank]
    reason = why_not_served(ranks) or device.why_no_group(on_this_node)
    reasons = links.all_gather("whether GPUs reach each other", reason.encode())
    if first := next(filter(None, reasons), None):
        raise _refused_transport(first.decode())
    try:
        transport = DeviceLanes.open(links, device)
    except RankFailedError:
        raise
    except RuntimeError as error:
        raise ValueError(f"NCCL does not connect the GPUs ({error}); set transport to host or auto") from error
    if ranks.rank == 0:
        logger.warning(
            "ranks.transport: nccl sends weights and gradients from GPU to GPU of a machine, which has not been run on "
            "GPUs yet; blocks that not all ranks load, and gradients that a step sums over several backwards, go "
            "through the machine's RAM"
        )
    return transport


def check_device_transport(ranks: Ranks, config: ResolvedConfig, why_no_links: str = "") -> None:
    """Raise ValueError with the reason if the `transport` that is set cannot be used. ``why_no_links``: why the devices
    cannot send to each other; "" if they can."""
    if config.ranks.transport != "nccl":
        return
    if ranks.num_ranks == 1:
        raise ValueError(
            "ranks.transport: 'nccl' sends weights and gradients between the GPUs of several ranks, and this is one "
            "process; set transport to auto, or start a rank for each GPU (lohan launch --num_processes)"
        )
    if reason := why_not_served(ranks) or why_no_links:
        raise _refused_transport(reason)


def _refused_transport(reason: str) -> ValueError:
    return ValueError(f"ranks.transport: 'nccl' cannot be used, because {reason}; set transport to host or auto")


def why_not_served(ranks: Ranks) -> str:
    """Return why no devices of these ranks can send to each other; "" if they may."""
    return "each machine has one rank, and only GPUs of one machine are connected" if ranks.num_local == 1 else ""


def check_equal_weights(weights: Iterable[tuple[str, Tensor]], links: Links) -> None:
    """Raise RanksDisagreeError for the first weight whose bits differ between ranks. All ranks call this together."""
    if not links.ranks.others:
        return
    named = [(name, weight) for name, weight in weights if weight.device.type != "meta"]
    digests = links.all_gather("the weights to be the same", b"".join(_digest(weight) for _, weight in named))
    for rank, of_rank in enumerate(digests):
        if len(of_rank) != len(digests[0]):
            raise RanksDisagreeError(
                f"rank 0 has {len(digests[0]) // _DIGEST_BYTES} weights and rank {rank} has "
                f"{len(of_rank) // _DIGEST_BYTES}; build the same model on all ranks"
            )
        for number, (name, _) in enumerate(named):
            one = slice(number * _DIGEST_BYTES, (number + 1) * _DIGEST_BYTES)
            if of_rank[one] != digests[0][one]:
                raise RanksDisagreeError(
                    f"{name} differs between rank {rank} and rank 0; set the same seed on all ranks before the model "
                    "is built (transformers.set_seed), or load it from one checkpoint"
                )


def _digest(weight: Tensor) -> bytes:
    return xxhash.xxh3_64_digest(bytes_of(weight.cpu()).numpy().data)


def _bytes_on_host(tensors: Iterable[Tensor]) -> list[memoryview]:
    """Return the bytes of small tensors. Those of one device are joined there, because the host waits for each copy."""
    parts = [bytes_of(tensor) for tensor in tensors]
    for device in {part.device for part in parts if part.device.type != "cpu"}:
        places = [place for place, part in enumerate(parts) if part.device == device]
        joined = torch.cat([parts[place] for place in places]).cpu()
        for place, part in zip(places, joined.split([parts[place].numel() for place in places]), strict=True):
            parts[place] = part
    return [part.numpy().data for part in parts]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Host memory that several ranks of a node share, besides the pools of each rank."""

    gradients: SharedRegion
    """Buffers in which all ranks of this node receive gradients from other ranks."""
    own_gradients: Tensor
    """This rank's buffers in `gradients`."""
    weights: SharedRegion
    """Memory through which blocks are sent to all ranks of this node."""
    experts: SharedRegion | None
    """Memory through which the ranks of this node lend each other experts. None if they lend none."""

    @property
    def num_bytes(self) -> int:
        regions = (self.gradients, self.weights, self.experts)
        return sum(region.bytes.nbytes for region in regions if region is not None)


def open_rank_memory(layout: OffloadLayout, device: Device, links: Links) -> RankMemory | None:
    """Open the shared memory of a node's ranks, or return None for a single rank. All ranks call this together."""
    ranks = links.ranks
    if not ranks.others:
        return None
    weights = SharedRegion.create(links, layout.shared_weight_bytes, "weights", device)
    num_bytes = layout.plan.num_gradient_buffers * layout.plan.buffer_bytes
    gradients = SharedRegion.create(links, ranks.num_local * num_bytes, "gradients", device)
    experts = None
    if layout.lent_expert_bytes:
        lent_bytes = ranks.num_local * lending_bytes(layout.lent_expert_bytes)
        experts = SharedRegion.create(links, lent_bytes, "experts", device)
    return RankMemory(
        gradients=gradients,
        own_gradients=gradients.bytes.split(num_bytes)[ranks.local_rank],
        weights=weights,
        experts=experts,
    )


def open_peer_weights(layout: OffloadLayout, device: Device, store: Store) -> PeerWeightCache | None:
    """Open this rank's cache of weights of other nodes, in RAM or on the SSD. Returns None if the layout's collectives
    keep no copy of all weights in each node. Raises CapacityError."""
    way = layout.collectives
    if way is None or way.backward == "world":
        return None
    if way.backward == "ssd":
        return SsdPeerWeights(store.scratch(layout.copy_records, _KEPT_NAME), way)
    memory = device.host_empty(layout.copy_bytes) if layout.copy_bytes else torch.empty(0, dtype=torch.uint8)
    return RamPeerWeights(memory, layout.common_blocks, layout.ranks, way)


def agree_on_commits(store: Store, links: Links) -> None:
    """Restore the newest commit that all ranks have. From then on the stores of all ranks commit together."""
    if links.ranks.others:
        CommitAgreement(links).restore_common_commit(store)


def agreed_decision(
    agreement: StepAgreement, store: Store, interval: CommitInterval
) -> Callable[[CommitInterval, int, float, float], bool]:
    """Return a function like `decide_alone` for several ranks. It returns the decision that the ranks made at the end
    of the previous step, and proposes a decision for the next step. For the first step, ``interval`` decides."""
    first_is_due = store.num_homes > 1 and interval.num_steps == 1

    def decide(interval: CommitInterval, num_steps: int, since_s: float, step_s: float) -> bool:
        agreed = agreement.commits_next
        is_due = first_is_due if agreed is None else agreed
        num_before, before_s = (0, 0.0) if is_due else (num_steps, since_s + step_s)
        agreement.request_commit(interval.is_over(num_before + 1, before_s + step_s))
        return is_due

    return decide


class RankBatches:
    """What ranks tell each other before each training forward, which they begin together."""

    def __init__(self, model: nn.Module, links: Links) -> None:
        self._links = links
        self._model = weakref.ref(model)
        self._follows_rank_0 = True
        self._has_followed = False

    def keep_own_buffers(self) -> None:
        """Give ranks the buffers of rank 0 in the first step only, as DDP does with `broadcast_buffers=False`."""
        self._follows_rank_0 = False

    def begin_forward(self, shape: StepShape | None, begins_step: bool) -> StepShape | None:
        """Return a shape with the largest batch size and the largest sequence length of all ranks. ``shape``: the shape
        of this rank's batch; None if it has no token ids. If the forward ``begins_step``, all ranks first get the
        model's buffers of rank 0, as under DDP. All ranks call this together. Raises RanksDisagreeError if a buffer has
        another shape or dtype on another rank."""
        if not self._links.ranks.others:
            return shape
        own = _SHAPE.pack(shape.batch_size, shape.sequence_length) if shape is not None else _SHAPE.pack(0, 0)
        follows = begins_step and (self._follows_rank_0 or not self._has_followed)
        # A forward may have replaced buffers.
        model = self._model() if follows else None
        buffers = dict(model.named_buffers()) if model is not None else {}
        forms = {name: f"{dtype_name(buffer.dtype)} {list(buffer.shape)}" for name, buffer in buffers.items()}
        digests = b"".join(map(xxhash.xxh3_64_digest, _bytes_on_host(buffers.values())))
        told = own + xxhash.xxh3_64_digest(repr(forms).encode() + digests) if follows else own
        answers = self._links.all_gather("the lengths of batches of a forward", told)
        if min(map(len, answers)) > _SHAPE.size:
            self._has_followed = True
            if len({answer[_SHAPE.size :] for answer in answers}) > 1:
                advice = "register the same buffers on all ranks, or keep what differs in another attribute"
                check_equal("the forms of the model's buffers", lambda: forms, self._links, advice)
                self._follow_rank_0(list(buffers.values()), digests)
        num_rows, length = (max(sizes) for sizes in zip(*map(_SHAPE.unpack_from, answers), strict=True))
        if not num_rows * length:
            return None
        return replace(shape or StepShape(num_rows, length), batch_size=num_rows, sequence_length=length)

    def _follow_rank_0(self, buffers: Sequence[Tensor], digests: bytes) -> None:
        """Copy the buffers that differ between ranks from rank 0. ``digests``: of this rank's buffers."""
        of_ranks = self._links.all_gather("the model's buffers to be the same", digests)
        places = range(0, len(of_ranks[0]), _DIGEST_BYTES)
        differing = [
            buffer
            for buffer, place in zip(buffers, places, strict=True)
            if len({of_rank[place : place + _DIGEST_BYTES] for of_rank in of_ranks}) > 1
        ]
        of_rank_0 = torch.cat([bytes_of(buffer).cpu() for buffer in differing])
        self._links.broadcast(of_rank_0, 0, "the model's buffers of rank 0")
        if self._links.ranks.rank == 0:
            return
        # Micro-batches that run together are refused if they write to buffers, and this is no write of theirs.
        with torch.no_grad(), writing_in_same_version(differing):
            for buffer, values in zip(differing, of_rank_0.split([of.nbytes for of in differing]), strict=True):
                buffer.copy_(values.clone().view(buffer.dtype).view(buffer.shape))  # a view must be aligned


def all_agree(links: Links, tag: str, answer: bool) -> bool:
    """Return whether ``answer`` is true on all ranks. All ranks call this together."""
    return all(given == _YES for given in links.all_gather(tag, _YES if answer else _NO))
