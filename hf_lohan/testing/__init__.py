"""Doubles for the tests: storage that is slow, faulty, short or counted, and others beside it.

Only `tests/` and `scripts/benchmarks/` import this room, and its modules one by one
(`hf_lohan.testing.storage_doubles`), so that a test loads only what it uses.
"""

__all__: list[str] = []
