"""Python programs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def run_python(
    *arguments: object, status: int | None = 0, timeout_s: float = 400, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with this project on its path, and check its exit status. `status`: None if it is any but 0.
    `variables`: more variables of the environment."""
    done: Any = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == status or (status is None and done.returncode), f"{done.stdout}{done.stderr}"
    return done
