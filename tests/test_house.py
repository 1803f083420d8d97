"""The rules of the code base, such as which rooms may import each other, checked by reading the source.
`docs/architecture.md` draws the floors, and CONTRIBUTING.md explains them. A room that does not exist yet is allowed.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from covering import slow_but
from python_runs import run_python

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_lohan"

FLOORS = {
    **dict.fromkeys(("annexes", "compat", "timeline", "wording"), -2),
    "costs": -1,
    **dict.fromkeys(("config", "threads"), 0),
    **dict.fromkeys(("device", "files", "optim", "quantize", "report"), 1),
    **dict.fromkeys(("ranks", "store"), 2),
    "hardware": 3,
    **dict.fromkeys(("activations", "model"), 4),
    "planning": 5,
    **dict.fromkeys(("absent", "updates"), 6),
    "weights": 7,
    **dict.fromkeys(("experts", "micro_batches"), 8),
    "engine": 9,
    "checkpoint": 10,
    "record": 10,
    "huggingface": 11,
    "cli": 12,
}
ANNEXES = {path.parent.name for path in PACKAGE.glob("annexes/*/__init__.py")}
"""Parts that the floors do without: they may import all rooms, and nothing imports them."""
RESTRICTED = {
    "annexes": set[str](),
    "compat": set[str](),
    "config": {"annexes", "costs", "wording"},
    "costs": {"wording"},
    "threads": set[str](),
    "files": {"threads", "timeline", "wording"},
    "store": {"compat", "device", "files", "threads", "timeline", "wording"},
    "ranks": {"compat", "device", "files", "costs", "threads", "timeline", "wording"},
    "optim": {"compat", "wording"},
    "quantize": {"costs"},
    "report": {"config", "timeline", "wording"},
}
"""Rooms that may not use all floors below their own."""

PACKAGES_FLOOR_0_AND_1 = {
    "timeline": set[str](),
    "wording": set[str](),
    "config": {"yaml"},
    "costs": {"numpy"},
    "threads": {"torch"},
    "device": {"torch", "psutil", "triton"},
    "files": {"torch", "numpy", "kvikio"},
    "store": {"torch", "numpy", "safetensors", "xxhash"},
    "ranks": {"numpy", "psutil", "torch", "triton"},
    "optim": {"torch"},
    "quantize": {"torch", "triton"},
    "report": set[str](),
}
"""The only packages outside the standard library that the lowest floors may use."""

HUGGING_FACE = {"transformers", "accelerate", "peft", "trl", "diffusers", "huggingface_hub"}
HUGGING_FACE_COMPAT = {"transformers_conversions", "transformers_private", "accelerate_private", "trl_private"}
PRIVATE_NAMES = {
    # accelerate's
    "_is_accelerate_prepared", "_models",
    # transformers'
    "_can_set_experts_implementation", "_from_config", "_globalstep_last_logged", "_gradient_checkpointing_func",
    "_hf_hook", "_is_hf_initialized", "_n_gpu", "_set_gradient_checkpointing", "_total_loss_scalar", "_tr_loss",
    "HF_DEACTIVATE_ASYNC_LOAD",
    # TRL's
    "_buffered_inputs", "_last_world_entropy", "_total_train_tokens",
    # torch's
    "_C", "_backward_hooks", "_buffers", "_cdata", "_execution_engine", "_forward_hooks", "_forward_pre_hooks",
    "_fused_adam_", "_fused_adamw_", "_is_mkldnn_bf16_supported", "_modules", "_opname", "_opt_called", "_parameters",
    "_schema", "_sequence_nr", "_version",
}  # fmt: skip
"""Private names of other libraries, which only `compat` may use."""
OTHERS_PRIVATE_MODULE = re.compile(r"(torch|transformers|accelerate|trl)\.(\w+\.)*_[a-z]")
MACHINE_PATH = re.compile(r"(?<![\w.~$}{)/-])/(?:root|home/\w|Users/\w|work/|opt/pypi|opt/wheels|tmp/\w)")


def source_files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def room_of(path: Path) -> str:
    """Return the room of a file. The room of a module at the top of the package is its own name, and that of a file in
    an annex is "annexes/" and the annex."""
    inside = path.relative_to(PACKAGE).parts
    return "/".join(inside[: 2 if inside[0] == "annexes" and len(inside) > 2 else 1]).removesuffix(".py")


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the dotted names of all imports in a file. `from x import y` gives "x.y"."""
    here = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*here[: len(here) - node.level]] if node.level else []
            base += node.module.split(".") if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)


def imported_rooms(path: Path) -> set[str]:
    """Return the rooms that a file uses. Names of `hf_lohan` itself, such as Trainer, belong to huggingface."""
    rooms = set()
    for name in imported_modules(path):
        first, _, rest = name.partition(".")
        if first == PACKAGE.name and rest != "__version__":
            room, _, inside = rest.partition(".")
            if room == "annexes" and (annex := inside.partition(".")[0]) in ANNEXES:
                room = f"annexes/{annex}"
            known = room in FLOORS or room.startswith(("annexes/", "testing")) or (PACKAGE / f"{room}.py").exists()
            rooms.add(room if known else "huggingface")
    return rooms - {room_of(path)}


def imported_packages(path: Path) -> set[str]:
    tops = {name.partition(".")[0] for name in imported_modules(path)}
    return tops - set(sys.stdlib_module_names) - {PACKAGE.name}


def allowed_rooms(room: str) -> set[str]:
    if room == "testing":
        return {other for other, floor in FLOORS.items() if floor <= 2}
    if room not in FLOORS:  # an annex, or a module at the top of the package, such as run.py
        return set(FLOORS)
    return RESTRICTED.get(room, {other for other, floor in FLOORS.items() if floor < FLOORS[room]})


def report(offences: list[str]) -> None:
    assert not offences, "\n" + "\n".join(offences)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_every_room_is_on_a_floor() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert rooms <= {*FLOORS, "testing"}, "add the new room to FLOORS and to docs/architecture.md"


def test_imports_go_down_only() -> None:
    offences = []
    for path in source_files():
        for room in sorted(imported_rooms(path) - allowed_rooms(room_of(path))):
            offences.append(f"{name_of(path)} imports {room}, which {room_of(path)} may not")
    report(offences)


def test_the_two_lowest_floors_use_few_packages() -> None:
    offences = []
    for path in source_files():
        allowed = PACKAGES_FLOOR_0_AND_1.get(room_of(path))
        if allowed is not None and (extra := imported_packages(path) - allowed):
            offences.append(f"{name_of(path)} imports {', '.join(sorted(extra))}")
    report(offences)


def test_only_huggingface_imports_hugging_face() -> None:
    offences = []
    for path in source_files():
        room, names = room_of(path), list(imported_modules(path))
        compat = {f"compat.{name}" for name in HUGGING_FACE_COMPAT for used in names if f".compat.{name}" in used}
        may = room in ("huggingface", "testing", "trl", "annexes/axolotl") or path.stem in HUGGING_FACE_COMPAT
        if not may and (found := imported_packages(path) & HUGGING_FACE):
            offences.append(f"{name_of(path)} imports {', '.join(sorted(found))}")
        if compat and room not in ("huggingface", "checkpoint", "record"):
            offences.append(f"{name_of(path)} imports {', '.join(sorted(compat))}")
    report(offences)


def test_only_compat_uses_private_attributes_of_other_libraries() -> None:
    offences = []
    for path in source_files():
        if room_of(path) == "compat":
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and node.attr in PRIVATE_NAMES:
                if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                    offences.append(f"{name_of(path)}:{node.lineno}: .{node.attr}")
            elif isinstance(node, ast.Constant) and node.value in PRIVATE_NAMES:
                offences.append(f"{name_of(path)}:{node.lineno}: {node.value!r}")
        hidden = [name for name in imported_modules(path) if OTHERS_PRIVATE_MODULE.match(name)]
        offences += [f"{name_of(path)} imports {name}" for name in hidden]
    report(offences)


def test_only_device_names_torch_cuda() -> None:
    offences = []
    for path in source_files():
        if room_of(path) == "device":
            continue
        named = [
            node.lineno
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Attribute)
            and node.attr == "cuda"
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        ]
        imported = [name for name in imported_modules(path) if f"{name}.".startswith("torch.cuda.")]
        offences += [f"{name_of(path)}: torch.cuda ({where})" for where in (*named, *imported)]
    report(offences)


def test_the_lock_of_a_condition_is_entered_and_not_the_condition() -> None:
    """An interrupt may stop `Condition.__enter__` and `__exit__`, which are Python code, while they hold the lock,
    which then stays locked forever. A lock's own `__enter__` and `__exit__` are C code, which an interrupt cannot stop
    halfway."""
    offences = []
    for path in source_files():
        conditions = set()
        for node in ast.walk(tree_of(path)):
            match node:
                case ast.Assign(targets=[ast.Attribute(attr=name)], value=ast.Call(func=function, args=args)):
                    if ast.unparse(function).endswith("Condition"):
                        conditions.add(name)
                        offences += [f"{name_of(path)}:{node.lineno}: a condition without a lock"] if not args else []
                case ast.withitem(context_expr=ast.Attribute(attr=name) as entered) if name in conditions:
                    offences.append(f"{name_of(path)}:{entered.lineno}: enters condition {name}")
    report(offences)


def importers() -> dict[Path, set[Path]]:
    """Return, for each file, the files that import it. If a file imports a name from a room's `__init__.py`, it
    counts as importing the file that defines the name."""
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in source_files()}
    defined_in: dict[str, str] = {}
    for module, path in paths.items():
        if path.name == "__init__.py":
            for name in imported_modules(path):
                source, _, offered = name.rpartition(".")
                defined_in[f"{module.removesuffix('__init__')}{offered}"] = source
    users: dict[Path, set[Path]] = {path: set() for path in paths.values()}
    for path in paths.values():
        if path.name == "__init__.py":
            continue
        for name in imported_modules(path):
            for _ in range(3):  # the depth of re-exports
                source = defined_in.get(name)
                name = name if source is None else f"{source}.{name.rpartition('.')[2]}"
            for module in (name, name.rpartition(".")[0]):
                if paths.get(module, path) != path:
                    users[paths[module]].add(path)
    return users


def test_no_files_import_each_other() -> None:
    """Imports in functions and under TYPE_CHECKING count, because a reader of one file needs the others as well."""
    try:
        TopologicalSorter(importers()).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' imports '.join(map(name_of, error.args[1]))}")


LINES = Path(__file__).with_name("house_lines.json")
"""The most lines of each room."""
SLACK_LINES = 100


def test_rooms_do_not_grow() -> None:
    most: dict[str, int] = json.loads(LINES.read_text(encoding="utf-8"))
    lines: Counter[str] = Counter()
    for path in source_files():
        lines[room_of(path)] += len(path.read_text(encoding="utf-8").splitlines())
    grown = [name for name in lines if lines[name] > most.get(name, 0)]
    shrunk = [name for name in most if lines[name] < most[name] - SLACK_LINES]
    report(
        [f"{name} has {lines[name]} lines, and may have {most.get(name, 0)}: take some out" for name in sorted(grown)]
        + [f"{name} has {lines[name]} lines, and may have {most[name]}: lower the number" for name in sorted(shrunk)]
        + ([f"{LINES.name} is raised only by a commit that says why"] if grown else [])
    )


NOTHING_HEAVY = """
import sys
loaded = {"transformers", "accelerate", "peft", "trl", "axolotl", "datasets", "hf_lohan.testing"} & set(sys.modules)
assert not loaded, f"also imported: {loaded}"
if "torch" in sys.modules:
    assert not sys.modules["torch"].cuda.is_initialized(), "a CUDA context exists"
"""


def test_importing_the_library_is_light() -> None:
    run_python("-c", f"import hf_lohan\n{NOTHING_HEAVY}")


def test_importing_the_rooms_below_huggingface_is_light() -> None:
    below = (room for room, floor in FLOORS.items() if floor < FLOORS["huggingface"])
    rooms = [room for room in below if (PACKAGE / room / "__init__.py").exists()]
    imports = "\n".join(f"import hf_lohan.{room}" for room in rooms)
    no_handlers = "import logging; assert not logging.getLogger('hf_lohan').handlers, 'adds log handlers'"
    run_python("-c", f"{imports}\n{NOTHING_HEAVY}\n{no_handlers}")


PARSE_ALL = """
import ast, pathlib, sys
for path in pathlib.Path(sys.argv[1]).rglob("*.py"):
    tree = compile(path.read_text(), str(path), "exec", ast.PyCF_ONLY_AST)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] in sys.stdlib_module_names:
            for name in node.names:
                try:
                    exec(f"from {node.module} import {name.name}")
                except ImportError as error:
                    print(f"{path}: {error}")
"""


@pytest.mark.parametrize("minor", slow_but((10,), range(10, 15)))
def test_every_supported_python_can_parse_the_library(minor: int) -> None:
    """Check the syntax and the imports from the standard library, with interpreters on PATH or next to this one."""
    beside = sorted(Path(sys.base_prefix).parent.glob(f"*3.{minor}*/bin/python3.{minor}"))
    for python in filter(None, [shutil.which(f"python3.{minor}"), *map(str, beside)]):
        code = f"import sys; assert sys.version_info[:2] == (3, {minor})"
        if subprocess.run([python, "-c", code], capture_output=True).returncode == 0:
            break
    else:
        pytest.skip(f"this machine has no Python 3.{minor}")
    found = subprocess.run([python, "-c", PARSE_ALL, PACKAGE], capture_output=True, text=True)
    assert found.returncode == 0 and not found.stdout, found.stdout + found.stderr


@pytest.mark.slow
def test_no_way_is_longer_and_no_call_climbs() -> None:
    counted = subprocess.run(
        [sys.executable, ROOT / "scripts/development/count_ways.py"], capture_output=True, text=True
    )
    assert counted.returncode == 0, counted.stdout


def test_no_file_names_a_path_of_a_developer_s_machine() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("the files of the project are known only in a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    offences = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if not path.is_file() or b"\0" in (content := path.read_bytes())[:4096]:
            continue
        for number, line in enumerate(content.decode("utf-8", errors="replace").splitlines(), start=1):
            if MACHINE_PATH.search(line):
                offences.append(f"{name}:{number}: {line.strip()[:100]}")
    report(offences)
