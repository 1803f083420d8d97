"""Nodes with a network between them on one machine. Each is a network namespace, connected to a bridge by a link with a
fixed rate.

The kernel counts the bytes that a node sends and receives. A node's own loopback is not limited, so this is a real
hierarchy on real sockets.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

_NEW_NETWORK = 0x40000000
_BUFFERED = ("burst", "256kb", "latency", "100ms")


class NoBoxesError(OSError):
    """This environment does not allow network namespaces."""


@dataclass(frozen=True)
class NetworkBox:
    """One node, which is a network namespace."""

    namespace: str
    interface: str
    """Name of the network interface in the namespace."""
    address: str
    outside: str
    """Name of the other end of the link."""

    def enter(self) -> None:
        """Move this thread, and the threads that it starts later, to this node permanently."""
        with open(f"/run/netns/{self.namespace}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"the network namespace {self.namespace} cannot be entered")

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that the kernel counted on the link, including all headers."""
        return int(Path(f"/sys/class/net/{self.outside}/statistics/rx_bytes").read_text())


@contextmanager
def network_boxes(num_boxes: int, rate: str | None = None) -> Iterator[list[NetworkBox]]:
    """Yield the nodes of one network, which exists in this context. `rate`: rate of each link in each direction, as
    `tc` writes it ("200mbit"). Raises NoBoxesError if the environment refuses."""
    if os.geteuid() != 0 or shutil.which("ip") is None or (rate is not None and shutil.which("tc") is None):
        raise NoBoxesError("network namespaces need root, and the commands ip and tc of iproute2")
    prefix = f"lh{os.getpid()}"
    with ExitStack() as undo:
        _run("ip", "link", "add", prefix, "type", "bridge")
        undo.callback(_try, "ip", "link", "del", prefix)
        _run("ip", "link", "set", prefix, "up")
        boxes = [
            NetworkBox(f"{prefix}-{number}", f"v{number}", f"10.77.0.{number + 1}", f"{prefix}.{number}")
            for number in range(num_boxes)
        ]
        for box in boxes:
            _run("ip", "netns", "add", box.namespace)
            undo.callback(_try, "ip", "netns", "del", box.namespace)
            inside = ("ip", "-n", box.namespace)
            peer = ("type", "veth", "peer", "name", box.outside)
            _run("ip", "link", "add", box.interface, "netns", box.namespace, *peer)
            undo.callback(_try, "ip", "link", "del", box.outside)  # a namespace may be gone much later than its name
            _run("ip", "link", "set", box.outside, "master", prefix, "up")
            _run(*inside, "addr", "add", f"{box.address}/24", "dev", box.interface)
            _run(*inside, "link", "set", box.interface, "up")
            _run(*inside, "link", "set", "lo", "up")
            if rate is not None:
                shaped = ("root", "tbf", "rate", rate, *_BUFFERED)
                _run("tc", "-n", box.namespace, "qdisc", "add", "dev", box.interface, *shaped)
                _run("tc", "qdisc", "add", "dev", box.outside, *shaped)
        yield boxes


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoBoxesError(f"{' '.join(command)}: {done.stderr.strip()}")


def _try(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=False)
