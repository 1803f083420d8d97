"""The small JSON file that says what a store is; the same in every path but for the path's own index."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import xxhash

from hf_lohan.files import ForeignStoreError, StorageError, StorePath, replace_durably
from hf_lohan.files.durable_file import read_whole, remove_durably
from hf_lohan.store.layout import RecordSpec, StoreLayout

MANIFEST_NAME = "manifest.json"
RANK_FOLDER = re.compile(r"rank-(\d+)-of-(\d+)")
"""The name of the folder of one of several ranks."""
MANIFEST_VERSION = 4
_OLDEST_VERSION = 3
"""Which did not say whose rank's store it is. Such stores are opened, and stay as they are."""
_MAX_BYTES = 64 << 20
"""No manifest is larger: a record takes 200 bytes."""


@dataclass(frozen=True)
class ModelIdentity:
    """Whose records these are. Equal ``fingerprint`` means: same model, so its store may be replaced."""

    model_class: str
    num_parameters: int
    fingerprint: str
    optimizer_state_dtype: str = "float32"
    """Told apart by the fingerprint as well; here for messages, and for who reads the store without its config."""
    optimizer: str = "AdamW(exp_avg, exp_avg_sq)"
    """What updates its parameters, and which records that has; several with " + " between them. As the type above."""


@dataclass(frozen=True)
class Manifest:
    """``store_id`` ties the paths of one store together. The paths in ``layout`` are never opened."""

    store_id: str
    created: str
    model: ModelIdentity
    layout: StoreLayout
    num_homes: int = 1
    path_index: int = 0
    rank: tuple[int, int] | None = None
    """Whose it is, and of how many ranks. None: an older version made it, which did not say."""

    def to_json(self) -> dict[str, Any]:
        return sealed(
            {
                "format_version": MANIFEST_VERSION,
                "store_id": self.store_id,
                "created": self.created,
                "model": asdict(self.model),
                "num_homes": self.num_homes,
                "path_index": self.path_index,
                "rank": list(self.rank or (0, 1)),
                "layout": self.layout.to_json(),
            }
        )

    @property
    def layout_id(self) -> str:
        """What each commit repeats, so that none is read by another manifest; "" where an older version made it."""
        if self.rank is None:
            return ""
        content = [self.store_id, self.num_homes, self.rank, self.layout.to_json()]
        return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Manifest:
        """The inverse of `to_json`; raises KeyError, TypeError or ValueError on anything else."""
        if fields["xxh3"] != sealed(fields)["xxh3"]:
            raise ValueError("its checksum is wrong")
        layout = StoreLayout.from_json(fields["layout"])
        if fields["path_index"] not in range(len(layout.paths)):
            raise ValueError(f"path_index {fields['path_index']!r} is out of range")
        if fields["num_homes"] not in (1, 2):
            raise ValueError(f"num_homes {fields['num_homes']!r} is neither 1 nor 2")
        model = ModelIdentity(**fields["model"])
        store_id, created = str(fields["store_id"]), str(fields["created"])
        rank = None
        if fields["format_version"] > _OLDEST_VERSION:
            number, num_ranks = fields["rank"]
            if not (type(number) is type(num_ranks) is int and 0 <= number < num_ranks):
                raise ValueError(f"rank {fields['rank']!r} is none")
            rank = (number, num_ranks)
        return cls(store_id, created, model, layout, int(fields["num_homes"]), int(fields["path_index"]), rank)

    @property
    def home_layouts(self) -> tuple[StoreLayout, ...]:
        """The layout of each home's files."""
        return home_layouts(self.layout, self.num_homes)

    def refuse_other_rank(self, directory: str) -> None:
        """Raise `ForeignStoreError` where the store lies in the folder of another rank than made it."""
        wanted = rank_of(directory)
        if self.rank is not None and self.rank != wanted:
            raise ForeignStoreError(
                f"{directory} holds the store of {_rank_words(self.rank)}, not of {_rank_words(wanted)}: each rank's "
                "store goes on only in the folder that it was made in; bring the right one back there"
            )

    def refuse_other_records(self, records: Sequence[RecordSpec], directory: str) -> None:
        """Raise `ForeignStoreError` unless the store has these records."""
        if self.layout.records != tuple(records):
            names = [
                {(record.block, record.kind, record.first, record.numel) for record in some}
                for some in (self.layout.records, records)
            ]
            block, kind, first, numel = min(names[0] ^ names[1], default=("", "", 0, 0))
            raise ForeignStoreError(
                f"{directory} holds a store of this model that is cut in another way than this run cuts it, beginning "
                f"with elements {first} to {first + numel} of {kind} of {block}: bring back the store of this rank, "
                "use the version of hf_lohan that made it, or delete the store and resume from a checkpoint"
            )

    def refuse_other(self, model: ModelIdentity, directory: str) -> None:
        """Raise `ForeignStoreError` unless the store is ``model``'s."""
        if self.model.fingerprint != model.fingerprint:
            ours, theirs = model.optimizer_state_dtype, self.model.optimizer_state_dtype
            is_alike = (self.model.model_class, self.model.num_parameters) == (model.model_class, model.num_parameters)
            if is_alike and model.optimizer != self.model.optimizer:
                raise ForeignStoreError(
                    f"{directory} holds a store with the states of {self.model.optimizer}, this run has "
                    f"{model.optimizer}; set that optimizer to go on from there, choose another directory, or delete "
                    "this one if its state is no longer needed"
                )
            if is_alike and ours != theirs:
                raise ForeignStoreError(
                    f"{directory} holds a store with optimizer_state_dtype={theirs}, this run has {ours}; set it to "
                    f"{theirs} to go on from there, choose another directory, or delete this one if its state is no "
                    "longer needed"
                )
            raise ForeignStoreError(
                f"{directory} holds the store of another model: {self.model.model_class} with "
                f"{self.model.num_parameters:,} parameters, created {self.created}; "
                f"give this run another output_dir or ssd path, or delete that store if its state is no longer needed"
            )


def rank_of(folder: str) -> tuple[int, int]:
    """Whose store a folder is for, by its name: the rank, and of how many."""
    match = RANK_FOLDER.fullmatch(os.path.basename(os.path.abspath(folder)))
    return (int(match[1]), int(match[2])) if match else (0, 1)


def _rank_words(rank: tuple[int, int]) -> str:
    return f"rank {rank[0]} of {rank[1]}" if rank[1] > 1 else "a run with one rank"


def sealed(fields: dict[str, Any]) -> dict[str, Any]:
    """A manifest's fields with the checksum of all of them but itself."""
    content = {name: value for name, value in fields.items() if name != "xxh3"}
    return content | {"xxh3": xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())}


def home_layouts(layout: StoreLayout, num_homes: int) -> tuple[StoreLayout, ...]:
    """The layouts of the files of one home or two."""
    return (layout,) if num_homes == 1 else (layout, layout.second_home())


def read_manifest(directory: str) -> Manifest | None:
    """The manifest in a directory, None if there is none.

    Raises `ForeignStoreError` for one that is damaged, not ours or of a newer version of this library.
    """
    file = os.path.join(directory, MANIFEST_NAME)
    try:
        fields = json.loads(read_whole(file, _MAX_BYTES))
        version = int(fields["format_version"])
        if _OLDEST_VERSION <= version <= MANIFEST_VERSION:
            return Manifest.from_json(fields)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ForeignStoreError(
            f"{file} is damaged or not a store's manifest ({error}): choose another directory or delete this one"
        ) from error
    advice = "upgrade hf_lohan" if version > MANIFEST_VERSION else "delete the store (checkpoints still resume)"
    raise ForeignStoreError(
        f"{file} has format version {version}, this hf_lohan knows {MANIFEST_VERSION}: {advice} or choose another "
        "directory"
    )


def write_manifests(manifest: Manifest, directories: Sequence[str]) -> None:
    """Put the manifest into every directory: whole or not at all, and there to stay."""
    for path_index, directory in enumerate(directories):
        content = json.dumps(replace(manifest, path_index=path_index).to_json(), indent=1)
        replace_durably(os.path.join(directory, MANIFEST_NAME), content.encode())


def remove_manifests(directories: Sequence[str]) -> None:
    """From here on none of the directories holds a store. The first one's goes last. Raises `StorageError`."""
    for directory in reversed(directories):
        remove_durably(os.path.join(directory, MANIFEST_NAME))


def assemble(paths: Sequence[StorePath]) -> tuple[Manifest, tuple[StorePath, ...]]:
    """The one manifest of the store in ``paths``, given in any order, and the paths in the store's order.

    Raises `StorageError` if a path holds no store, `ForeignStoreError` if they are not all of one store.
    """
    by_index: dict[int, StorePath] = {}
    first: Manifest | None = None
    for path in paths:
        found = read_manifest(path.path)
        if found is None:
            others = [other.path for other in paths if other is not path and read_manifest(other.path) is not None]
            advice = "create one there or give the directory of one"
            if others:
                advice = f"the other part of it is in {' and '.join(others)}; is the drive of this one mounted?"
            raise StorageError("there is no store in", path=path.path, advice=advice)
        first = first or found
        if found.store_id != first.store_id:
            raise ForeignStoreError(
                f"{paths[0].path} and {path.path} hold parts of different stores: give the paths of one"
            )
        found.refuse_other_rank(path.path)
        by_index[found.path_index] = path
    assert first is not None, "paths are validated before"
    if len(by_index) != len(first.layout.paths) or len(by_index) != len(paths):
        raise ForeignStoreError(
            f"{paths[0].path} is part of a store over {len(first.layout.paths)} paths, {len(paths)} given: "
            f"give each of them once"
        )
    return first, tuple(by_index[index] for index in sorted(by_index))
