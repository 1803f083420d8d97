"""Where a path that may not be there yet will be."""

from __future__ import annotations

import os


def existing_directory(path: str) -> str:
    """The path itself or its nearest parent that is a directory: on the same file system, unless a mount follows."""
    path = os.path.abspath(path)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path
