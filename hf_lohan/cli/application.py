"""The commands of `lohan` and their options."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

import hf_lohan
from hf_lohan.cli.plan_options import PlanRequest, Revision, TrustRemoteCode, with_request

if TYPE_CHECKING:
    from hf_lohan.huggingface.generate.text_generation import GenerationFigures

_ANY_LENGTH = 10_000
_GENERATION_STORES = Path("lohan_generate")
"""Folder in the working directory for the stores of `lohan generate`, unless `--ssd` names another."""


class _Commands(TyperGroup):
    """Runs the commands, and lists each with its whole help text. click would cut the text to one line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [(name, command.get_short_help_str(_ANY_LENGTH)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> Any:
        """Print errors that the user can fix as one line on stderr, and exit with status 2."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):  # RuntimeErrors too; `--help` ends here, and must not import torch
            raise
        except (ValueError, OSError, RuntimeError) as error:
            from hf_lohan.files import StoreInUseError

            if isinstance(error, RuntimeError) and not isinstance(error, StoreInUseError):
                raise
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    name="lohan",
    cls=_Commands,
    help="Fine-tune Hugging Face models whose training state does not fit in memory, and keep the state on SSDs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_AS_GIVEN = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"lohan {hf_lohan.__version__}")
        raise typer.Exit


@app.callback()
def lohan(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Fine-tune Hugging Face models whose training state does not fit in memory, and keep the state on SSDs."""


@app.command("launch", context_settings=_AS_GIVEN)
def launch_command(context: typer.Context) -> None:
    """Run an unmodified transformers.Trainer script offloaded: [--offload X] [--trace] [options] script.py [args]."""
    from hf_lohan.huggingface.launch import launch_script

    raise typer.Exit(launch_script(context.args))


@app.command()
def config(
    offload: Annotated[str, typer.Option(metavar="X", help="lohan (everything automatic) or a YAML file.")] = "lohan",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of YAML.")] = False,
    ask: Annotated[bool, typer.Option("--ask", help="Ask four questions, and write a YAML file instead.")] = False,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="With --ask: the model to train.")] = None,
    card: Annotated[str | None, typer.Option(metavar="CARD", help="With --ask: a name, 24GB, none or auto.")] = None,
    ram: Annotated[str | None, typer.Option(metavar="SIZE", help="With --ask: a size such as 64GB, or auto.")] = None,
    drives: Annotated[
        str | None, typer.Option(metavar="PATHS", help="With --ask: PATH or PATH=SIZE, separated by commas, or auto.")
    ] = None,
    output: Annotated[str, typer.Option(metavar="FILE.yaml", help="With --ask: the file to write.")] = "lohan.yaml",
) -> None:
    """Print a config file with the settings that a run would use on this machine. Every auto is resolved."""
    answers = {"model": model, "card": card, "ram": ram, "drives": drives}
    if ask or any(answer is not None for answer in answers.values()):
        _ask(answers, output)
        return
    from hf_lohan.config import OffloadConfig

    asked = OffloadConfig.load(offload)
    import yaml  # after the quick checks

    from hf_lohan.device import default_torch_device, device_for
    from hf_lohan.planning.layout import resolved_here

    resolved = resolved_here(asked, device_for(default_torch_device()), "auto")
    # "auto" is a folder in a run's output directory, which is not known here.
    settings = {**resolved.to_dict(), "ssd": asked.to_dict()["ssd"]}
    if as_json:
        typer.echo(json.dumps(settings, indent=2))
        return
    if settings["ssd"] == "auto":
        typer.echo("# ssd: auto is the folder _lohan/store in the run's output directory")
    typer.echo(yaml.safe_dump(settings, sort_keys=False), nl=False)


def _has_terminal() -> bool:
    return sys.stdin.isatty()


def _ask(answers: dict[str, str | None], output: str) -> None:
    from hf_lohan.config import ConfigError
    from hf_lohan.config.answers import QUESTIONS, check_new, missing_answers, use_answers

    check_new(output)
    missing = missing_answers(answers)
    if missing and not _has_terminal():
        raise ValueError(f"there is no terminal for the questions; also give {', '.join(missing)}")
    for question in QUESTIONS:
        while answers[question.name] is None:
            answer = typer.prompt(question.text, default=question.default)
            try:
                question.settings(answer)
            except ConfigError as error:
                typer.echo(str(error))
            else:
                answers[question.name] = answer
    content, *commands = use_answers({name: answer or "" for name, answer in answers.items()}, output)
    Path(output).write_text(content, encoding="utf-8")
    typer.echo(f"wrote {output}:")
    typer.echo(content)
    from hf_lohan.cli.plan_report import wear_of_answers  # after the questions, because it imports torch

    typer.echo(f"wear: {wear_of_answers(answers['model'] or '', output)}")
    for command in commands:
        typer.echo(command)


@app.command()
def doctor(
    offload: Annotated[str, typer.Option(metavar="X", help="lohan (everything automatic) or a YAML file.")] = "lohan",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    measure: Annotated[bool, typer.Option(help="Measure rates in a few seconds, or read earlier rates.")] = True,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Ignore earlier rates, and measure again.")] = False,
    output: Annotated[str | None, typer.Option(metavar="H.yaml", help="Also write the measured profile.")] = None,
) -> None:
    """Check this machine and its drives, and suggest improvements."""
    from hf_lohan.cli.doctor import run_doctor

    run_doctor(offload, as_json=as_json, measure=measure, measure_again=no_cache, output=output)


@app.command()
@with_request("batch_size")
def plan(
    request: PlanRequest,
    lifetimes: Annotated[
        bool,
        typer.Option("--lifetimes", help="Also print when each kind of tensor is in use, and when it is idle."),
    ] = False,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also plan an epoch. Each line of FILE is the number of tokens of one row."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    plot: Annotated[str | None, typer.Option(metavar="OUT.png", help="Also draw the plan (needs matplotlib).")] = None,
) -> None:
    """Predict how long a training step takes, what bounds it and what would make it faster, without loading weights."""
    from hf_lohan.cli.plan_report import run_plan

    run_plan(request, as_json=as_json, plot=plot, lifetimes=lifetimes, lengths_file=lengths)


@app.command()
@with_request()
def estimate(
    request: PlanRequest,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Print in a few lines whether a model can be trained on a machine, how long a step takes and what it needs."""
    from hf_lohan.cli.plan_report import run_estimate

    run_estimate(request, as_json=as_json)


@app.command()
def generate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder, or a name in the Hub.")],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Beginning of the text.")],
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Maximum number of tokens.")] = 128,
    temperature: Annotated[float | None, typer.Option(metavar="T", help="Sample with this temperature.")] = None,
    top_p: Annotated[float | None, typer.Option(metavar="P", help="Sample from the likeliest tokens only.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="S", help="Seed, for the same text in each run.")] = None,
    num_beams: Annotated[int, typer.Option(metavar="B", help="Number of beams to search with.")] = 1,
    offload: Annotated[
        str, typer.Option("--config", "--offload", metavar="X", help="lohan (everything automatic) or a YAML file.")
    ] = "lohan",
    ssd: Annotated[str | None, typer.Option(metavar="PATH", help="Folder for the weights. It is kept.")] = None,
    cpu_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Maximum host memory for weights.")] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Maximum device memory for weights, keys and values.")
    ] = None,
    num_processes: Annotated[
        int,
        typer.Option("--num-processes", "--num_processes", metavar="N", help="Number of ranks that share the weights."),
    ] = 1,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Generate text. Weights that fit neither on the device nor in RAM are read from the drives for each token."""
    from hf_lohan.huggingface.launch import launch_lohan

    options = {name: value for name, value in context.params.items() if name not in ("model", "num_processes")}
    flags = ["--trust-remote-code"] if options.pop("trust_remote_code") else []
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
    status = launch_lohan(num_processes, ["generate", model, *given, *flags])
    if status is not None:
        raise typer.Exit(status)
    from hf_lohan.config import OffloadConfig
    from hf_lohan.huggingface.generate.text_generation import generate_text

    settings = {"ssd": ssd, "cpu_memory": cpu_memory, "gpu_memory": gpu_memory}
    loaded = OffloadConfig.load(offload, **{name: value for name, value in settings.items() if value is not None})
    default_ssd_path = _GENERATION_STORES / Path(model).resolve().name
    figures = generate_text(
        model,
        prompt,
        loaded,
        write=_write,
        default_ssd_path=default_ssd_path,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        num_beams=num_beams,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    if int(os.environ.get("RANK", "0")):
        return
    typer.echo()
    for line in generation_summary(figures):
        typer.echo(line, err=True)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def generation_summary(figures: GenerationFigures) -> list[str]:
    """Return lines on the speed of the generation, and on the resource that bounded it."""
    from hf_lohan.wording import format_bytes, gb_per_s, percent, seconds, times

    tokens = times(figures.num_prompt_tokens, "token")
    lines = [f"ready after {seconds(figures.load_s)}; the prompt's {tokens} took {seconds(figures.first_pass_s)}"]
    if not figures.pass_s:
        return lines
    passes = times(figures.num_passes - 1, "further token")
    lines.append(f"{passes} at {1 / figures.pass_s:.3g} tokens/s ({seconds(figures.pass_s)} each)")
    if figures.num_expert_loads:
        share = percent(figures.num_experts_from_ram / figures.num_expert_loads)
        lines.append(f"experts were loaded {times(figures.num_expert_loads, 'time')}, {share} of them from RAM")
    if not figures.missing_bytes:
        return [*lines, "all weights stay on the device or in RAM, so a token reads nothing from the drives"]
    lines.append(
        f"each token reads {format_bytes(figures.read_bytes)}; {format_bytes(figures.missing_bytes)} of the weights "
        "are neither on the device nor in RAM"
    )
    lines.append(
        f"reading these bytes at the measured {gb_per_s(figures.drive_bytes_per_s)} takes at least "
        f"{seconds(figures.bound_s)} a token; the run reached {percent(figures.bound_s / figures.pass_s)} of this speed"
    )
    return lines


@app.command()
def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The output folder of a run.")],
    output: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="Default: lohan/report.html in the run's folder.")
    ] = None,
) -> None:
    """Write one HTML page about a run: speed, waits, bytes moved and memory used."""
    from hf_lohan.report import write_report

    typer.echo(f"wrote {write_report(run, output)}")


@app.command("export")
def export_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The output folder of a run, or its store's folder.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="A new folder for the Hugging Face model.")],
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="Dtype of weights: auto (as the run saves them), bfloat16 or float32.")
    ] = "auto",
) -> None:
    """Write the last committed step of a run as a plain Hugging Face model."""
    from hf_lohan.huggingface.models.export import export_model

    step = export_model(run, out, dtype)
    typer.echo(f"wrote {out}" + (f" (step {step})" if step is not None else ""))


@app.command("merge")
def merge_command(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="A folder with an adapter, or a name in the Hub.")],
    base: Annotated[
        str, typer.Argument(metavar="BASE", help="A checkpoint folder, or the name of a model in the Hub.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="A new folder for the merged model.")],
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Dtype of weights. Default: as in BASE.")] = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Merge a saved PEFT adapter into a base model, a weight at a time, and write a plain Hugging Face model."""
    hf_lohan.merge(adapter, base, out, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
    typer.echo(f"wrote {out}")


@app.command("reshard")
def reshard_command(
    stores: Annotated[
        list[str], typer.Argument(metavar="STORE...", help="A run's output folder, or all its ssd paths.")
    ],
    ranks: Annotated[
        int, typer.Option("--ranks", "--num_processes", metavar="N", help="Number of ranks that continue the run.")
    ],
    remove_old: Annotated[bool, typer.Option("--remove-old", help="Remove the old stores afterwards.")] = False,
    balance: Annotated[
        bool, typer.Option("--balance", help="Divide experts so that all ranks get equally many tokens.")
    ] = False,
    nodes: Annotated[int | None, typer.Option(metavar="Y", help="With --balance: number of nodes.")] = None,
) -> None:
    """Copy the last committed step of a run into new stores, for another number of ranks. The old stores stay."""
    from hf_lohan.checkpoint.generations import resharding_for

    reshard_stores = resharding_for("lohan reshard").reshard_stores
    reshard_stores(stores, ranks, removes_old=remove_old, balances=balance, num_nodes=nodes)


@app.command()
def verify(
    stores: Annotated[
        list[str], typer.Argument(metavar="STORE...", help="A run's output folder, or all ssd paths of its store.")
    ],
) -> None:
    """Read all committed data of a store and check every checksum. The exit status is 1 if a checksum is wrong."""
    from hf_lohan.cli.stores import verify_stores

    raise typer.Exit(0 if verify_stores(stores) else 1)
