"""Plans for rows of many lengths: the longest row that fits, and an epoch of rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_lohan.costs import BudgetError
from hf_lohan.planning.step_plan import PlannedStep

MOST_TOKENS = 1 << 20
"""The longest row that is tried, unless the model has more positions."""
_GROWTH = 8
_CLOSE_ENOUGH = 1.01
"""The search ends if a row that does not fit is longer than a row that fits by at most this factor."""
_MOST_PLANS = 16
_SLOW_S = 5.0
"""The search ends after a plan that takes longer than this, because the model may loop over tokens."""


@dataclass(frozen=True, slots=True)
class LongestRow:
    """The longest row, alone in its batch, whose step fits a machine."""

    num_tokens: int
    """0 if no row fits."""
    is_longest_tried: bool
    """Whether longer rows may fit, but were not tried."""


def longest_row(
    plan: Callable[[int], PlannedStep], *, begin: int, num_positions: int | None, room_bytes: int
) -> LongestRow:
    """Return the longest row that fits. ``plan(num_tokens)`` plans a batch of one row, and may raise ValueError for
    more tokens than the model has positions. ``begin``: the first length to try. ``num_positions``: the model's
    positions, if known. ``room_bytes``: the memory of the device.

    The memory of a step grows about linearly with its tokens, so the search extrapolates from the last two plans.
    """
    most = max(MOST_TOKENS, num_positions or 0)
    fits, does_not_fit = 0, most + 1
    needs: list[tuple[int, int]] = []
    length = min(begin, most)
    for _ in range(_MOST_PLANS):
        began_s = time.process_time()  # other processes on this machine do not change the answer
        try:
            planned = plan(length).plan
        except BudgetError:  # the buffers do not fit, so no row does
            return LongestRow(0, is_longest_tried=False)
        except ValueError:
            does_not_fit = length
            if (fits and fits == num_positions) or length <= fits + 1:
                break
            length = num_positions if num_positions and fits < num_positions < length else _middle(fits, length)
            continue
        needs.append((length, planned.least_device_bytes))
        if planned.fits:
            fits = length
            expected = _expected_length(needs, room_bytes)
            if expected is not None and fits <= expected <= fits * _CLOSE_ENOUGH:
                break
        else:
            does_not_fit = length
        if does_not_fit <= max(fits + 1, int(fits * _CLOSE_ENOUGH)):
            break
        if planned.fits and time.process_time() - began_s > _SLOW_S:
            return LongestRow(fits, is_longest_tried=True)
        length = _next_length(fits, does_not_fit, needs, room_bytes)
    return LongestRow(fits, is_longest_tried=fits == most)


def _middle(fits: int, does_not_fit: int) -> int:
    return max(1, (fits + does_not_fit) // 2)


def _next_length(fits: int, does_not_fit: int, needs: Sequence[tuple[int, int]], room_bytes: int) -> int:
    """Return a length between ``fits`` and ``does_not_fit``, at which the step takes about ``room_bytes``."""
    guess = _expected_length(needs, room_bytes)
    if guess is None:
        guess = _GROWTH * needs[-1][0] if fits else needs[-1][0] // _GROWTH
    lowest, highest = fits + 1, does_not_fit - 1
    if not lowest <= guess <= highest:
        guess = _middle(fits, does_not_fit) if does_not_fit <= _GROWTH * max(1, fits) else _GROWTH * fits
    return min(max(guess, lowest), highest)


def _expected_length(needs: Sequence[tuple[int, int]], room_bytes: int) -> int | None:
    """Return the length at which the step takes ``room_bytes``, on the line through the last two plans."""
    if len(needs) < 2:
        return None
    (length_0, bytes_0), (length_1, bytes_1) = needs[-2:]
    slope = (bytes_1 - bytes_0) / (length_1 - length_0)
    return int(length_1 + (room_bytes - bytes_1) / slope) if slope > 0 else None


# An epoch of rows.


def read_lengths(path: str | Path) -> list[int]:
    """Return the lengths in a file, one a line. Raises ValueError with the number of a line that has no length."""
    lengths = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        text = line.strip()
        if not text.isascii() or not text.isdigit() or int(text) < 1:
            raise ValueError(f"line {number} of {path} is {line!r}; write a row's number of tokens, such as 2048")
        lengths.append(int(text))
    if not lengths:
        raise ValueError(f"{path} has no lines; write a row's number of tokens in each line")
    return lengths


_CLASS_FACTOR = 1.25
"""Batches whose lengths differ by at most this factor have one class. A run plans again for longer batches, too."""
_MOST_CLASSES = 24
"""Largest number of classes. The last one also has all shorter batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthClass:
    """Batches of about one length."""

    num_tokens: int
    """Tokens of the longest row in these batches."""
    num_batches: int
    step_s: float
    """Seconds of a step with batches of this many tokens in each row."""
    bottleneck: str
    epoch_s: float
    """Seconds of all these batches in an epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedEpoch:
    """An epoch of rows, in batches that are padded to their longest row, and packed into rows of one length."""

    num_rows: int
    num_tokens: int
    num_padded_tokens: int
    """Tokens with padding."""
    num_steps: int
    epoch_s: float
    classes: tuple[LengthClass, ...]
    """Longest first."""
    packed_row_tokens: int
    num_packed_rows: int
    num_packed_steps: int
    packed_epoch_s: float
    ssd_hides_from_tokens: float | None
    """T*, the number of tokens per move of the weights above which computing takes longer than the drives."""

    @property
    def ssd_hides_from_packed_rows(self) -> float | None:
        """T* in packed rows."""
        return None if self.ssd_hides_from_tokens is None else self.ssd_hides_from_tokens / self.packed_row_tokens

    def to_mapping(self) -> dict[str, Any]:
        return {**asdict(self), "ssd_hides_from_packed_rows": self.ssd_hides_from_packed_rows}


def plan_epoch(
    plan: Callable[[int], PlannedStep],
    lengths: Sequence[int],
    *,
    batch_size: int,
    num_micro_batches: int,
    num_ranks: int,
    packed_row_tokens: int,
) -> PlannedEpoch:
    """Plan an epoch of rows in the order of ``lengths``. ``plan(num_tokens)`` plans a step whose batches have rows of
    this length, and raises BudgetError for rows that do not fit. Batches of all ranks run at once, so the longest of
    them determines the time."""
    num_at_once = batch_size * num_ranks
    padded = _longest_of_each(lengths, num_at_once)
    tops = _class_tops(padded)
    steps = {top: plan(top).plan.prediction for top in {*tops, packed_row_tokens}}
    class_of = [next(top for top in reversed(tops) if length <= top) for length in padded]
    # Step times are interpolated between planned lengths. A shorter batch takes as long as the shortest planned length.
    known = sorted(tops)
    seconds = np.interp(padded, known, [steps[top].step_s for top in known]) / num_micro_batches
    num_packed_rows = -(-sum(lengths) // packed_row_tokens)
    num_packed_steps = -(-num_packed_rows // (num_at_once * num_micro_batches))
    longest_of_batch = _longest_of_each(lengths, batch_size)
    return PlannedEpoch(
        num_rows=len(lengths),
        num_tokens=sum(lengths),
        num_padded_tokens=sum(longest_of_batch[number // batch_size] for number in range(len(lengths))),
        num_steps=-(-len(padded) // num_micro_batches),
        epoch_s=float(seconds.sum()),
        classes=tuple(
            LengthClass(
                num_tokens=top,
                num_batches=num_ranks * class_of.count(top),
                step_s=steps[top].step_s,
                bottleneck=steps[top].bottleneck,
                epoch_s=float(sum(one_s for one_s, own in zip(seconds, class_of, strict=True) if own == top)),
            )
            for top in tops
        ),
        packed_row_tokens=packed_row_tokens,
        num_packed_rows=num_packed_rows,
        num_packed_steps=num_packed_steps,
        packed_epoch_s=num_packed_steps * steps[packed_row_tokens].step_s,
        ssd_hides_from_tokens=steps[packed_row_tokens].ssd_hides_from_tokens,
    )


def _longest_of_each(lengths: Sequence[int], number: int) -> list[int]:
    """Return the longest length of each group of ``number`` consecutive lengths."""
    return [max(lengths[start : start + number]) for start in range(0, len(lengths), number)]


def _class_tops(lengths: Sequence[int]) -> list[int]:
    """Return the longest length of each class, longest first."""
    tops: list[int] = []
    for length in sorted(set(lengths), reverse=True):
        if not tops or (length * _CLASS_FACTOR < tops[-1] and len(tops) < _MOST_CLASSES):
            tops.append(length)
    return tops
