"""A hardware profile as a YAML file: for plans on a machine that is not at hand."""

from __future__ import annotations

import os

import yaml

from hf_lohan.files import replace_durably
from hf_lohan.planner import HardwareProfile, ProfileError


def read_hardware(path: str | os.PathLike[str]) -> HardwareProfile:
    """The profile in a YAML (or JSON) file. Raises ProfileError, naming the file, the key and the value."""
    file = os.path.expanduser(os.fspath(path))
    try:
        with open(file, encoding="utf-8") as stream:
            content = yaml.safe_load(stream)
    except OSError as error:
        advice = "give the path of a YAML file"
        raise ProfileError(f"cannot read the hardware profile {file!r}: {error.strerror}; {advice}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        raise ProfileError(f"the hardware profile {file!r} is not YAML: {problem}") from None
    if not isinstance(content, dict):
        advice = "write the keys device, h2d_bytes_per_s, d2h_bytes_per_s, ssd and cpu"
        raise ProfileError(f"the hardware profile {file!r} holds {content!r}, no table; {advice}")
    try:
        return HardwareProfile.from_mapping(content)
    except ProfileError as error:
        raise ProfileError(f"the hardware profile {file!r}: {error}") from None


def write_hardware(path: str | os.PathLike[str], profile: HardwareProfile) -> None:
    """Write a file that `read_hardware` reads, in place of any old one. Raises CapacityError or StorageError."""
    text = yaml.safe_dump(profile.to_mapping(), sort_keys=False, allow_unicode=True)
    replace_durably(os.path.abspath(os.path.expanduser(os.fspath(path))), text.encode())
