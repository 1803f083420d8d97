"""Hardware profiles on disk: YAML files for other machines, and a cache of measurements."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import yaml

from hf_lohan.config import ResolvedConfig
from hf_lohan.config.values import read_yaml
from hf_lohan.costs import HardwareProfile, ProfileError
from hf_lohan.device import Device
from hf_lohan.files import CapacityError, replace_durably
from hf_lohan.files.directories import make_directory
from hf_lohan.files.durable_file import read_whole
from hf_lohan.hardware.machine import cpu_name, device_name
from hf_lohan.hardware.measurement import MeasuringEffort, measure_hardware, store_paths, with_present_room
from hf_lohan.hardware.paths import existing_directory, mount_of
from hf_lohan.hardware.rates import AttentionShape, MatrixShape
from hf_lohan.threads import usable_cpus

logger = logging.getLogger(__name__)

_FORMAT = 1
"""Version of the format, which increases when the meaning or the measurement of a number changes."""


def read_hardware(path: str | os.PathLike[str]) -> HardwareProfile:
    """Read a profile from a YAML or JSON file. Raises ProfileError with the file, the key and the value."""
    file = os.path.expanduser(os.fspath(path))
    content = read_yaml(file, "hardware profile", ProfileError)
    if not isinstance(content, dict):
        advice = "write the keys device, h2d_bytes_per_s, d2h_bytes_per_s, ssd and cpu"
        raise ProfileError(f"the hardware profile {file!r} contains {content!r}, which is not a table; {advice}")
    try:
        return HardwareProfile.from_mapping(content)
    except ProfileError as error:
        raise ProfileError(f"the hardware profile {file!r}: {error}") from None


def write_hardware(path: str | os.PathLike[str], profile: HardwareProfile) -> None:
    """Write a file for `read_hardware`. Replaces an existing file. Raises CapacityError or StorageError."""
    text = yaml.safe_dump(profile.to_mapping(), sort_keys=False, allow_unicode=True)
    replace_durably(os.path.abspath(os.path.expanduser(os.fspath(path))), text.encode())


def cached_hardware(
    config: ResolvedConfig,
    device: Device,
    *,
    matrix_shapes: Sequence[MatrixShape],
    dtype: torch.dtype,
    attention: AttentionShape | None = None,
    effort: MeasuringEffort | None = None,
    measure_again: bool = False,
    measure: Callable[..., HardwareProfile] = measure_hardware,
) -> HardwareProfile:
    """Return an earlier result of `measure_hardware` for the same device, CPU, torch, threads, drives, shapes and
    dtype, with the current free memory and disk space. Without an earlier result, measure now.

    Processes measure one after the other, and later processes read the result of the first. If the cache is damaged or
    cannot be used, this measures again.
    """
    effort = (effort or MeasuringEffort()).within(config)
    key = _key(config, device, matrix_shapes, dtype, attention, effort)
    file = _file(key)
    profile = None if measure_again else _read(file, key)
    if profile is None:
        with _taking_turns(os.path.dirname(file)):
            # Another process may have measured while this process waited.
            profile = None if measure_again else _read(file, key)
            if profile is None:
                profile = measure(
                    config, device, matrix_shapes=matrix_shapes, dtype=dtype, attention=attention, effort=effort
                )
                _keep(file, {"key": key, "profile": profile.to_mapping()})
                return profile
    return with_present_room(profile, config, device)


def has_cached_hardware(
    config: ResolvedConfig,
    device: Device,
    *,
    matrix_shapes: Sequence[MatrixShape],
    dtype: torch.dtype,
    attention: AttentionShape | None = None,
) -> bool:
    """Return whether `cached_hardware` has an earlier result of the usual effort."""
    key = _key(config, device, matrix_shapes, dtype, attention, MeasuringEffort().within(config))
    return _read(_file(key), key) is not None


def cache_directory() -> str:
    """Return the folder of the cache, in $XDG_CACHE_HOME if that is an absolute path, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the specification of XDG says to ignore relative paths
        base = os.path.expanduser("~/.cache")
    return os.path.join(base, "lohan", "hardware")


def _key(
    config: ResolvedConfig,
    device: Device,
    matrix_shapes: Sequence[MatrixShape],
    dtype: torch.dtype,
    attention: AttentionShape | None,
    effort: MeasuringEffort,
) -> dict[str, Any]:
    """Return everything on which the rates depend, in JSON's types."""
    state_dtype = config.moment_dtype
    # The default has no key, so that older profiles stay valid.
    moments = {} if state_dtype == "float32" else {"optimizer_state_dtype": state_dtype}
    attended = {} if attention is None else {"attention": asdict(attention)}
    return (
        moments
        | attended
        | {
            "format": _FORMAT,
            "machine": platform.node(),
            "device": device_name(device),
            "device_type": device.torch_device.type,
            "cpu": cpu_name(),
            "num_cpus": usable_cpus(),
            "cpu_threads": config.cpu_threads,
            "torch": torch.__version__,
            "dtype": str(dtype),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "matrix_shapes": sorted(
                [shape.num_rows, shape.inner, shape.num_columns, shape.count, shape.num_matrices]
                for shape in matrix_shapes
            ),
            "effort": asdict(effort),
            "io": [config.io_threads, config.io_piece_bytes],
            # The key has drives and not directories, because each run has its own folder.
            "ssd": [_drive(path.path) for path in store_paths(config)],
        }
    )


def _drive(path: str) -> list[int | str]:
    directory = existing_directory(path)
    return [os.stat(directory).st_dev, mount_of(directory).file_system]


def _file(key: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return os.path.join(cache_directory(), f"{digest[:24]}.json")


def _read(file: str, key: dict[str, Any]) -> HardwareProfile | None:
    """Return the profile in a file, or None if there is no file or the file has another key."""
    try:
        content = json.loads(read_whole(file))
        if content["key"] == key:
            profile = HardwareProfile.from_mapping(content["profile"])
            if len(profile.ssd) == len(key["ssd"]):
                return profile
        logger.warning("%s contains the profile of other hardware, so this hardware is measured again", file)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("the hardware profile %s cannot be used (%s), so the hardware is measured again", file, error)
    return None


def _keep(file: str, content: dict[str, Any]) -> None:
    try:
        replace_durably(file, json.dumps(content, indent=1).encode())
    except (OSError, ValueError) as error:
        logger.warning("the hardware profile cannot be saved, so the next run measures again: %s", error)


@contextmanager
def _taking_turns(directory: str) -> Iterator[None]:
    """Hold the directory's lock if possible. The kernel releases it when the process ends."""
    fd = -1
    try:
        make_directory(directory)
        file = os.path.join(directory, "lock")
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
    except (OSError, CapacityError) as error:
        logger.info("cannot lock %s (%s), so other processes may measure at the same time", directory, error)
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)
