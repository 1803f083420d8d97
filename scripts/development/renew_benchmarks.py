"""Measure the fourteen rows of `docs/benchmarks/README.md` again, and write their figures and the table.

    python scripts/development/renew_benchmarks.py                # about 40 minutes on two quiet cores
    python scripts/development/renew_benchmarks.py --only paced   # the benchmarks whose names contain this
    python scripts/development/renew_benchmarks.py --table-only   # measure nothing; write the table

Run it on a committed tree, because each file of figures names its commit. If a benchmark fails, its earlier figures
stay, and the exit status is 1. The comparison with DeepSpeed needs an environment with DeepSpeed
(`--deepspeed-python`). The links between two nodes are network namespaces, which need root.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "benchmarks"
PAGE = FOLDER / "README.md"
BEGIN, END = "<!-- begin: renew_benchmarks.py -->\n", "<!-- end -->\n"
Figures = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One row of the table, made from the figures of one benchmark."""

    subject: str
    aim: str
    result: Callable[[Figures], tuple[str, str]]
    """Returns the median and the spread, as text."""


@dataclass(frozen=True)
class Benchmark:
    """A command and the rows that are made from its figures."""

    name: str
    """The names of the files with the figures begin with this name."""
    script: str
    arguments: Sequence[str]
    rows: Sequence[Row]

    @property
    def files(self) -> list[Path]:
        return sorted(FOLDER.glob(f"{self.name}_*.json"))

    @property
    def command(self) -> str:
        words = (f"'{word}'" if set(word) & set(' {"') else word for word in self.arguments)
        return " ".join((self.script, *words))


def spread(values: Sequence[float], digits: int = 2, unit: str = "s") -> str:
    return f"{min(values):.{digits}f}-{max(values):.{digits}f} {unit}"


def over_memory(figures: Figures) -> tuple[str, str]:
    ratios, spreads = [], []
    for result in figures["results"]:
        of = result["step_s"]
        ratios.append(f"**{of['offloaded'] / of['in memory']:.3f}** ({of['offloaded']:.2f}, {of['in memory']:.2f} s)")
        spreads.append(spread(result["step_s_all"]["offloaded"]))
    return "; ".join(ratios), "; ".join(spreads)


def over_deepspeed(figures: Figures) -> tuple[str, str]:
    results = [result for result in figures["results"] if "deepspeed" in result["step_s"]]
    if not results:
        return "not run", "-"
    ratios = [f"**{of['offloaded'] / of['deepspeed']:.3f}**" for of in (result["step_s"] for result in results)]
    return "; ".join(ratios), "; ".join(spread(result["step_s_all"]["deepspeed"]) for result in results)


def memory(figures: Figures) -> tuple[str, str]:
    ours = [result["anonymous_bytes"]["offloaded"] / 1e9 for result in figures["results"]]
    others = {
        side: max(result["anonymous_bytes"].get(side, 0) for result in figures["results"]) / 1e9
        for side in ("in memory", "deepspeed")
    }
    beside = ", ".join(f"{side} {size:.1f}" for side, size in others.items() if size)
    return f"**{'; '.join(f'{size:.2f}' for size in ours)} GB** ({beside})", "the highest of all turns"


def paced(regime: str) -> Callable[[Figures], tuple[str, str]]:
    def result_of(figures: Figures) -> tuple[str, str]:
        result, *others = [one for one in figures["results"] if one["regime"] == regime and one["max_grad_norm"]]
        controls = [one for one in others if one.get("parked") == "0"]
        lanes, step_s = result["lanes_s"], result["step_s"]
        times = f"{step_s:.2f} s; compute {lanes['compute']:.2f}, drive alone {lanes['drive']:.2f}"
        times += f", planned {result['predicted_s']:.2f} s"
        times += "".join(f"; nothing parked {ratio_in(control)}" for control in controls)
        return f"**{ratio_in(result)}** ({times})", spread(result["step_s_spread"])

    def ratio_in(result: Figures) -> str:
        return f"{result['share_of_drive']:.0%}" if regime == "bytes" else f"{result['over_longest_lane']:.3f}"

    return result_of


def generation(figures: Figures) -> tuple[str, str]:
    ratios, token_s = figures["ratios"], figures["token_s"]
    shares = [ratios[f"{side}: share of the bound"] for side in ("bytes", "balanced")]
    times = f"{token_s['bytes']:.3f}, {token_s['balanced']:.3f} s"
    return f"**{shares[0]:.2f}; {shares[1]:.2f}** ({times})", spread(figures["token_s_all"]["bytes"], 3)


def durability(figures: Figures) -> tuple[str, str]:
    (result,) = (one for one in figures["results"] if one["batch"] == [2, 256])
    pairs = [on / off - 1 for on, off in zip(*(result["step_s_all"][side] for side in ("on", "off")), strict=True)]
    return (
        f"**{statistics.median(pairs):+.1%}** (a commit {1e3 * result['commit_s']:.1f} ms)",
        f"{min(pairs):+.0%} to {max(pairs):+.0%}",
    )


def planner(figures: Figures) -> tuple[str, str]:
    results = figures["results"]
    errors = [
        f"{'x'.join(map(str, result['batch']))}: {result['first_error']:+.0%}, **{result['corrected_error']:+.0%}**"
        for result in results
    ]
    times = ", ".join(spread(result["step_s_all"]["planned"]) for result in results)
    return "; ".join(errors), times


def io_share(figures: Figures) -> tuple[str, str]:
    gigabytes = (figures["read_bytes_per_step"] + figures["write_bytes_per_step"]) / 1e9
    rate = figures["bytes_per_s"] / 1e9
    return f"**{figures['share']:.0%}** ({gigabytes:.1f} GB at {rate:.2f} GB/s)", spread(figures["all"]["step_s"], 1)


def large(figures: Figures) -> tuple[str, str]:
    peaks = figures["peak_anonymous_bytes"]
    step = f"{figures['step_s']:.1f} s a step (its bytes alone: {figures['io_floor_s']:.1f} s)"
    return f"**{peaks['training'] / 1e9:.2f} GB**, {step}", spread(figures["all"]["step_s"], 1)


def shaped_links(figures: Figures) -> tuple[str, str]:
    (link, *_) = figures["links"].values()
    times = dict(link["step_s"])
    rival_s = times.pop("zero3_gloo")
    return (
        f"**{'; '.join(f'{step_s / rival_s:.2f}' for step_s in times.values())}** (ZeRO-3: {rival_s:.2f} s)",
        "; ".join(spread(link["step_s_all"][side]) for side in times),
    )


def divided_experts(figures: Figures) -> tuple[str, str]:
    (link, *_) = figures["links"].values()
    step_s, sent = link["step_s"], link["box_sent_bytes"]
    times = f"{step_s['world']:.2f}, {step_s['none']:.2f} s; sends {sent['world'] / sent['none']:.2f}"
    return f"**{link['speed_up']['world']:.1f}** ({times})", spread(link["step_s_all"]["world"])


def balanced_experts(figures: Figures) -> tuple[str, str]:
    step_s, loads = figures["step_s"], figures["most_loaded"]
    times = f"{step_s['balanced']:.2f}, {step_s['owners']:.2f} s; the most loaded rank has {loads['balanced']:.2f}, "
    times += f"{loads['owners']:.2f} times the mean of rows"
    return f"**{figures['speed_up']:.1f}** ({times})", spread(figures["step_s_all"]["balanced"])


def packed(figures: Figures) -> tuple[str, str]:
    step_s, read = figures["step_s"], figures["read_bytes"]
    times = f"{step_s['packed']:.2f}, {step_s['unpacked']:.2f} s; reads {read['packed'] / read['unpacked']:.2f}"
    return f"**{figures['ratio']:.2f}** ({times})", spread(figures["step_s_all"]["packed"])


def decoded(figures: Figures) -> tuple[str, str]:
    rates = [figures["decoded_per_s"][f"nf4, {dtype}"] / 1e9 for dtype in ("float32", "bfloat16")]
    of_turns = [rate / 1e9 for rate in figures["decoded_per_s_all"]["nf4, bfloat16"]]
    return f"**{rates[0]:.2f}; {rates[1]:.2f}** billion weights a second", spread(of_turns, unit="billion")


BENCHMARKS = (
    Benchmark(
        "rivals",
        "bench_rivals.py",
        ("--num-turns", "2"),
        (
            Row("a step over one in memory; clipped at 1.0", "1.15", over_memory),
            Row("a step over DeepSpeed's (ZeRO-3, states on NVMe); clipped at 1.0", "0.55", over_deepspeed),
            Row("anonymous memory; clipped at 1.0", "1.6 GB", memory),
        ),
    ),
    Benchmark(
        "paced",
        "paced_step.py",
        (
            *("--regime", "all", "--drive", "2e9", "--max-grad-norm", "1", "--parked", "auto", "--parked", "0"),
            *("--set", "commit_every=1", "--num-turns", "1", "--steps-per-turn", "3"),
        ),
        (
            Row("paced, 537M, clipped, compute-bound: a step over its compute", "1.03", paced("compute")),
            Row("the same, byte-bound: bytes a second, of the drive alone", "95%", paced("bytes")),
            Row("the same, balanced: a step over the longer of compute and drive", "1.10", paced("balanced")),
        ),
    ),
    Benchmark(
        "generate_experts",
        "generate_from_ssd.py",
        (
            *("--drive", "240e6", "--num-experts", "32", "--layers", "12", "--hidden", "512", "--intermediate", "768"),
            *("--tokens", "4", "--num-turns", "2"),
        ),
        (
            Row(
                "a token of a mixture, slots for a quarter of the experts, of its bound: byte-bound; balanced",
                "0.9",
                generation,
            ),
        ),
    ),
    Benchmark(
        "durability",
        "bench_durability.py",
        ("--batch", "2x256", "--num-turns", "3"),
        (Row("checksums and commits, of a step of 2 x 256 tokens", "3%", durability),),
    ),
    Benchmark(
        "planner",
        "bench_planner.py",
        ("--batch", "1x32", "--batch", "1x256", "--num-turns", "1", "--num-points", "1", "--gpu-memory", "384MiB"),
        (Row("predicted step over measured, before and after the correction", "10%", planner),),
    ),
    Benchmark(
        "large_1b",
        "bench_large.py",
        ("--num-turns", "1", "--steps-per-turn", "2"),
        (Row("1.07B, 1 x 32 tokens: bytes moved a second, of what the I/O engine reaches alone", "80%", io_share),),
    ),
    Benchmark(
        "large_3b",
        "bench_large.py",
        (
            *("--hidden", "3072", "--layers", "26", "--cpu-memory", "4GiB", "--gpu-memory", "1536MiB"),
            *("--num-turns", "1", "--steps-per-turn", "1"),
        ),
        (Row("3.05B, `cpu_memory: 4GiB`: anonymous memory in training", "7 GB", large),),
    ),
    Benchmark(
        "packed",
        "bench_packed.py",
        (),
        (
            Row(
                "adapters over 79M in float32, a drive of 0.5 GB/s: how many times as fast NF4 makes a step",
                "2.5",
                packed,
            ),
            Row("NF4 decoded by two threads, to float32; to bfloat16", "-", decoded),
        ),
    ),
    Benchmark(
        "shaped_links",
        "shaped_links.py",
        (
            *("--rate", "50mbit", "--num-turns", "1", "--mode", "exact", "--mode", '{"gradients": "int8"}'),
            *("--mode", '{"forward": "delta", "gradients": "int8"}'),
        ),
        (
            Row(
                "two nodes of two ranks, links of 50 Mbit/s, a step over plain ZeRO-3 on gloo: exact; gradients in "
                "int8; weights as lossless changes and gradients in int8",
                "0.77; 0.33; 0.33",
                shaped_links,
            ),
        ),
    ),
    Benchmark(
        "divided_experts",
        "shaped_links.py",
        (
            *("--rate", "50mbit", "--num-turns", "3", "--num-experts", "16", "--ranks-a-node", "1"),
            *("--layers", "2", "--cpu-memory", "512MiB", "--gpu-memory", "256MiB"),
        ),
        (
            Row(
                "a mixture of 16 experts on two nodes, a link of 50 Mbit/s: how many times as fast rows to experts "
                "(`experts.parallel: world`) make a step as experts to ranks",
                "5",
                divided_experts,
            ),
        ),
    ),
    Benchmark(
        "balanced_experts",
        "balanced_experts.py",
        ("--num-turns", "2"),
        (
            Row(
                "a mixture of 16 experts on 4 ranks of a machine, half of the rows for one; experts compute by "
                "waiting: how many times as fast `experts.balance` makes a step",
                "-",
                balanced_experts,
            ),
        ),
    ),
)


def measure(benchmark: Benchmark, deepspeed_python: str | None) -> bool:
    """Run one benchmark, and replace its earlier figures. Returns whether it succeeded."""
    earlier = {path: path.read_bytes() for path in benchmark.files}
    extra = ["--deepspeed-python", deepspeed_python] if deepspeed_python and benchmark.name == "rivals" else []
    for path in earlier:
        path.unlink()
    command = [sys.executable, f"scripts/benchmarks/{benchmark.script}", *benchmark.arguments, *extra]
    began_s = time.monotonic()
    status = subprocess.run([*command, "--output", str(FOLDER)], cwd=ROOT, check=False).returncode
    print(f"== {benchmark.name}: {time.monotonic() - began_s:.0f} s, exit status {status}", flush=True)
    if status:
        for path, content in earlier.items():
            path.write_bytes(content)
    return status == 0


def table() -> str:
    """Return the Markdown between the page's two markers."""
    commits: dict[str, None] = {}
    hardware: dict[str, None] = {}
    lines = ["| subject | aim | median | spread | command |", "|---|---|---|---|---|"]
    for benchmark in BENCHMARKS:
        all_figures = [json.loads(path.read_text(encoding="utf-8")) for path in benchmark.files]
        for figures in all_figures:
            commits[figures["commit"]] = None
            hardware[f"{figures['hardware']['num_cpus']} cores of {figures['hardware']['name']}"] = None
        for number, row in enumerate(benchmark.rows):
            median, spread_text = result_in(row, all_figures)
            command = f"`{benchmark.command}`" if number == 0 else "the same run"
            lines.append(f"| {row.subject} | {row.aim} | {median} | {spread_text} | {command} |")
    named = ", ".join(f"`{commit}`" for commit in commits)
    head = f"Commit: {named}.\n" if len(commits) == 1 else f"The rows are of several commits: {named}.\n"
    return f"{head}Hardware: {'; '.join(hardware)}.\n\n" + "\n".join(lines) + "\n"


def result_in(row: Row, all_figures: list[Figures]) -> tuple[str, str]:
    """Return the row's cells from the first figures that have them."""
    for figures in all_figures:
        try:
            return row.result(figures)
        except (KeyError, ValueError):
            continue
    return "not measured", "-"


def write_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    PAGE.write_text(head + BEGIN + table() + END + rest.split(END)[1], encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the rows of docs/benchmarks again.")
    parser.add_argument("--only", default="", help="measure only the benchmarks whose names contain this")
    parser.add_argument("--table-only", action="store_true", help="measure nothing, write the table")
    parser.add_argument("--deepspeed-python", help="interpreter of an environment that has DeepSpeed")
    options = parser.parse_args()
    failed = []
    for benchmark in BENCHMARKS if not options.table_only else ():
        if options.only in benchmark.name and not measure(benchmark, options.deepspeed_python):
            failed.append(benchmark.name)
    write_table()
    if failed:
        print(f"renew_benchmarks: failed, with their earlier figures kept: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
