"""What a forked child closes of its parent's."""

from __future__ import annotations

import gc
import os
import socket

from hf_lohan.threads import close_object_in_children


def test_a_child_closes_what_its_parent_named_and_the_parent_keeps_it() -> None:
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


def test_what_is_gone_is_no_matter() -> None:
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
