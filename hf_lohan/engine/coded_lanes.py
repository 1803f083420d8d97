"""What this run's setting `collectives` makes of what goes from box to box, and what it says of it."""

from __future__ import annotations

import json
import logging
from typing import Any

from hf_lohan.config import Collectives
from hf_lohan.ranks import (
    GRADIENTS_INT4,
    GRADIENTS_INT8,
    WEIGHTS_INT8,
    CodedTraffic,
    Links,
    MeasuredCodec,
    RanksDisagreeError,
)
from hf_lohan.wording import format_bytes, percent

logger = logging.getLogger(__name__)

_GRADIENT_CODECS = {"int8": GRADIENTS_INT8, "int4": GRADIENTS_INT4}
_NUM_MEASURED_STEPS = 3
"""So many steps tell what a codec does to this model's numbers."""


class CodedLanes:
    """The codecs of one rank. A codec that rounds says so once, and how much when the first steps are over."""

    def __init__(self, collectives: Collectives, links: Links) -> None:
        """All ranks call this together. Raises RanksDisagreeError where their settings differ."""
        self._links = links
        self._num_steps = 0
        self.weights: MeasuredCodec | None = None
        self.changes: CodedTraffic | None = None
        """Of weights, where what a step changed is sent."""
        self.gradients: MeasuredCodec | None = None
        if links.ranks.num_ranks > 1:
            _refuse_other_settings(collectives, links)
        if links.ranks.num_nodes == 1:
            if collectives != Collectives():
                logger.info(
                    "collectives=%s has no effect: all ranks are on one machine, and within it nothing is rounded",
                    collectives.to_setting(),
                )
            return
        if collectives.forward == "int8":
            self.weights = MeasuredCodec("weights", WEIGHTS_INT8)
        elif collectives.forward == "delta":
            self.changes = CodedTraffic("weights")
            if collectives.backward == "world":
                logger.info(
                    "collectives: with forward 'delta' each machine keeps all weights, and backward takes them from "
                    "there, as with backward 'node'"
                )
        if collectives.gradients != "exact":
            self.gradients = MeasuredCodec("gradients", _GRADIENT_CODECS[collectives.gradients])
        for lane, word in ((self.weights, collectives.forward), (self.gradients, collectives.gradients)):
            if lane is not None and links.ranks.rank == 0:
                logger.warning(
                    "collectives: %s go from machine to machine in %s, which rounds them: this is not bit for bit the "
                    "training that it would be with 'exact'",
                    lane.name,
                    word,
                )

    @property
    def all(self) -> list[CodedTraffic]:
        return [lane for lane in (self.weights, self.changes, self.gradients) if lane is not None]

    def end_step(self) -> None:
        """Measure no longer than the first steps."""
        self._num_steps += 1
        if self._num_steps != _NUM_MEASURED_STEPS:
            return
        for lane in self.all:
            lane.stop_measuring()
            if lane.relative_rms is not None and lane.flushed_fraction is not None:
                logger.info(
                    "what rank %d sent of %s in %d steps was off by %s (root mean square), %s of it became zero, and "
                    "it took %s where it is %s exactly",
                    self._links.ranks.rank,
                    lane.name,
                    self._num_steps,
                    percent(lane.relative_rms),
                    percent(lane.flushed_fraction),
                    format_bytes(lane.sent_bytes),
                    format_bytes(lane.exact_bytes),
                )

    def figures(self) -> dict[str, Any]:
        """Bytes that this rank has sent to others, by lane; of those that a codec made fewer, what they would have been
        and what the codec costs. Empty for a single rank."""
        if self._links.ranks.num_ranks == 1:
            return {}
        coded = {
            lane.name: {
                "exact_bytes": lane.exact_bytes,
                "sent_bytes": lane.sent_bytes,
                "relative_rms_error": lane.relative_rms,
                "flushed_fraction": lane.flushed_fraction,
            }
            for lane in self.all
        }
        sent = {str(lane): num_bytes for lane, num_bytes in self._links.sent_bytes.items()}
        return {"sent_bytes": sent, "coded": coded}


def _refuse_other_settings(collectives: Collectives, links: Links) -> None:
    mine = json.dumps(collectives.to_setting())
    for rank, its in enumerate(links.all_gather("the setting collectives", mine.encode())):
        if its.decode() != mine:
            raise RanksDisagreeError(
                f"rank {links.ranks.rank} has collectives={mine}, and rank {rank} {its.decode()}; give all ranks the "
                "same settings"
            )
