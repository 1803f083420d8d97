"""A failure of several threads: each raises its own copy with the same message."""

from __future__ import annotations

import errno

import pytest

from hf_lohan.files import CapacityError, CorruptionError, Shortfall, StorageError
from hf_lohan.threads import raised_anew
from hf_lohan.updates import NonFiniteGradientError

ERRORS = [
    OSError(errno.EIO, "the drive is gone", "a file"),
    StorageError("cannot read", path="a file", advice="look at the drive", errno=errno.EIO, offset=4096),
    CorruptionError("damaged:", path="a file", advice="resume"),
    CapacityError([Shortfall("a path", 2, 1, "capacity")]),
    NonFiniteGradientError("the gradient of w is not finite"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_the_copy_has_the_same_message_and_the_error_as_its_cause(error: BaseException) -> None:
    fresh = raised_anew(error)
    assert fresh is not error and fresh.__cause__ is error
    assert type(fresh) is type(error)
    assert (str(fresh), fresh.args, vars(fresh)) == (str(error), error.args, vars(error))
    if isinstance(error, OSError) and isinstance(fresh, OSError):
        assert (fresh.errno, fresh.filename) == (error.errno, error.filename)
