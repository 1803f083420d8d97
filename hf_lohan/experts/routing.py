"""Assigns the rows of a call to experts, and counts them.

The host needs these counts from the device, and waits for them at most once per call. They are requested as early as
possible, and all other work of the call is enqueued before the wait.

Commits have the counts of a run's forwards (`RoutedRows`). `lohan reshard --balance` divides experts by these counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hf_lohan.compat.torch_private import StorageWeakRef, storage_id, version_of
from hf_lohan.device import Device

_LEAST_BYTES = 4096
"""Size of a page, which is the smallest size that can be pinned."""

ROUTED_ROWS = "routed_rows"
"""Key in a commit's facts. Its value has the number of rows of each expert."""


class HostNumbers:
    """Copies a few integers to the host. The computing thread makes one request at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._landing: Tensor | None = None

    def request(self, numbers: Tensor) -> Callable[[], list[int]]:
        """Enqueue the copy to the host. Returns a function that waits for this copy, but not for later work, and then
        returns the numbers."""
        if self._landing is None or self._landing.numel() < numbers.numel():
            num_bytes = max(_LEAST_BYTES, numbers.numel() * torch.int64.itemsize)
            self._landing = self._device.host_empty(num_bytes).view(torch.int64)
        landing = self._landing[: numbers.numel()]
        arrived = self._device.fetch(landing, numbers)

        def read_numbers() -> list[int]:
            arrived.synchronize()
            of_host: list[int] = landing.tolist()
            return of_host

        return read_numbers


class KnownCounts:
    """Numbers of rows of each expert in calls of one layer. A call's counts are kept as long as its ids exist."""

    def __init__(self) -> None:
        self._of_ids: dict[int, tuple[StorageWeakRef, object, list[int]]] = {}

    def add_counts(self, top_k_index: Tensor, counts: list[int]) -> None:
        if top_k_index.is_inference():
            return  # there is no backward
        self._of_ids = {key: known for key, known in self._of_ids.items() if not known[0].expired()}
        storage = StorageWeakRef(top_k_index.untyped_storage())
        self._of_ids[storage_id(top_k_index)] = storage, _content(top_k_index), counts

    def find_counts(self, top_k_index: Tensor) -> list[int] | None:
        """Return the counts of these ids, or None if their current values were never counted."""
        known = self._of_ids.get(storage_id(top_k_index))
        # A storage keeps its id while a weak reference to it exists.
        return known[2] if known is not None and known[1] == _content(top_k_index) else None


def _content(ids: Tensor) -> object:
    """Return a key for the ids. The key changes whenever their values may have changed."""
    return ids.storage_offset(), ids.shape, ids.stride(), version_of(ids)


class Routing:
    """The (token, choice) pairs of a call, sorted by expert."""

    def __init__(
        self,
        top_k_index: Tensor,
        num_experts: int,
        host: HostNumbers,
        known: KnownCounts,
        expected_ends: Tensor | None = None,
    ) -> None:
        """``expected_ends``: expected numbers of rows, in the form of `ends_by_expert`. The host gets them too."""
        self._ids, self._num_experts, self._known = top_k_index, num_experts, known
        sorted_ids, self.order = torch.sort(top_k_index.reshape(-1))
        """For each sorted pair, the pair's index in (token, choice) order."""
        self._counts = known.find_counts(top_k_index) if expected_ends is None else None
        self._answer: Callable[[], list[int]] | None = None
        if self._counts is None:
            numbers = [sorted_ids[:1], sorted_ids[-1:], ends_by_expert(sorted_ids, num_experts)]
            self._answer = host.request(torch.cat(numbers if expected_ends is None else [*numbers, expected_ends]))
        self.experts: list[int] = []
        """Experts with rows. `wait_for_counts` sets this and the next two attributes."""
        self.num_rows: list[int] = []
        """Number of rows of each expert in `experts`."""
        self.expected: list[int] = []
        """Number of rows of each expert according to ``expected_ends``."""
        self.token = self.order // top_k_index.shape[-1]
        self.place = torch.empty_like(self.order)
        self.place[self.order] = torch.arange(self.order.numel(), device=self.order.device)

    def wait_for_counts(self) -> None:
        """Wait until the host has each expert's number of rows. Raises ValueError for an expert that the layer does not
        have."""
        if self._counts is None:
            assert self._answer is not None
            numbers = self._answer()
            if self.order.numel():
                self._refuse_others(*numbers[:2])
                numbers = numbers[2:]
            self._counts = _counts(numbers[: self._num_experts])
            self.expected = _counts(numbers[self._num_experts :])
            self._known.add_counts(self._ids, self._counts)
        self.experts = [expert for expert, count in enumerate(self._counts) if count]
        self.num_rows = [count for count in self._counts if count]

    @property
    def counts(self) -> Sequence[int]:
        """Number of rows of each expert, after `wait_for_counts`."""
        assert self._counts is not None
        return self._counts

    @property
    def ends(self) -> list[int]:
        """The index of each expert's first sorted pair, and the number of all pairs, after `wait_for_counts`."""
        return [0, *itertools.accumulate(self.counts)]

    def _refuse_others(self, first: int, last: int) -> None:
        if first < 0 or last >= self._num_experts:
            raise ValueError(
                f"a router chose expert {first if first < 0 else last} of {self._num_experts}; streamed experts do not "
                "support transformers' own expert parallelism, so set experts: with_layer"
            )


def ends_by_expert(sorted_ids: Tensor, num_experts: int) -> Tensor:
    """Return the cumulative number of ids up to and including each expert, int64 [experts]. Unlike `bincount` this does
    not make the host wait for the device."""
    experts = torch.arange(num_experts, dtype=sorted_ids.dtype, device=sorted_ids.device)
    return torch.searchsorted(sorted_ids, experts, right=True)


def _counts(ends: Sequence[int]) -> list[int]:
    return [end - begin for begin, end in itertools.pairwise([0, *ends])] if ends else []


@dataclass(frozen=True)
class RoutedRows:
    """The rows of each expert in all forwards of a run so far, including those before the run was continued."""

    rank: int
    """The rank that counted the rows. A rank ignores facts that another rank counted (checkpoints may have them)."""
    num_nodes: int
    """Number of nodes of the run."""
    layers: Mapping[str, Sequence[int]]
    """The number of rows of each expert, by the name of the module of experts."""

    def to_fact(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_rank(cls, facts: Mapping[str, Any], rank: int) -> RoutedRows | None:
        """Return the rows of a rank from the facts of its commit. None if the facts have no rows of this
        rank in this version's form, for example because the run streams no experts."""
        found = facts.get(ROUTED_ROWS)
        if not isinstance(found, Mapping) or found.get("rank") != rank:
            return None
        num_nodes, layers = found.get("num_nodes"), found.get("layers")
        if not isinstance(num_nodes, int) or not isinstance(layers, Mapping):
            return None
        are_counts = all(
            isinstance(counts, Sequence) and all(type(count) is int for count in counts) for counts in layers.values()
        )
        return cls(rank, num_nodes, layers) if are_counts else None

    @classmethod
    def of_all(cls, facts: Sequence[Mapping[str, Any]]) -> RoutedRows | None:
        """Return the sums of the rows of all ranks, as rows of rank 0. ``facts`` has the facts of each rank's commit.
        None if no rank has rows, or if ranks differ in layers or numbers of experts."""
        found = [rows for rank, of_rank in enumerate(facts) if (rows := cls.of_rank(of_rank, rank)) is not None]
        if not found:
            return None
        if len({tuple((name, len(rows.layers[name])) for name in sorted(rows.layers)) for rows in found}) > 1:
            return None
        layers = dict(found[0].layers)
        for rows in found[1:]:
            layers = {name: _sums(counts, rows.layers[name]) for name, counts in layers.items()}
        return cls(0, found[0].num_nodes, layers)

    def plus(self, more: Mapping[str, Sequence[int]]) -> RoutedRows:
        """Return the sums of these rows and ``more``, by layer. A layer with another number of experts has ``more``."""
        before = {name: self.layers.get(name, ()) for name in more}
        layers = {
            name: _sums(before[name], counts) if len(before[name]) == len(counts) else list(counts)
            for name, counts in more.items()
        }
        return RoutedRows(self.rank, self.num_nodes, layers)


def _sums(counts: Sequence[int], others: Sequence[int]) -> list[int]:
    return [count + other for count, other in zip(counts, others, strict=True)]
