"""The manifest, a small JSON file that describes a store. It is the same on every path, except for ``path_index``."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import xxhash

from hf_lohan.files import ForeignStoreError, StorageError, StorePath, replace_durably
from hf_lohan.files.durable_file import read_whole, remove_durably
from hf_lohan.store.layout import RecordSpec, StoreLayout
from hf_lohan.wording import states_setting

MANIFEST_NAME = "manifest.json"
RANK_FOLDER = re.compile(r"rank-(\d+)-of-(\d+)(?:\.g([1-9]\d*))?")
"""Pattern of the name of one rank's folder: its rank, the number of ranks, and the generation if it is not 0."""
MANIFEST_VERSION = 4
_OLDEST_VERSION = 3
"""Version 3 does not record the store's rank. Stores of this version are opened, and keep their version."""
_MAX_BYTES = 64 << 20
"""Upper bound for the size of a manifest. A record takes 200 bytes."""


@dataclass(frozen=True)
class ModelIdentity:
    """The model of a store. Models with an equal ``fingerprint`` are the same, and may replace each other's store."""

    model_class: str
    num_parameters: int
    fingerprint: str
    optimizer_state_dtype: str = "float32"
    """It is for messages, and for readers without the config. The fingerprint includes it."""
    optimizer: str = "AdamW(exp_avg, exp_avg_sq)"
    """The update rules and their records, joined by " + ". For messages, like the dtype."""
    quantize: str = "none"
    """How frozen weights are packed. For messages, like the dtype."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields in JSON types. `quantize` is left out if it is "none", as in older versions."""
        fields = asdict(self)
        return fields if self.quantize != "none" else {key: fields[key] for key in fields if key != "quantize"}


@dataclass(frozen=True)
class Manifest:
    """The description of a store. ``store_id`` is the same on all its paths. The paths in ``layout`` are never
    opened."""

    store_id: str
    created: str
    model: ModelIdentity
    layout: StoreLayout
    num_homes: int = 1
    path_index: int = 0
    rank: tuple[int, int] | None = None
    """(rank, number of ranks); None if an older version made the store and did not record it."""

    def to_json(self) -> dict[str, Any]:
        return sealed(
            {
                "format_version": MANIFEST_VERSION,
                "store_id": self.store_id,
                "created": self.created,
                "model": self.model.to_json(),
                "num_homes": self.num_homes,
                "path_index": self.path_index,
                "rank": list(self.rank or (0, 1)),
                "layout": self.layout.to_json(),
            }
        )

    @property
    def layout_id(self) -> str:
        """Identifies this manifest in each commit, so that no commit is read with another manifest; "" if an older
        version made the store."""
        if self.rank is None:
            return ""
        content = [self.store_id, self.num_homes, self.rank, self.layout.to_json()]
        return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Manifest:
        """Inverse of `to_json`. Raises KeyError, TypeError or ValueError for other content."""
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
                raise ValueError(f"rank {fields['rank']!r} is not a rank and a number of ranks")
            rank = (number, num_ranks)
        return cls(store_id, created, model, layout, int(fields["num_homes"]), int(fields["path_index"]), rank)

    @property
    def home_layouts(self) -> tuple[StoreLayout, ...]:
        """The layout of each home's files."""
        return home_layouts(self.layout, self.num_homes)

    def refuse_other_rank(self, directory: str) -> None:
        """Raise `ForeignStoreError` if the store is in another rank's folder."""
        wanted = rank_of(directory)
        if self.rank is not None and self.rank != wanted:
            raise ForeignStoreError(
                f"{directory} holds the store of {_rank_words(self.rank)}, not of {_rank_words(wanted)}; give each "
                "rank's folder its own name again"
            )

    def refuse_other_records(self, records: Sequence[RecordSpec], directory: str) -> None:
        if self.layout.records != tuple(records):
            names = [
                {(record.block, record.kind, record.first, record.numel) for record in some}
                for some in (self.layout.records, records)
            ]
            block, kind, first, numel = min(names[0] ^ names[1], default=("", "", 0, 0))
            raise ForeignStoreError(
                f"{directory} holds a store of this model whose records differ from those of this run, first in "
                f"elements {first} to {first + numel} of {kind} of {block}; restore the store of this rank, use the "
                "version of hf_lohan that made it, or delete the store and resume from a checkpoint"
            )

    def refuse_other(self, model: ModelIdentity, directory: str) -> None:
        """Raise `ForeignStoreError` if the store belongs to a model other than ``model``."""
        if self.model.fingerprint != model.fingerprint:
            ours, theirs = model.optimizer_state_dtype, self.model.optimizer_state_dtype
            is_alike = (self.model.model_class, self.model.num_parameters) == (model.model_class, model.num_parameters)
            if is_alike and model.optimizer != self.model.optimizer:
                raise ForeignStoreError(
                    f"{directory} holds a store with the states of {self.model.optimizer}, and this run has "
                    f"{model.optimizer}; set that optimizer to continue from the store, choose another directory, or "
                    "delete the store if its state is no longer needed"
                )
            if is_alike and model.quantize != self.model.quantize:
                raise ForeignStoreError(
                    f"{directory} holds a store with quantize: {self.model.quantize}, this run has {model.quantize}; "
                    "set quantize as in the store (or leave it out if the checkpoint has that form) to continue, "
                    "choose another directory, or delete the store if its state is no longer needed"
                )
            if is_alike and ours != theirs:
                raise ForeignStoreError(
                    f"{directory} holds a store with {states_setting(theirs)}, and this run has "
                    f"{states_setting(ours)}; use the setting of the store to continue from it, choose another "
                    "directory, or delete the store if its state is no longer needed"
                )
            stored_class, continued = self.model.model_class, ""
            if stored_class != model.model_class and hasattr(sys.modules.get("transformers"), stored_class):
                continued = f"; to continue that run, load with model_class=transformers.{stored_class}"
            raise ForeignStoreError(
                f"{directory} holds the store of another model ({stored_class} with {self.model.num_parameters:,} "
                f"parameters, created {self.created}); give this run another output_dir or ssd path, or delete that "
                f"store if its state is no longer needed{continued}"
            )


def rank_of(folder: str) -> tuple[int, int]:
    """Return (rank, number of ranks) from the name of a store's folder."""
    match = RANK_FOLDER.fullmatch(os.path.basename(os.path.abspath(folder)))
    return (int(match[1]), int(match[2])) if match else (0, 1)


def _rank_words(rank: tuple[int, int]) -> str:
    return f"rank {rank[0]} of {rank[1]}" if rank[1] > 1 else "a run with one rank"


def sealed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with a checksum of all fields except the checksum itself."""
    content = {name: value for name, value in fields.items() if name != "xxh3"}
    return content | {"xxh3": xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())}


def home_layouts(layout: StoreLayout, num_homes: int) -> tuple[StoreLayout, ...]:
    """Return the layouts of one or two homes."""
    return (layout,) if num_homes == 1 else (layout, layout.second_home())


def read_manifest(directory: str) -> Manifest | None:
    """Return the manifest in a directory, or None. Raises `ForeignStoreError` if the file is damaged, is not a
    manifest, or comes from a newer version of this library."""
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
            f"{file} is damaged or not a store's manifest ({error}); choose another directory, or delete this one"
        ) from error
    advice = "upgrade hf_lohan" if version > MANIFEST_VERSION else "delete the store (checkpoints still resume)"
    raise ForeignStoreError(
        f"{file} has format version {version}, and this hf_lohan reads {MANIFEST_VERSION}; {advice}, or choose "
        "another directory"
    )


def write_manifests(manifest: Manifest, directories: Sequence[str]) -> None:
    """Write the manifest to every directory, durably and atomically."""
    for path_index, directory in enumerate(directories):
        content = json.dumps(replace(manifest, path_index=path_index).to_json(), indent=1)
        replace_durably(os.path.join(directory, MANIFEST_NAME), content.encode())


def remove_manifests(directories: Sequence[str]) -> None:
    """Remove the manifests. The first directory's manifest is removed last. Afterwards no directory has a store. Raises
    `StorageError`."""
    for directory in reversed(directories):
        remove_durably(os.path.join(directory, MANIFEST_NAME))


def assemble(paths: Sequence[StorePath]) -> tuple[Manifest, tuple[StorePath, ...]]:
    """Return the manifest of the store in ``paths``, which may be in any order, and the paths in the store's order.
    Raises `StorageError` if a path has no store, and `ForeignStoreError` if the paths belong to different stores."""
    by_index: dict[int, StorePath] = {}
    first: Manifest | None = None
    for path in paths:
        found = read_manifest(path.path)
        if found is None:
            others = [other.path for other in paths if other is not path and read_manifest(other.path) is not None]
            advice = "give the directory of a store"
            if others:
                advice = (
                    f"the other part of the store is in {' and '.join(others)}; check that the missing part's "
                    "drive is mounted"
                )
            raise StorageError("there is no store in", path=path.path, advice=advice)
        first = first or found
        if found.store_id != first.store_id:
            raise ForeignStoreError(
                f"{paths[0].path} and {path.path} hold parts of different stores; give the paths of one store"
            )
        found.refuse_other_rank(path.path)
        by_index[found.path_index] = path
    assert first is not None, "the caller validates paths"
    if len(by_index) != len(first.layout.paths) or len(by_index) != len(paths):
        raise ForeignStoreError(
            f"{paths[0].path} is part of a store over {len(first.layout.paths)} paths, and {len(paths)} of them were "
            "passed; pass each path once"
        )
    return first, tuple(by_index[index] for index in sorted(by_index))
