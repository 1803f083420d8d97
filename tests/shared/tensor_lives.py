"""Lives of tensors in memory, by hypothesis."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

MIB = 1 << 20


@dataclass(frozen=True)
class Life:
    num_bytes: int
    born: int
    died: int


lives = st.builds(
    lambda num_bytes, born, length: Life(num_bytes, born, born + length),
    st.one_of(st.integers(1, 5000), st.integers(1, 40 * MIB)),
    st.integers(0, 30),
    st.integers(1, 12),
)
