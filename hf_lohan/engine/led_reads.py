"""Weights that several ranks read together, in an order that only rank 0 knows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor

from hf_lohan.engine.parameter_access import ParameterAccess
from hf_lohan.model import Block, ParamSlice
from hf_lohan.ranks import Links, RankFailedError

_READ, _ELEMENTS, _MASTERS, _FAILED = "read ", "elements ", "masters ", "failed "


class LedReads:
    """Each rank has a part of every weight, so all ranks read each of them. Rank 0 does so when it writes it to a file,
    and the others are told which one is next."""

    def __init__(self, access: Callable[[], ParameterAccess], links: Links) -> None:
        """`access` is asked for each weight: an engine then waits for its updates."""
        self._access = access
        self._links = links

    @property
    def parts(self) -> dict[str, list[tuple[Block, ParamSlice]]]:
        """See `ParameterAccess`."""
        return self._access().parts

    def read_parameter(self, name: str) -> Tensor:
        """On rank 0, while it leads."""
        self._say(_READ + name)
        return self._access().read_parameter(name)

    def read_elements(self, name: str, first: int, last: int) -> Tensor:
        """On rank 0, while it leads. See `ParameterAccess`."""
        self._say(f"{_ELEMENTS}{first} {last} {name}")
        return self._access().read_elements(name, first, last)

    def read_masters(self, name: str, first: int, last: int) -> Tensor:
        """On rank 0, while it leads. See `ParameterAccess`."""
        self._say(f"{_MASTERS}{first} {last} {name}")
        return self._access().read_masters(name, first, last)

    def read_pieces(
        self, name: str, kind: str, first: int = 0, last: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """On rank 0, while it leads, of the working weight. See `ParameterAccess`."""
        assert kind == "param", "weights alone are read together"
        last = self.parts[name][0][1].shape.numel() if last is None else last
        self._say(f"{_ELEMENTS}{first} {last} {name}")
        pieces = self._access().read_pieces(name, kind, first, last)
        try:
            while (piece := next(pieces, None)) is not None:
                yield piece
        finally:
            for _ in pieces:  # who stops half-way must not leave the others waiting for the rest
                pass

    @contextlib.contextmanager
    def led(self) -> Iterator[None]:
        """On rank 0: the others follow until this ends, and learn if it fails."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(RankFailedError):  # of an other rank, which may end because of this one
                self._say(f"{_FAILED}{type(error).__name__}: {error}")
            raise
        self._say("")

    def follow(self) -> None:
        """On the others. Raises RankFailedError if rank 0 could not go on."""
        while said := self._say(""):
            if said.startswith(_FAILED):
                raise RankFailedError(f"rank 0 could not save the model: {said.removeprefix(_FAILED)}", 0)
            if said.startswith(_READ):
                self._access().read_parameter(said.removeprefix(_READ))
                continue
            if said.startswith(_MASTERS):
                first, last, name = said.removeprefix(_MASTERS).split(" ", 2)
                self._access().read_masters(name, int(first), int(last))
                continue
            first, last, name = said.removeprefix(_ELEMENTS).split(" ", 2)
            for _ in self._access().read_pieces(name, "param", int(first), int(last)):
                pass

    def _say(self, what: str) -> str:
        """What rank 0 says."""
        return self._links.all_gather("the next weight to save", what.encode())[0].decode()
