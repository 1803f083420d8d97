"""Renew the parts of the documents that come from the program: answers of `lohan plan`, README's table and the
settings.

    python scripts/development/renew_docs.py
A quoted answer follows its command, `$ lohan plan ...`, in a code block. It is shortened by `shortened`, or by
`beginning` if the command ends in `# begins:`. The README's table is between two markers. `docs/settings.md` is made
from `OffloadConfig`.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import typer
from typer.testing import CliRunner

import hf_lohan.config.offload_config as settings_module
import hf_lohan.config.tables as tables_module
from hf_lohan.cli import app, plan_report
from hf_lohan.cli.plan_request import OtherMachine, PlanRequest, plan_run
from hf_lohan.config import OffloadConfig
from hf_lohan.config.offload_config import TABLES
from hf_lohan.hardware import read_hardware
from hf_lohan.planning import LongestRow

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
QUOTED = re.compile(r"^```\n\$ (lohan plan [^\n]*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
TABLE = re.compile(r"(<!-- begin: renew_docs.py -->\n).*?(<!-- end -->\n)", flags=re.DOTALL)
_BEGINS = "# begins:"
_WIDTH = 110

DESKTOP = ROOT / "configs" / "hardware" / "rtx4090_desktop.yaml"
FITS: tuple[tuple[str, str, tuple[int, int, int], dict[str, Any]], ...] = (
    ("Llama-3.1-8B", "llama-3.1-8b", (8, 1024, 8), {}),
    ("Qwen2.5-7B", "qwen2.5-7b", (16, 1024, 32), {}),
    ("Llama-2-13B", "llama-2-13b", (8, 1024, 8), {}),
    ("Qwen3-14B", "qwen3-14b", (8, 1024, 8), {}),
    ("Qwen3-30B-A3B", "qwen3-30b-a3b", (8, 1024, 8), {}),
    ("Qwen3-32B", "qwen3-32b", (8, 1024, 8), {}),
    ("Qwen3-32B", "qwen3-32b", (8, 1024, 8), {"lora_rank": 16}),
    ("Llama-3.1-70B", "llama-3.1-70b", (8, 1024, 8), {"lora_rank": 16}),
    ("Llama-3.1-70B", "llama-3.1-70b", (8, 1024, 8), {"lora_rank": 16, "quantize": "nf4"}),
)
"""The README's rows: (name, folder in `configs/models`, (batch size, tokens of a row, accumulation), more of
`PlanRequest`)."""
STATES: tuple[tuple[tuple[str, Any], ...], ...] = (
    (),
    (("optimizer_state_dtype", "int8"),),
    (("stochastic_rounding", True),),
)
"""The settings of the README's columns, each with 64 GB and 128 GB of RAM."""
COLUMNS = (
    *("model", "training", "tokens a step", "SSD"),
    *("64 GB: exact", "int8", "stochastic", "128 GB: exact", "int8", "stochastic"),
)

SETTINGS_HEAD = """# Settings, one by one

Made from `OffloadConfig` by `scripts/development/renew_docs.py`. [Configuration](configuration.md) says which settings
to look at first. Sizes are bytes, or text such as `24GiB` and `24GB`. `experts.lazy` is the key `lazy` of the table
`experts`. Write it as `experts: {lazy: true}` or as `experts.lazy: true`.

| setting | type | default |
|---|---|---|
"""


def invoke(command: str) -> Any:
    with mock.patch.object(plan_report, "longest_row_of", return_value=LongestRow(0, is_longest_tried=False)):
        return _invoke(command)  # no quote has the longest row, which takes four more plans


def _invoke(command: str) -> Any:
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, shlex.split(command, comments=True)[1:])


# Answers of `lohan plan`.


def quoted_plans(text: str) -> Iterator[tuple[str, str]]:
    """Return (command, quoted answer) of each plan in a document."""
    for match in QUOTED.finditer(text):
        yield match[1], match[2]


def answer(command: str) -> str:
    """Return the part of the answer to `lohan ...` that a document quotes."""
    result = invoke(command)
    if result.exit_code == 0:
        return beginning(result.stdout) if command.endswith(_BEGINS) else shortened(result.stdout)
    if result.exit_code != 2:
        raise RuntimeError(f"{command} ended with {result.exit_code}: {result.exception!r} {result.stderr}")
    return "\n".join(textwrap.wrap(result.stderr, _WIDTH, break_on_hyphens=False)) + "\n"


def shortened(printed: str) -> str:
    """Return the lines with model and machine, the step, and the bytes that a node sends; or of one device the bytes on
    each tier, the wear, and T*."""
    lines = [line.rstrip() for line in printed.splitlines()]
    tiers = next(number for number, line in enumerate(lines) if line.startswith("bytes on"))
    sends = next((number for number, line in enumerate(lines) if "sends in a step" in line), None)
    if sends is not None:
        return "\n".join((*lines[:4], "", *lines[sends:tiers])).rstrip() + "\n"
    stop = next(number for number, line in enumerate(lines) if number > tiers and not line)
    below = (line for line in lines[stop:] if line.startswith("A step writes") or re.search(r"\bhides?\b", line))
    kept = [*lines[:4], "", *lines[tiers:stop], *(text for line in below for text in ("", line))]
    return "\n".join(kept) + "\n"


def beginning(printed: str) -> str:
    """Return the lines with model and machine, the step, and the busy times of resources."""
    lines = [line.rstrip() for line in printed.splitlines()]
    tiers = next(number for number, line in enumerate(lines) if line.startswith("bytes on"))
    return "\n".join(lines[:tiers]).rstrip() + "\n"


def with_answers(text: str) -> str:
    """Return a document with all plans renewed."""
    return QUOTED.sub(lambda match: f"```\n$ {match[1]}\n{answer(match[1])}```", text)


# The README's table.


def fits_table() -> str:
    """Return a table with one row for each entry of `FITS`."""
    lines = [f"| {' | '.join(COLUMNS)} |\n", f"|{'---|' * len(COLUMNS)}\n"]
    machine = read_hardware(str(DESKTOP))
    for name, folder, (batch_size, length, count), more in FITS:
        model = str(ROOT / "configs" / "models" / folder)
        request = PlanRequest(
            model=model,
            batch_size=batch_size,
            sequence_length=length,
            num_micro_batches=count,
            hardware=str(DESKTOP),
            **more,
        )
        rates = []
        for ram_factor, settings in itertools.product((1, 2), STATES):
            if settings and more:  # adapters have small states
                rates.append("")
                continue
            step = plan_run(request, OtherMachine(machine, settings, ram_factor)).plan.prediction
            rates.append(f"{step.tokens_per_s:,.0f}" if step.fits else "does not fit")
            if len(rates) == 1:
                ssd_gib = sum(step.tier_bytes["ssd"].values()) / 2**30
        training = "all weights" if not more else "LoRA" if "quantize" not in more else "LoRA over NF4"
        tokens = batch_size * length * count
        lines.append(f"| {name} | {training} | {tokens:,} | {ssd_gib:.0f} GiB | {' | '.join(rates)} |\n")
    return "".join(lines)


def with_table(text: str) -> str:
    return TABLE.sub(lambda match: match[1] + fits_table() + match[2], text)


# The settings.


def settings_page() -> str:
    """Return `docs/settings.md`, with each field of `OffloadConfig` and of its tables, its type, default and
    docstring."""
    defaults, tables = OffloadConfig().to_dict(), {of.NAME: of for of in TABLES}
    lines, sections = [], []
    for name, (annotation, text) in explained_fields(OffloadConfig).items():
        if name not in defaults:
            continue
        sections.append(f"## {name}\n\n{_as_markdown(text)}\n")
        kind, default = _type(annotation), f"`{defaults[name]}`"
        if name in tables:
            keys = explained_fields(tables[name])
            kind, default = f"a table of {', '.join(f'`{key}`' for key in keys)}", ""
            for key, (of_key, text_of_key) in keys.items():
                about = f"{_type(of_key, ' or ')}; default `{defaults[name][key]}`"
                sections.append(f"### {name}.{key}\n\n{about}\n\n{_as_markdown(text_of_key)}\n")
        lines.append(f"| [`{name}`](#{name}) | {kind} | {default} |")
    return SETTINGS_HEAD + "\n".join(lines) + "\n\n" + "\n".join(sections)


def explained_fields(of: type) -> dict[str, tuple[str, str]]:
    """Return (annotation, docstring) by field, in order."""
    body = ast.parse(textwrap.dedent(inspect.getsource(of))).body[0]
    assert isinstance(body, ast.ClassDef)
    fields = {}
    for field, doc in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant), (
                f"{field.target.id} has no docstring"
            )
            fields[field.target.id] = ast.unparse(field.annotation), str(doc.value.value)
    return fields


def _type(annotation: str, separator: str = " \\| ") -> str:
    """Return a field's type as the user of a YAML file writes it."""
    choices = getattr(tables_module, annotation, getattr(settings_module, annotation, None))
    if choices is not None and hasattr(choices, "__args__"):
        return separator.join(f"`{choice}`" for choice in choices.__args__)
    words = {
        "bool": "true or false",
        "Literal[False]": "`false`",
        "Literal['auto']": "`auto`",
        "tuple[SsdPath, ...]": "path, list of paths or of {path, capacity}",
        "Collectives": separator.join(("`exact`", "`quantized`", "{forward, backward, gradients, within}")),
        "Quantization": separator.join(
            ("`auto`", "`none`", "`nf4`", "`fp4`", "`int8`", "{method, double, block, skip}")
        ),
    }
    return separator.join(words.get(part, part) for part in annotation.split(" | "))


def _as_markdown(text: str) -> str:
    text = re.sub(r'"(\w+)"', r"`\1`", " ".join(text.split()))
    return text.removesuffix(":")


def main() -> None:
    """Renew the parts of the documents that come from the program. Takes minutes."""
    for document in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))):
        text = document.read_text(encoding="utf-8")
        document.write_text(with_table(with_answers(text)), encoding="utf-8")
    (DOCS / "settings.md").write_text(settings_page(), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
