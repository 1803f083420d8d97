"""Parameters in memory for a while, between steps: what was changed of them goes back to the store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
import xxhash
from torch import Tensor, nn

from hf_lohan.engine.model_pass import ModelPass, PassParts
from hf_lohan.engine.parameter_access import ParameterAccess
from hf_lohan.model import Block, ParamSlice
from hf_lohan.weights.absent_parameter import AbsentParameter


class Gathering:
    """Lets ordinary code change weights that live in a store, a few parameters at a time."""

    def __init__(
        self,
        place: Mapping[nn.Parameter, tuple[Block, ParamSlice]],
        parts: PassParts,
        model_pass: ModelPass,
        access: ParameterAccess,
        settle: Callable[[], None],
    ) -> None:
        self._place = place
        self._parts = parts
        self._pass = model_pass
        self._access = access
        self._settle = settle
        self._gathered: set[nn.Parameter] = set()

    @contextlib.contextmanager
    def gathered(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Within, these are ordinary parameters on the compute device, outside what `gpu_memory` bounds.

        Those that were changed are stored when it ends; bfloat16 weights are then their own float32 masters. An
        exception leaves the store as it was. Raises RuntimeError within a forward or backward, and where the model
        runs meanwhile.
        """
        self._parts.lifetime.check()
        if self._pass.is_running:
            raise RuntimeError(
                "weights can be gathered between steps, not while the model runs; if an interrupt ended it, call "
                "model.zero_grad() first"
            )
        self._pass.recover()
        self._parts.step.undo_guesses()
        self._settle()
        fresh = [parameter for parameter in dict.fromkeys(parameters) if parameter not in self._gathered]
        hashes: dict[nn.Parameter, int] = {}
        try:
            for parameter in fresh:
                part = self._place[parameter][1]
                self._parts.step.refuse_new_weight(part)
                weights = self._access.read_parameter(part.name)
                hashes[parameter] = _hash_of(weights)
                AbsentParameter.show(parameter, weights.to(self._parts.device.torch_device))
                self._gathered.add(parameter)
            yield
            changed = [parameter for parameter, before in hashes.items() if self._is_changed(parameter, before)]
            for parameter in changed:
                self._store(parameter)
        finally:
            for parameter in hashes:
                self._gathered.discard(parameter)
                block, part = self._place[parameter]
                AbsentParameter.hide(parameter, self._parts.ring.stand_ins.placeholder(block, part))

    def _is_changed(self, parameter: nn.Parameter, before: int) -> bool:
        _, part = self._place[parameter]
        if isinstance(parameter, AbsentParameter):
            raise RuntimeError(
                f"the model ran while {part.name} was gathered, so what was changed of it is gone; run the model "
                "behind the gathering"
            )
        weights = parameter.data
        if weights.shape != part.shape:
            raise ValueError(
                f"{part.name} was given the shape {tuple(weights.shape)}, the store holds {tuple(part.shape)}; resize "
                "before the model is offloaded"
            )
        return _hash_of(weights.cpu()) != before

    def _store(self, parameter: nn.Parameter) -> None:
        _, part = self._place[parameter]
        self._access.write_parameter(part.name, parameter.data)
        self._parts.ring.forget([block for block, _ in self._access.parts[part.name]])
        self._pass.note_changed_weight(part.name)


def _hash_of(weights: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(weights.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
