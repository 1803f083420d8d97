"""Doubles of storage, devices, networks and ranks that tests and benchmarks use. Those of tests alone are in
`tests/shared`.

Only `tests/` and `scripts/benchmarks/` import this room. They import its modules one by one (such as
`hf_lohan.testing.storage_doubles`), so that a test loads only what it uses.
"""
