"""Declares the members that the mixins of an offloading Trainer use from each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_lohan.config import OffloadConfig
from hf_lohan.engine import OffloadEngine
from hf_lohan.ranks import Links
from hf_lohan.record import RunRecord

if TYPE_CHECKING:
    from transformers import Trainer as _TrainerBase
else:
    _TrainerBase = object  # `super()` is the Trainer that the mixins extend


class TrainerMixin(_TrainerBase):
    """Base class of all mixins of an offloading Trainer. One Trainer inherits all of them."""

    _offload_config: OffloadConfig | None
    """With None everything works as in upstream."""

    if TYPE_CHECKING:

        @property
        def offload_engine(self) -> OffloadEngine | None: ...

        @property
        def _links(self) -> Links: ...

        @property
        def _record(self) -> RunRecord | None: ...

        def _ensure_engine(self) -> OffloadEngine | None: ...
