"""Models, storage doubles and ranks that tests and benchmarks use. Doubles of tests alone are in `tests/shared`, and
those that take time, in `scripts/benchmarks`.

Only `tests/` and `scripts/benchmarks/` import this room. They import its modules one by one (such as
`hf_lohan.testing.storage_doubles`), so that a test loads only what it uses.
"""
