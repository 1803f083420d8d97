"""The commands of `lohan` and their options."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer

import hf_lohan

app = typer.Typer(
    name="lohan",
    help="Fine-tune Hugging Face models whose training state does not fit, exactly, from an SSD.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# accelerate's own parser reads everything after `launch`: only it knows where the script's name stands.
_AS_GIVEN = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what the user has to change into one line on stderr and exit status 2."""
    from hf_lohan.storage import StoreInUseError

    try:
        yield
    except (ValueError, OSError, StoreInUseError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None


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
    """Fine-tune Hugging Face models whose training state does not fit, exactly, from an SSD."""


@app.command(context_settings=_AS_GIVEN)
def launch(context: typer.Context) -> None:
    """Run an unmodified transformers.Trainer script offloaded: [--offload X] [accelerate options] script.py [args]."""
    with one_line_errors():
        from hf_lohan.integrations.launch import launch as launch_script

        raise typer.Exit(launch_script(context.args))


@app.command()
def config(
    offload: Annotated[str, typer.Option(metavar="X", help="lohan (everything automatic) or a YAML file.")] = "lohan",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of YAML.")] = False,
) -> None:
    """Print the configuration that a run would use on this machine, every auto resolved; it can be used as a file."""
    with one_line_errors():
        from hf_lohan.cli.resolved_config import resolved_settings, to_json, to_yaml

        settings = resolved_settings(offload)
        typer.echo(to_json(settings) if as_json else to_yaml(settings))


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The output folder of a run, or its store's folder.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="A new folder for the Hugging Face model.")],
) -> None:
    """Write the last committed step of a run as a plain Hugging Face model."""
    with one_line_errors():
        from hf_lohan.integrations.export import export as export_run

        step = export_run(run, out)
        typer.echo(f"wrote {out}" + (f" (step {step})" if step is not None else ""))


@app.command()
def verify(
    stores: Annotated[
        list[str], typer.Argument(metavar="STORE...", help="A run's output folder, or all ssd paths of its store.")
    ],
) -> None:
    """Read all that a store has committed and check every checksum; exit status 1 if one is wrong."""
    with one_line_errors():
        from hf_lohan.cli.verification import verify_store

        raise typer.Exit(0 if verify_store(stores) else 1)
