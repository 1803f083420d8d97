"""A forked child closes files of its parent."""

from __future__ import annotations

import gc
import os
import socket

from hf_lohan.threads import close_object_in_children


def test_a_child_closes_a_socket_that_its_parent_keeps() -> None:
    kept, other = socket.socketpair()
    close_object_in_children(kept)
    child = os.fork()
    if child == 0:
        os._exit(0 if kept.fileno() == -1 and other.fileno() != -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    kept.sendall(b"!")
    assert other.recv(1) == b"!"
    kept.close()
    other.close()


def test_a_collected_socket_is_ignored() -> None:
    kept, other = socket.socketpair()
    close_object_in_children(kept)
    kept.close()
    del kept
    gc.collect()
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    other.close()
