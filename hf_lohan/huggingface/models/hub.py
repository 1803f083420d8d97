"""Finds checkpoints by path, or by name in the Hub. Files of the Hub are read from the cache, or downloaded to it."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import glob
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_lohan.compat.transformers_private import IMPLEMENTATIONS, set_implementations
from hf_lohan.config import OffloadConfig
from hf_lohan.files import CapacityError, StorePath
from hf_lohan.files.directories import check_free_space
from hf_lohan.quantize.encoded_weights import UnreadTensor
from hf_lohan.ranks import Links
from hf_lohan.store import DATA_NAMES, RecordSpec, bytes_of_new_store
from hf_lohan.wording import format_bytes

logger = logging.getLogger(__name__)

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
"""Arguments of `from_pretrained` that locate a model in the Hub. They have no effect for a folder."""
CODE_ARGUMENTS = ("trust_remote_code", "code_revision")
_NOT_OF_CONFIG = (*HUB_ARGUMENTS, *CODE_ARGUMENTS, "gguf_file", "quantization_config", "subfolder", "variant")
"""Arguments of `from_pretrained` that are not values for the config."""
CONFIG_NAME = "config.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
Tensors = Mapping[str, UnreadTensor]
"""Maps names of a checkpoint's tensors to tensors that are read only on access."""
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.model.v*", "*.tiktoken", "*.spm", "*.bpe", "*.codes")
"""Configs, tokenizers, chat templates and processors."""
_ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_TEMPLATES = "additional_chat_templates/*.jinja"
_CODE = "*.py"
_FAILURES: tuple[type[Exception], ...] = (OSError, HfHubHTTPError.__bases__[0])
"""Errors that huggingface_hub and its HTTP client raise."""
_HEARTBEAT_S = 20.0


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder, or a model in the Hub whose config, tokenizer and other small files are in the cache."""

    name: str
    """The path or name that was given."""
    folder: str
    """The folder, or the snapshot folder in the cache."""
    hub: Mapping[str, Any] | None = None
    """The `HUB_ARGUMENTS` of a model in the Hub. None for a folder."""
    code: Mapping[str, Any] = field(default_factory=dict)
    """The `CODE_ARGUMENTS` that were given."""
    missing: Mapping[str, int] = field(default_factory=dict)
    """Maps names of weight files that are not in the cache to their sizes in bytes."""

    @classmethod
    def open(cls, path: str | Path, arguments: Mapping[str, Any] | None = None, *, weights: bool = True) -> Checkpoint:
        """Find a folder, or fetch the small files of a model in the Hub. A folder of the same name has precedence.

        ``arguments`` may have `HUB_ARGUMENTS` and `CODE_ARGUMENTS`. Without ``weights`` a model in the Hub needs no
        weights, and only its config is fetched. Raises ValueError if there is no such checkpoint.
        """
        name, arguments = os.fspath(path), arguments or {}
        code = {argument: arguments[argument] for argument in CODE_ARGUMENTS if arguments.get(argument)}
        if os.path.isdir(name):
            return cls(name, name, code=code)
        try:
            validate_repo_id(name)
        except HFValidationError:
            raise ValueError(
                f"{name!r} is not a checkpoint folder; give such a folder, or the name of a model in the Hub"
            ) from None
        if os.path.exists(name):
            raise ValueError(f"{name!r} is not a checkpoint folder, but a file; give the path of a folder")
        hub = {argument: arguments[argument] for argument in HUB_ARGUMENTS if arguments.get(argument) is not None}
        hub.pop("proxies", None)
        other = next((argument for argument in ("subfolder", "variant") if arguments.get(argument)), None)
        if other is not None:
            raise ValueError(
                f"{other}={arguments[other]!r} is not supported for {name!r}, a model in the Hub; run `hf download "
                f"{name}`, and give the path of the folder"
            )
        folder, sizes, reason = _small_files(name, hub, with_code="trust_remote_code" in code, only_config=not weights)
        if not weights:
            return cls(name, folder, hub, code)
        wanted = weight_files(folder, sizes)
        absent = next((file for file in wanted if sizes and file not in sizes), None)
        if absent is not None:
            raise ValueError(
                f"{name!r} has no safetensors files that are loaded by default ({absent} is missing); load it with "
                "transformers, save it with save_pretrained, and give that folder"
            )
        missing = [file for file in wanted if not _has(folder, file)]
        if missing and reason is not None:
            others = [] if any(_has(folder, file) for file in wanted) else _other_formats(os.listdir(folder))
            if others:
                raise ValueError(
                    f"{name!r} has no safetensors files in the Hub's cache (only {min(others)}), and the Hub cannot be "
                    f"reached ({reason}); load it with transformers, save it with save_pretrained, and give that folder"
                )
            raise ValueError(
                f"{name!r} is incomplete in the Hub's cache ({missing[0]} is missing), and the Hub cannot be reached "
                f"({reason}); run `{_download_command(name, hub)}` while online"
            )
        return cls(name, folder, hub, code, {file: sizes.get(file, 0) for file in missing})

    def read_config(self) -> Any:
        """Return the transformers config. Raises ValueError if there is no config, or if it needs code without
        `trust_remote_code`."""
        file = Path(self.folder) / CONFIG_NAME
        if not file.is_file() and _has(self.folder, "adapter_config.json"):
            raise ValueError(
                f"{self.name!r} is an adapter of PEFT without its base; give the path of the base with peft_config=, "
                "or hf_lohan.from_pretrained(base, finish=lambda model: peft.PeftModel.from_pretrained(model, "
                f"{self.name!r}, is_trainable=True)) to train it further"
            )
        if not file.is_file():
            raise ValueError(f"{self.name!r} has no {CONFIG_NAME}; give a checkpoint with a config of transformers")
        return _read_config(self.name, file, self.folder, self.code)

    def take_config(self, arguments: dict[str, Any]) -> Any:
        """Return the config for arguments of `from_pretrained`. ``arguments`` may have a ``config`` (an object, or
        another folder or name) and values for a config that is read. These are removed from ``arguments``. Raises the
        errors of `read_config`, and ValueError for a value that the config refuses."""
        given = arguments.pop("config", None)
        if given is None or isinstance(given, str | os.PathLike):
            source = self if given is None else Checkpoint.open(os.fspath(given), arguments, weights=False)
            config = source.read_config()
            own = {name: value for name, value in arguments.items() if name not in _NOT_OF_CONFIG}
            if own:
                try:
                    config, unused = AutoConfig.from_pretrained(
                        source.folder, return_unused_kwargs=True, **{"trust_remote_code": False, **self.code, **own}
                    )
                except Exception as error:
                    raise ValueError(
                        f"the config of {self.name!r} cannot be changed by {', '.join(own)}: "
                        f"{' '.join(str(error).split())}; give values that {type(config).__name__} accepts"
                    ) from error
                for name in own.keys() - unused.keys():
                    del arguments[name]
        else:
            config = copy.deepcopy(given)
        set_implementations(config, {name: arguments.pop(name) for name in IMPLEMENTATIONS if name in arguments})
        return config

    def fetch_weights(self, records: Sequence[RecordSpec] | None, config: OffloadConfig, links: Links) -> None:
        """Download the weights that are not in the cache, from the same commit as the small files. First log the space
        that the download and the store take on disk.

        ``records``: records of the store, at the paths of ``config``. None if they are not known yet. One process of
        each machine downloads, and the others wait. Raises ValueError if the disk is too small.
        """
        if not self.missing:
            return
        assert self.hub is not None
        cache = os.fspath(self.hub.get("cache_dir") or constants.HF_HUB_CACHE)
        with _telling_others(links), _lock(Path(cache) / ".locks" / f"lohan--{self.name.replace('/', '--')}.lock"):
            missing = {file: size for file, size in self.missing.items() if not _has(self.folder, file)}
            if missing:
                self._check_room(sum(missing.values()), cache, records, config, links)
                snapshot = Path(self.folder)
                pinned = {"revision": snapshot.name} if snapshot.parent.name == "snapshots" else {}
                patterns = [*map(glob.escape, missing)]
                try:
                    snapshot_download(self.name, allow_patterns=patterns, **{**self.hub, **pinned})
                except _FAILURES as error:
                    raise ValueError(
                        f"the download of {self.name!r} failed ({_reason(error)}); start again to continue it"
                    ) from error

    def _check_room(
        self, num_bytes: int, cache: str, records: Sequence[RecordSpec] | None, config: OffloadConfig, links: Links
    ) -> None:
        paths = [
            StorePath(ssd.path, ssd.capacity if isinstance(ssd.capacity, int) else None)
            for ssd in config.ssd_paths(cache)
        ]
        most_homes = 1 if config.durability == "checkpoint" else 2
        least_homes = 2 if config.durability == "step" else 1
        for num_homes in range(most_homes, least_homes - 1, -1):
            takes, store = f"{format_bytes(num_bytes)} of weights to {cache}", [0] * len(paths)
            if records is not None:
                store = [links.ranks.num_local * size for size in bytes_of_new_store(paths, records, num_homes)]
                places = " and ".join(path.path for path in paths)
                takes += f", and its store takes {format_bytes(sum(store))} in {places}"
            try:
                check_free_space([StorePath(cache), *paths], [num_bytes, *store], DATA_NAMES)
            except CapacityError as error:
                if num_homes > least_homes:
                    continue
                raise ValueError(
                    f"the disk is too small to download {self.name!r}: the run downloads {takes}, but "
                    f"{'; '.join(map(str, error.shortfalls))}; free space, or set HF_HUB_CACHE or ssd to another drive"
                ) from None
            logger.warning("downloading %s: %s", self.name, takes)  # warnings are shown even without logging
            return


def adapter_folder(adapter: str | Path) -> str:
    """Return the folder of a saved adapter of PEFT. An adapter in the Hub is downloaded. A folder of the same name has
    precedence. Raises ValueError if there is no such adapter."""
    name = folder = os.fspath(adapter)
    if not os.path.isdir(name):
        try:
            validate_repo_id(name)
            folder = snapshot_download(name, allow_patterns=[*_ADAPTER_FILES, *_SMALL_FILES])
        except HFValidationError:
            raise ValueError(
                f"{name!r} is not a folder with an adapter; give such a folder, or the name of an adapter in the Hub"
            ) from None
        except _FAILURES as error:
            raise _not_found(name, {}, error) from error
    if not _has(folder, "adapter_config.json"):
        raise ValueError(f"{name!r} has no adapter_config.json; give a folder that PEFT has saved an adapter to")
    if not any(_has(folder, file) for file in _ADAPTER_FILES):
        raise ValueError(f"{name!r} has no {_ADAPTER_FILES[0]}; give a folder that PEFT has saved an adapter to")
    return folder


def read_model_config(path: str | Path, arguments: Mapping[str, Any] | None = None) -> Any:
    """Return the transformers config of a folder, of a `config.json` or of a model in the Hub. ``arguments``: as for
    `Checkpoint.open`. Raises ValueError if there is no config."""
    if os.path.isfile(path):
        return _read_config(os.fspath(path), Path(path), os.fspath(path), {})
    return Checkpoint.open(path, arguments, weights=False).read_config()


def _read_config(name: str, file: Path, source: str, code: Mapping[str, Any]) -> Any:
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        has_own = "AutoConfig" in (fields.get("auto_map") or {}) and fields.get("model_type") not in CONFIG_MAPPING
        if has_own and not code.get("trust_remote_code"):
            raise ValueError(
                f"{name!r} is a model with custom code, which would run on this machine; read that code, and give "
                "trust_remote_code=True (--trust_remote_code) if you trust it"
            )
        return AutoConfig.from_pretrained(source, **{"trust_remote_code": False, **code})
    except (OSError, ValueError, KeyError, AttributeError) as error:
        if "trust_remote_code" in str(error):
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{name!r} has no model config: {reason}") from None


def _small_files(
    name: str, hub: Mapping[str, Any], *, with_code: bool, only_config: bool
) -> tuple[str, dict[str, int], str | None]:
    """Return the folder of the snapshot, a dict from the model's files to their sizes in bytes, and the reason if the
    Hub could not be reached. The sizes are not known without the Hub, and not needed if only the config is needed."""
    failure: BaseException | None = None
    if not hub.get("local_files_only"):
        try:
            if only_config:
                patterns = [CONFIG_NAME, *([_CODE] if with_code else [])]
                return snapshot_download(name, allow_patterns=patterns, **hub), {}, None
            where = {argument: hub[argument] for argument in ("revision",) if argument in hub}
            info = HfApi(token=hub.get("token")).model_info(name, files_metadata=True, **where)
            sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
            _refuse_other_formats(name, sizes)
            small = [glob.escape(file) for file in sizes if _is_small(file, with_code=with_code)]
            return snapshot_download(name, allow_patterns=small, **hub), sizes, None
        except _FAILURES as error:
            failure = error
    try:
        cached = {argument: value for argument, value in hub.items() if argument != "force_download"}
        folder = snapshot_download(name, allow_patterns=[CONFIG_NAME], **{**cached, "local_files_only": True})
    except OSError:
        raise _not_found(name, hub, failure) from failure
    if not _has(folder, CONFIG_NAME):
        raise _not_found(name, hub, failure) from failure
    reason = "local_files_only=True" if failure is None else _reason(failure)
    logger.info("%s is read from the Hub's cache: %s", name, reason)
    return folder, {}, reason


def _is_small(file: str, *, with_code: bool) -> bool:
    if "/" in file and not (with_code and fnmatch(file, _CODE)):
        return fnmatch(file, _TEMPLATES)
    return any(fnmatch(file, pattern) for pattern in (*_SMALL_FILES, *([_CODE] if with_code else [])))


def weight_files(folder: str, sizes: Mapping[str, int] = MappingProxyType({})) -> list[str]:
    """Return the names of the files with the model's weights. ``sizes``: known sizes of all files of the model."""
    config = json.loads((Path(folder) / CONFIG_NAME).read_text()) if _has(folder, CONFIG_NAME) else {}
    file = config.get("transformers_weights")
    if file is None:
        is_single = _has(folder, _WEIGHTS) or _WEIGHTS in sizes
        file = _INDEX if not is_single and _has(folder, _INDEX) else _WEIGHTS
    if not str(file).endswith(".index.json") or not _has(folder, file):
        return [file]
    index = json.loads((Path(folder) / file).read_text(encoding="utf-8"))
    return sorted(set(index["weight_map"].values()))


def _refuse_other_formats(name: str, files: Mapping[str, int]) -> None:
    if not any(file.endswith(".safetensors") and "/" not in file for file in files):
        others = _other_formats(files)
        raise ValueError(
            f"{name!r} has no safetensors files ({min(others) if others else 'no weights at all'}); load it with "
            "transformers, save it with save_pretrained, and give that folder"
        )


def _other_formats(files: Iterable[str]) -> list[str]:
    return [file for file in files if file.endswith((".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"))]


def _download_command(name: str, hub: Mapping[str, Any]) -> str:
    return f"hf download {name}" + (f" --revision {hub['revision']}" if hub.get("revision") else "")


def _has(folder: str, file: str) -> bool:
    return os.path.isfile(os.path.join(folder, file))


def _not_found(name: str, hub: Mapping[str, Any], failure: BaseException | None) -> ValueError:
    """Return the error for a model that is not in the cache and cannot be fetched because of ``failure``."""
    causes = [failure, getattr(failure, "__cause__", None)]
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return ValueError(
            f"{name!r} is given only to users who have accepted its terms; accept them at "
            f"{constants.ENDPOINT}/{name}, then log in with `hf auth login` or give token="
        )
    if any(isinstance(cause, RevisionNotFoundError) for cause in causes):
        return ValueError(f"{name!r} has no revision {hub.get('revision')!r} in the Hub; give a branch, tag or commit")
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        return ValueError(
            f"{name!r} is not a folder here, and the Hub has no model of this name that you may read; check the name, "
            "and if the model is private log in with `hf auth login`"
        )
    reason = "local_files_only=True" if failure is None else _reason(failure)
    lacking = f"its revision {hub['revision']!r}" if hub.get("revision") else "it"
    return ValueError(
        f"{name!r} is not a folder here, the Hub's cache does not have {lacking}, and the Hub cannot be reached "
        f"({reason}); run `{_download_command(name, hub)}` while online, or give the path of a checkpoint folder"
    )


def _reason(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ else error
    if isinstance(cause, OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    text = next(iter(str(cause).splitlines()), "").rstrip(".")
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


@contextlib.contextmanager
def _lock(file: Path) -> Iterator[None]:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _telling_others(links: Links) -> Iterator[None]:
    """In this context, send heartbeats to ranks of other machines, which may finish their downloads earlier."""
    is_done = threading.Event()

    def tell(send: Callable[[], None]) -> None:
        while not is_done.wait(_HEARTBEAT_S):
            send()

    thread = threading.Thread(target=tell, args=(links.watch.beat,), name="lohan-download", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


# Contents of a folder.


@dataclass(frozen=True)
class SaidForm:
    """The `quantization_config` in the config of a quantized checkpoint."""

    method: str
    """Name of the method."""
    fields: dict[str, Any]
    """All entries of the `quantization_config`."""
    plain: Any
    """A copy of the config. Neither it nor a config in it has a `quantization_config`."""


def quantization_of(model_config: Any) -> SaidForm | None:
    """Return the form that the config of a model or of its text model describes. None if there is none."""
    text_config = getattr(model_config, "get_text_config", lambda **_: model_config)(decoder=True)
    for config in (model_config, text_config):
        said = getattr(config, "quantization_config", None)
        if said is not None:
            fields = dict(said if isinstance(said, dict) else said.to_dict())
            return SaidForm(method_of(fields), fields, _without_quantization(model_config))
    return None


def method_of(fields: Mapping[str, Any]) -> str:
    if fields.get("load_in_8bit"):
        return "int8"
    if fields.get("load_in_4bit"):
        return "bitsandbytes"
    method = fields.get("quant_method")
    return str(getattr(method, "value", method))


def _without_quantization(model_config: Any) -> Any:
    plain = copy.deepcopy(model_config)
    configs = [plain]
    for config in configs:
        vars(config).pop("quantization_config", None)
        configs.extend(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))
    return plain


def has_safetensors(path: str | Path) -> bool:
    """Return whether a folder has the weights of a checkpoint as safetensors files."""
    return (Path(path) / _WEIGHTS).is_file() or (Path(path) / _INDEX).is_file()


def check_safetensors(path: str | Path) -> None:
    """Read the headers of a checkpoint's safetensors files. Raises ValueError for a file that is missing or damaged."""
    if has_safetensors(path):
        with opened_tensors(Path(path)):
            pass


def safetensors_files(path: Path) -> list[str]:
    """Return the names of the safetensors files with the weights of a checkpoint folder. Raises ValueError for a
    damaged index."""
    if (path / _WEIGHTS).is_file():
        return [_WEIGHTS]
    if not (path / _INDEX).is_file():
        return []
    try:
        return sorted(set(json.loads((path / _INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(path / _INDEX)!r} is damaged ({error!r}); download it again") from None


@contextlib.contextmanager
def opened_tensors(path: Path) -> Iterator[Tensors]:
    """Yield the tensors of all safetensors files of a checkpoint folder. They are read only on access. Raises
    ValueError for a file that is missing or damaged."""
    files = safetensors_files(path)
    if not files:
        raise ValueError(
            f"{str(path)!r} is a quantized checkpoint without {_WEIGHTS} or {_INDEX}, and only safetensors files are "
            "dequantized; save it as safetensors"
        )
    with contextlib.ExitStack() as stack:
        tensors: dict[str, UnreadTensor] = {}
        for name in files:
            try:
                file = stack.enter_context(safe_open(path / name, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{str(path / name)!r} is missing or damaged ({error}); download it again") from None
            tensors.update((key, file.get_slice(key)) for key in file.keys())  # noqa: SIM118 - no mapping
        yield tensors
