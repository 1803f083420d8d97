"""Whether experts come one by one where a store of the model is there already: as the records in it were cut."""

from __future__ import annotations

import logging
from dataclasses import replace

from torch import nn

from hf_lohan.config import OffloadConfig
from hf_lohan.config.offload_config import Experts
from hf_lohan.files import ForeignStoreError
from hf_lohan.model import find_experts
from hf_lohan.ranks import Ranks
from hf_lohan.store import ModelIdentity
from hf_lohan.store.manifest import read_manifest

logger = logging.getLogger(__name__)

_WORDS = {"streamed": "come one by one", "with_layer": "come with their layers"}


def experts_as_stored(model: nn.Module, config: OffloadConfig, ranks: Ranks) -> OffloadConfig:
    """The configuration with `experts: auto` as the store in its paths has them, and a log line. `config` must be
    resolved. Raises ForeignStoreError where something else was asked for than a store of this model class has."""
    found = find_experts(model) if ranks.num_ranks == 1 else {}
    manifest = read_manifest(config.ssd[0].path) if found and config.ssd != "auto" else None
    if manifest is None or not _is_of(manifest.model, model):  # whoever opens it says what it is
        return config
    blocks = {record.block for record in manifest.layout.records}
    stored: Experts = "streamed" if all(f"{name}.0" in blocks for name in found) else "with_layer"
    if config.experts == stored:
        return config
    assert config.ssd != "auto"
    directory = config.ssd[0].path
    if config.experts != "auto":
        raise ForeignStoreError(
            f"{directory} holds a store of this model whose experts {_WORDS[stored]}, and experts: {config.experts} "
            f"was asked for; set experts to auto or {stored} to go on from there, or choose another directory and "
            "resume from a checkpoint, which goes with either"
        )
    logger.info("experts %s, as in the store in %s", _WORDS[stored], directory)
    return replace(config, experts=stored)


def _is_of(identity: ModelIdentity, model: nn.Module) -> bool:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return (identity.model_class, identity.num_parameters) == (type(model).__name__, num_parameters)
