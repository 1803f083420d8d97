"""The tables of a report: rows of cells, from what a run was told and ran on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hf_lohan.config import format_bytes, setting_rows
from hf_lohan.report.findings import Findings
from hf_lohan.report.wording import count, rate, seconds

Row = tuple[str, ...]


def comparison(findings: Findings) -> Iterator[Row]:
    """What was planned, what was measured, and the floor."""
    planned: Mapping[str, Any] = findings.summary.get("prediction") or {}
    floor = findings.floor
    if findings.step_s:
        corrected = f", then {seconds(findings.corrected_s)}" if findings.corrected_s else ""
        predicted = seconds(findings.predicted_s) + corrected if findings.predicted_s else "-"
        yield "a step", predicted, seconds(findings.step_s), seconds(floor[1]) if floor else "-"
    tokens = findings.tokens_per_s
    if tokens:
        tokens_floor = f"{planned['num_tokens'] / floor[1]:.4g}" if floor and planned else "-"
        yield "tokens a second", f"{planned['tokens_per_s']:.4g}" if planned else "-", f"{tokens:.4g}", tokens_floor
    for label, name in (("read from the SSDs a step", "read"), ("written to the SSDs a step", "write")):
        moved = findings.mean_of(f"ssd_{name}_bytes")
        if moved is not None:
            expected = format_bytes(planned[f"ssd_{name}_bytes_per_step"]) if planned else "-"
            yield label, expected, format_bytes(moved), "-"


def hardware(findings: Findings) -> Iterator[Row]:
    """The device as it names itself, and the rates that were measured."""
    facts: Mapping[str, Any] = findings.summary.get("hardware") or {}
    measured: Mapping[str, Any] = findings.summary.get("measured_hardware") or {}
    device, cpu = measured.get("device", {}), measured.get("cpu", {})
    name = device.get("name") or facts.get("name")
    if name:
        yield "device", f"{name} ({facts['kind']})" if facts.get("kind") else str(name)
    for label, value in facts.items():
        if label not in ("kind", "name"):
            yield _words(label), format_bytes(value) if label.endswith("_bytes") else str(value)
    if "flops_per_s" in device:
        yield "matrix products", rate(device["flops_per_s"], "FLOP")
    for label, name in (("copies to the device", "h2d_bytes_per_s"), ("copies from the device", "d2h_bytes_per_s")):
        if name in measured:
            yield label, rate(measured[name], "B")
    for ssd in measured.get("ssd", ()):
        speeds = f"reads {rate(ssd['read_bytes_per_s'], 'B')}, writes {rate(ssd['write_bytes_per_s'], 'B')}"
        yield f"SSD {ssd.get('path', '')}".rstrip(), speeds
    if "optimizer_params_per_s" in cpu:
        yield "AdamW on the CPU", f"{count(cpu['optimizer_params_per_s'])} parameters/s"
    for package, version in (findings.summary.get("versions") or {}).items():
        yield package, str(version)


def config(findings: Findings) -> Iterator[Row]:
    """The resolved settings."""
    settings = findings.run.config or findings.summary.get("config") or {}
    yield from setting_rows(settings)


def _words(name: str) -> str:
    """ "host_memory_bytes" -> "host memory"."""
    return name.removesuffix("_bytes").replace("num_", "").replace("_", " ")
