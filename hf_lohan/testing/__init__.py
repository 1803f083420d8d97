"""Models and ranks that tests and benchmarks use. Doubles that only tests use are in `tests/shared`. Doubles that take
time are in `scripts/benchmarks`.

Only `tests/` and `scripts/benchmarks/` import this package. They import its modules one by one (such as
`hf_lohan.testing.thread_ranks`), so that a test loads only what it uses.
"""
