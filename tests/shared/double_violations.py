"""On the CUDA double a test fails where the double found something wrong while it ran: a race, a read of poison, ..."""

from __future__ import annotations

from collections.abc import Iterator

import cuda_double
import pytest


class FailsOnViolations:
    """A plugin of pytest, registered where torch runs on the double."""

    @pytest.fixture(autouse=True)
    def nothing_is_wrong_on_the_cuda_double(self) -> Iterator[None]:
        before = cuda_double.violations()
        yield
        cuda_double.drain()  # what is queued is found late
        found = [text for text, number in cuda_double.violations().items() if number > before.get(text, 0)]
        if found:
            pytest.fail("the CUDA double found violations:\n" + "\n".join(found), pytrace=False)
