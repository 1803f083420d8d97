"""Renew what the documents quote of the program: answers of `lohan plan` and the list of settings.

    python scripts/development/renew_docs.py
An answer stands in a code block behind its command, `$ lohan plan ...`. What it quotes are the lines that
`shortened` leaves or, behind `# begins:`, those of `beginning`. `docs/settings.md` is made of `OffloadConfig` alone.
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

from hf_lohan.cli import app
from hf_lohan.config import OffloadConfig

DOCS = Path(__file__).resolve().parents[2] / "docs"
QUOTED = re.compile(r"^```\n\$ (lohan plan [^\n]*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
_BEGINS = "# begins:"
_WIDTH = 110

SETTINGS_HEAD = """# Settings, one by one

Made from `OffloadConfig` by `scripts/development/renew_docs.py`; how to write a configuration, with examples, is in
[Configuration](configuration.md). Sizes are bytes, or text such as `24GiB` and `24GB`.

| setting | type | default |
|---|---|---|
"""


def quoted_plans(text: str) -> Iterator[tuple[str, str]]:
    """(command, what is quoted of its answer) for each plan in a document."""
    for match in QUOTED.finditer(text):
        yield match[1], match[2]


def answer(command: str) -> str:
    """What a document quotes of the answer to `lohan ...`."""
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, shlex.split(command, comments=True)[1:])
    if result.exit_code == 0:
        return beginning(result.stdout) if command.endswith(_BEGINS) else shortened(result.stdout)
    if result.exit_code != 2:
        raise RuntimeError(f"{command} ended with {result.exit_code}: {result.exception!r} {result.stderr}")
    return "\n".join(textwrap.wrap(result.stderr, _WIDTH, break_on_hyphens=False)) + "\n"


def shortened(printed: str) -> str:
    """What it is of, the step, what several nodes send, the bytes on each tier, the wear and what hides."""
    lines = [line.rstrip() for line in printed.splitlines()]
    tiers = next(number for number, line in enumerate(lines) if line.startswith("bytes on"))
    start = next((number for number, line in enumerate(lines) if line.startswith("one node sends")), tiers)
    stop = next(number for number, line in enumerate(lines) if number > tiers and not line)
    below = (line for line in lines if line.startswith(("A step writes", "Behind computing hide")))
    kept = [*lines[:4], "", *lines[start:stop], *(["", line] for line in below)]
    return "\n".join(text for one in kept for text in ([one] if isinstance(one, str) else one)) + "\n"


def beginning(printed: str) -> str:
    """What it is of, the step, and how long each resource is busy."""
    lines = [line.rstrip() for line in printed.splitlines()]
    return (
        "\n".join(lines[: next(number for number, line in enumerate(lines) if line.startswith("bytes on"))]).rstrip()
        + "\n"
    )


def with_answers(text: str) -> str:
    """A document with all plans renewed."""
    return QUOTED.sub(lambda match: f"```\n$ {match[1]}\n{answer(match[1])}```", text)


def settings_page() -> str:
    """`docs/settings.md`: each field of `OffloadConfig` with its type, its default and what is said below it."""
    kinds = {name: annotation for name, (annotation, _) in _said().items()}
    defaults = OffloadConfig().to_dict()
    rows = [f"| [`{name}`](#{name}) | {_type(kinds[name])} | `{default}` |" for name, default in defaults.items()]
    sections = [f"## {name}\n\n{_as_markdown(text)}\n" for name, (_, text) in _said().items()]
    return SETTINGS_HEAD + "\n".join(rows) + "\n\n" + "\n".join(sections)


def _said() -> dict[str, tuple[str, str]]:
    """(annotation, docstring) by field, in order."""
    body = ast.parse(textwrap.dedent(inspect.getsource(OffloadConfig))).body[0]
    assert isinstance(body, ast.ClassDef)
    said = {}
    for field, doc in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant), (
                f"{field.target.id} is not explained"
            )
            said[field.target.id] = ast.unparse(field.annotation), str(doc.value.value)
    return said


def _type(annotation: str) -> str:
    """As somebody writes it who fills in a YAML file."""
    import hf_lohan.config.offload_config as module

    choices = getattr(module, annotation, None)
    if choices is not None and hasattr(choices, "__args__"):
        return " \\| ".join(f"`{choice}`" for choice in choices.__args__)
    words = {
        "Literal['auto']": "`auto`",
        "tuple[SsdPath, ...]": "path, list of paths or of {path, capacity}",
        "Collectives": "`exact` \\| `quantized` \\| {forward, backward, gradients}",
    }
    parts = [words.get(part, part) for part in annotation.split(" | ")]
    return " \\| ".join("true or false" if part == "bool" else part for part in parts)


def _as_markdown(text: str) -> str:
    text = re.sub(r'"(\w+)"', r"`\1`", " ".join(text.split()))
    return text.removesuffix(":")


def main() -> None:
    """Write what has changed."""
    for document in sorted(DOCS.rglob("*.md")):
        text = document.read_text(encoding="utf-8")
        if QUOTED.search(text):
            document.write_text(with_answers(text), encoding="utf-8")
    (DOCS / "settings.md").write_text(settings_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
