"""Begins a run in this process, before there is a model: settings, device, stores and connections to other ranks."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_lohan.checkpoint.generations import RunStores
from hf_lohan.config import OffloadConfig, ResolvedConfig
from hf_lohan.device import Device, default_torch_device, device_for
from hf_lohan.engine import Tiers, open_tiers, wait_until_closed
from hf_lohan.files import StoreInUseError
from hf_lohan.files.directories import keep_from_others
from hf_lohan.huggingface.offloaded_model import activations_kept_if_needed, open_engines, refuse_chunks
from hf_lohan.huggingface.ranks import (
    at_stores,
    check_layout,
    check_sequence_ranks,
    links_to_other_ranks,
    refuse_changed,
)
from hf_lohan.model import experts_as_stored, owners_as_stored
from hf_lohan.planning import OffloadLayout, lay_out
from hf_lohan.planning.layout import resolved_here
from hf_lohan.ranks import Links
from hf_lohan.threads import keep_freed_memory, set_compute_threads
from hf_lohan.timeline import Timeline

logger = logging.getLogger(__name__)


@dataclass
class Launch:
    """The settings for models that a script creates."""

    settings: OffloadConfig = field(default_factory=OffloadConfig)
    has_offloaded: bool = False
    """Whether any model was offloaded."""


_launch = Launch()


@contextlib.contextmanager
def launched_with(config: OffloadConfig) -> Iterator[Launch]:
    """In this context, models that a script creates are offloaded with these settings. The script's own settings,
    except `trace`, have precedence, and a warning says so."""
    global _launch
    before, _launch = _launch, Launch(config)
    try:
        yield _launch
    finally:
        before.has_offloaded |= _launch.has_offloaded
        _launch = before


def settings_given(offload: Any) -> OffloadConfig:
    """Load a script's settings. Warns if they replace the settings of `lohan launch`."""
    config, launched = OffloadConfig.load(offload), _launch.settings
    if replace(launched, trace=False) not in (OffloadConfig(), replace(config, trace=False)):
        logger.warning("the script has its own offload settings, so `lohan launch --offload` is ignored")
    return config


@dataclass(frozen=True)
class LocalRun:
    """A run in this process. All ranks call its methods together."""

    settings: ResolvedConfig
    """The resolved settings, with the folders of this rank's store."""
    device: Device
    found: RunStores
    """The stores that were found at the ssd paths."""
    links: Links

    @classmethod
    def begin(
        cls,
        offload: Any,
        torch_device: torch.device | str | None,
        default_ssd_path: str | Path,
        device: Device | None = None,
    ) -> LocalRun:
        """Open ``torch_device`` (None is the GPU, or else the CPU), or use ``device``. Resolve the settings. With
        `trace` the device's timeline starts recording. Raises ValueError if no run can begin with these settings, paths
        and stores."""
        settings = offload if isinstance(offload, OffloadConfig) else settings_given(offload)
        keep_from_others()
        if device is None:
            is_tracing = settings.trace or _launch.settings.trace
            device = device_for(torch_device or default_torch_device(), Timeline(is_tracing=is_tracing))
        links = links_to_other_ranks()
        check_sequence_ranks(settings.ranks.per_row, links.ranks)
        settings, found = at_stores(settings, default_ssd_path, links)
        settings = replace(settings, trace=device.timeline.is_tracing)
        return cls(resolved_here(settings, device, default_ssd_path, links), device, found, links)

    def fit(
        self, model: nn.Module, settings: ResolvedConfig, **how: Any
    ) -> tuple[ResolvedConfig, Callable[[Any], OffloadLayout]]:
        """Adapt the settings to a model, real or on the meta device. Return them, and the function that lays out this
        model or equal models. ``how``: as for `lay_out`. Raises ValueError if the settings do not fit the model."""
        settings = activations_kept_if_needed(model, settings)
        refuse_chunks(model, settings)
        settings = experts_as_stored(model, settings, self.links)
        return settings, partial(
            lay_out,
            config=settings,
            memory_is_host=self.device.memory_is_host,
            ranks=self.links.ranks,
            owners=owners_as_stored(model, settings, self.links),
            **how,
        )

    @contextlib.contextmanager
    def tiers(
        self, layout: OffloadLayout, settings: ResolvedConfig, *, is_beside_others: bool = False
    ) -> Iterator[Tiers]:
        """Open the tiers, and set up threads and memory. An error in this context closes the tiers.

        If another engine in this process (such as the engine of an earlier Trainer in a notebook) has the store open
        for the same model, close it first. ``is_beside_others``: whether there may also be stores of another number of
        ranks, because this run may continue from them.
        """
        _check_experts(layout, settings)
        folders = [ssd.path for ssd in settings.ssd]
        check_layout(layout, folders, self.found, self.links, is_beside_others=is_beside_others)
        tiers = self._open_or_take_over(layout, settings)
        try:
            refuse_changed(self.found, tiers.links)  # from now on, the lock keeps other processes from resharding
            yield tiers
        except BaseException:
            tiers.close()
            raise
        _launch.has_offloaded = True

    def _open_or_take_over(self, layout: OffloadLayout, settings: ResolvedConfig) -> Tiers:
        folders = {os.path.realpath(ssd.path) for ssd in settings.ssd}
        if self.links.ranks.others:  # with two models, ranks would have no common order of loads
            for engine in open_engines():
                if not folders & engine.store_folders:
                    raise ValueError(
                        f"several ranks can offload only one model, but {type(engine.model).__name__} is already "
                        "offloaded; close it first (engine_of(model).close()), or, for a reference model of TRL, train "
                        "adapters or set precompute_ref_log_probs=True and run in one process"
                    )
        set_compute_threads(settings.cpu_threads)
        keep_freed_memory()
        try:
            return open_tiers(layout, settings, self.device, self.links)
        except StoreInUseError:
            holders = [engine for engine in open_engines() if folders & engine.store_folders]
            if any(engine.layout.identity != layout.identity for engine in holders):
                raise
            for engine in holders:
                logger.warning(
                    "closing the engine of an earlier model in this process, because a new engine uses its store"
                )
                engine.close()
            wait_until_closed()  # waits for engines of models that were just deleted
            return open_tiers(layout, settings, self.device, self.links)


def _check_experts(layout: OffloadLayout, config: ResolvedConfig) -> None:
    """Raise ValueError for settings that cannot be combined with experts that stream one by one."""
    if layout.model_blocks.experts and config.chunks.layers not in (False, "auto"):
        raise ValueError(
            f"chunks.layers: {config.chunks.layers} would load each expert again for every chunk, because experts "
            "stream one by one; set chunks.layers: false, or experts: with_layer"
        )
    if layout.model_blocks.experts and config.ranks.per_row > 1:
        raise ValueError(
            f"ranks.per_row: {config.ranks.per_row} divides the tokens of rows among ranks, but the experts of this "
            "model stream one by one; set experts: with_layer, or leave ranks.per_row out"
        )
