"""Without annexes the core imports and trains, and what needs one is refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from python_runs import run_python

import hf_lohan.annexes

ANNEXES = sorted(path.parent.name for path in Path(hf_lohan.annexes.__file__).parent.glob("*/__init__.py"))
CODE = """
import json, sys

class Removed:
    names = set(sys.argv[2:])

    def find_spec(self, name, path=None, target=None):
        if name.startswith("hf_lohan.annexes.") and name.split(".")[2] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

removed = Removed()
sys.meta_path.insert(0, removed)

import hf_lohan.cli, hf_lohan.huggingface, hf_lohan.testing.models  # without any annex
from hf_lohan.checkpoint.generations import resharding_for
from hf_lohan.config import OffloadConfig
from hf_lohan.huggingface.attachment import offload_model
from hf_lohan.optim import OffloadAdamW
from hf_lohan.testing.models import tiny_batch, tiny_model

def train(folder):
    config = OffloadConfig.load({"cpu_memory": "16MiB", "gpu_memory": "1MiB", "ssd": f"{folder}/store"})
    model = tiny_model("llama", num_layers=1)
    before = model.lm_head.weight.detach().clone()
    engine = offload_model(model, config, torch_device="cpu", default_ssd_path=folder)
    model(**tiny_batch()).loss.backward()
    OffloadAdamW(model.parameters(), engine=engine).step()
    with hf_lohan.gathered_parameters(model.lm_head.weight):
        has_changed = not model.lm_head.weight.equal(before)
    engine.close()
    return has_changed

def refusal(ask):
    try:
        ask()
    except ValueError as error:
        return str(error)

NEEDS = {
    "embedding_rows": lambda: OffloadConfig(embedding="rows"),
    "gpu_direct": lambda: OffloadConfig(gpu_direct=True),
    "resharding": lambda: resharding_for("lohan reshard"),
    "studies": lambda: OffloadConfig.load(_solver="migration"),
}
trains = train(sys.argv[1]) and not any(name.startswith("hf_lohan.annexes.") for name in sys.modules)
found = {"trains": trains, "refusals": {}}
for annex, ask in NEEDS.items():
    removed.names = {annex}
    found["refusals"][annex] = refusal(ask)
print(json.dumps(found))
"""


def test_an_annex_that_cannot_be_imported_is_not_taken_for_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks_scipy(name: str) -> None:
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

    monkeypatch.setattr(hf_lohan.annexes.importlib, "import_module", lacks_scipy)
    with pytest.raises(ModuleNotFoundError, match="scipy"):
        hf_lohan.annexes.find_annex("studies")


def test_the_core_does_without_annexes(tmp_path: Path) -> None:
    """It trains without any, and refuses what needs the one that is missing."""
    found = json.loads(run_python("-c", CODE, tmp_path, *ANNEXES).stdout)
    assert found["trains"]
    for annex, refusal in found["refusals"].items():
        assert refusal.partition(" needs ")[2] == (
            f"the package hf_lohan.annexes.{annex}, which is not installed; install hf-lohan again, or leave it out"
        )
