"""Chooses how many tokens a layer computes at a time, if a batch does not fit the device in whole layers."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from hf_lohan.costs import ModelProfile, OffloadPlan
from hf_lohan.costs.fitting import layer_working_bytes, tied_gradient_bytes

LEAST_CHUNK_TOKENS = 256
"""Smaller chunks make matrix products slow, and hardly save memory."""
_NUM_COMPARED = 3
"""Number of chunk sizes to compare: the largest that fits, and smaller sizes, which leave more room for activations."""
_AS_GOOD = 1.01
"""Larger chunks are taken unless a step with smaller chunks is shorter by this factor."""


@dataclass(frozen=True)
class ChunkChoice:
    """Plans one batch in whole layers and in chunks."""

    setting: int | Literal["auto", False]
    """`chunks.layers`."""
    batch_size: int
    sequence_length: int
    room_bytes: int
    """Room on the device that the slots leave."""
    profile_of: Callable[[int | None], ModelProfile]
    """Returns the model's profile for a number of tokens in a chunk, or with None for whole layers."""
    plan_of: Callable[[int | None], OffloadPlan]
    """Returns the plan for this profile."""

    def choose(self, decided: int | None) -> tuple[int | None, str | None]:
        """Return the number of tokens in a chunk (None if layers run whole), and advice if the plan does not fit.
        ``decided``: this number, if it is already decided."""
        if decided is None and isinstance(self.setting, int) and self.setting is not False:
            decided = self.setting
        if self.plan_of(decided).fits or not self._exceeds_device(decided):
            return decided, None
        found = self._largest_that_fits(below=decided)
        if decided is None and self.setting == "auto":
            return (self._largest_beside_drives() if found is None else found), None
        if found is None:
            return decided, None
        return decided, "set chunks.layers to auto" if decided is None else f"set chunks.layers to at most {found}"

    def _exceeds_device(self, chunk_tokens: int | None) -> bool:
        """Return whether a layer's work leaves no room on the device, even if nothing is kept there."""
        profile = self.profile_of(chunk_tokens)
        input_bytes = max((layer.input_bytes for layer in profile.layers), default=0)
        return layer_working_bytes(profile) + input_bytes + tied_gradient_bytes(profile) > self.room_bytes

    def _candidates(self, below: int | None) -> list[int]:
        """Return numbers of tokens, largest first. Whole rows are before parts of a row."""
        numbers = [rows * self.sequence_length for rows in _halves(self.batch_size)]
        numbers += [tokens for tokens in _halves(self.sequence_length) if tokens >= LEAST_CHUNK_TOKENS]
        numbers = [number for number in numbers if below is None or number < below]
        return numbers or [LEAST_CHUNK_TOKENS]

    def _largest_beside_drives(self) -> int:
        """Return the largest chunks that fit the device if nothing is kept there, or else the smallest chunks. RAM and
        drives have too little room, but smaller chunks do not help them."""
        candidates = self._candidates(None)
        return next((number for number in candidates if not self._exceeds_device(number)), candidates[-1])

    def _largest_that_fits(self, below: int | None) -> int | None:
        """Return the largest chunks that fit, or smaller chunks if these have a shorter step."""
        candidates = self._candidates(below)
        first = bisect.bisect_left(candidates, True, key=lambda number: not self._exceeds_device(number))
        steps_s: dict[int, float] = {}
        for number in candidates[first:]:
            if (plan := self.plan_of(number)).fits:
                steps_s[number] = plan.prediction.step_s
            if len(steps_s) == _NUM_COMPARED:
                break
        least_s = min(steps_s.values(), default=0.0)
        return next((number for number, step_s in steps_s.items() if step_s <= _AS_GOOD * least_s), None)


def _halves(number: int) -> list[int]:
    """Return the powers of two below a number, largest first."""
    return [1 << power for power in reversed(range((number - 1).bit_length()))]


def made_again(profile: ModelProfile) -> ModelProfile:
    """Return the profile of a run that keeps all activations. Chunks are recomputed nevertheless."""
    return replace(
        profile,
        blocks=tuple(
            block
            if block.num_chunks == 1
            else replace(
                block,
                repeated_flops=block.repeated_flops + block.flops,
                repeated_bytes=block.repeated_bytes + block.moved_bytes,
            )
            for block in profile.blocks
        ),
    )
