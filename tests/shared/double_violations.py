"""On the CUDA double, a test fails if the double finds a violation, such as a race, during the test."""

from __future__ import annotations

from collections.abc import Iterator

import cuda_double
import pytest


class FailsOnViolations:
    """A pytest plugin for runs on the double."""

    @pytest.fixture(autouse=True)
    def fail_on_violations(self) -> Iterator[None]:
        before = cuda_double.violations()
        yield
        cuda_double.drain()  # queued work may still violate
        found = [text for text, number in cuda_double.violations().items() if number > before.get(text, 0)]
        if found:
            pytest.fail("the CUDA double found violations:\n" + "\n".join(found), pytrace=False)
