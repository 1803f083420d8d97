"""The options that `lohan plan` and `lohan estimate` share. Each option is a field of `PlanRequest`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypeAlias, get_type_hints

import typer

Revision: TypeAlias = Annotated[
    str | None, typer.Option(metavar="REV", help="Branch, tag or commit of a model in the Hub.")
]
TrustRemoteCode: TypeAlias = Annotated[
    bool, typer.Option("--trust-remote-code", "--trust_remote_code", help="Run code from the model's repository.")
]


def option(default: Any, metavar: str | None, text: str, *names: str) -> Any:
    """Declare a field as an option with the help ``text``. ``names``: the option's names, by default the field's."""
    return field(default=default, metadata={"option": typer.Option(*names, metavar=metavar, help=text)})


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What to plan. Raises ValueError for numbers that are too small."""

    model: str
    batch_size: int = option(8, "B", "Sequences in each forward.")
    sequence_length: int | None = option(
        None,
        "S",
        "Tokens in each sequence. For plan with --lengths: tokens in each packed sequence. For estimate: by default "
        "2048, or the model's maximum.",
        "--seq-len",
    )
    offload: str = option("lohan", "X", "lohan (everything automatic) or a YAML file.")
    hardware: str | None = option(None, "H.yaml", "Profile of another machine. Default: measure this one.")
    num_micro_batches: int = option(1, "N", "Forwards in each step.", "--gradient-accumulation-steps")
    max_grad_norm: float = option(1.0, "G", "Norm to clip to; 0 is no clipping.")
    dtype: str = option("auto", None, "Dtype of working weights: auto, bfloat16 or float32.")
    lora_rank: int | None = option(None, "R", "Train LoRA on all linear layers instead of all weights.")
    quantize: str | None = option(None, "M", "Pack frozen weights as nf4, fp4 or int8. Default: as configured.")
    num_ranks: int = option(1, "N", "Number of devices. Each has its own batches.", "--ranks")
    num_nodes: int = option(1, "Y", "Number of machines. All have the same number of ranks.", "--nodes")
    link: str | None = option(None, "RATE", "Rate between nodes: 2.5Gbit, 10Gbit, 1.2GB/s.")
    collectives: str | None = option(
        None, "HOW", "What ranks exchange: exact, quantized (may round), or forward=int8,gradients=int4,within=int8."
    )
    transport: str | None = option(
        None, "T", "How GPUs of a machine get weights and gradients: host or nccl. Default: as --offload."
    )
    gpu_link: str | None = option(
        None, "RATE", "Rate between GPUs, in each direction: 50GB/s. Default: as --hardware, or assumed."
    )
    expert_parallel: str | None = option(
        None, "W", "Whether ranks divide a mixture's experts: auto, none, node or world. Default: as --offload."
    )
    routing: str | None = option(
        None, "RUN", "Plan with the routing of experts that this run recorded. Default: the run that saved MODEL."
    )
    sequence_ranks: int | None = option(
        None, "N", "Number of devices of a machine that share each row. Default: as --offload."
    )
    fused: str | None = option(
        None, "HOW", "Plan fused kernels: compile (torch_compile=True) or liger (use_liger_kernel=True)."
    )
    paper: bool = option(
        False, None, "Keep all state on the SSDs, as in LoHan's paper. A real run also keeps state in RAM.", "--paper"
    )
    revision: Revision = None
    trust_remote_code: TrustRemoteCode = False

    def __post_init__(self) -> None:
        at_least_one = {
            "batch size": self.batch_size,
            "sequence length": self.sequence_length,
            "number of gradient accumulation steps": self.num_micro_batches,
            "rank of LoRA": self.lora_rank,
            "number of ranks": self.num_ranks,
            "number of nodes": self.num_nodes,
            "number of ranks of a row": self.sequence_ranks,
        }
        for name, value in at_least_one.items():
            if value is not None and value < 1:
                raise ValueError(f"the {name} is {value}; it must be at least 1")
        if self.fused not in (None, "compile", "liger"):
            raise ValueError(f"--fused is {self.fused!r}; give compile or liger, or leave it out")
        if self.max_grad_norm < 0:
            raise ValueError(f"max_grad_norm is {self.max_grad_norm}; give 0 for no clipping, or a positive norm")
        if self.num_ranks % self.num_nodes:
            raise ValueError(f"{self.num_ranks} ranks on {self.num_nodes} nodes; give each node equally many ranks")


def _refuse_boxes(value: int | None) -> None:
    if value is not None:
        typer.echo(f"error: --boxes is named --nodes; give --nodes {value}", err=True)
        raise typer.Exit(2)


_Model: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="A checkpoint folder, a config.json, or the name of a model in the Hub.",
    ),
]
_BESIDES: Mapping[str, Any] = {
    "model": _Model,
    "model_option": Annotated[str | None, typer.Option("--model", metavar="MODEL", help="Same as MODEL.")],
    "boxes": Annotated[int | None, typer.Option("--boxes", hidden=True, callback=_refuse_boxes)],
}
"""Options that are not fields of `PlanRequest`."""


def with_request(*required: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of `PlanRequest` before the options of a command. The command gets the request as its first
    argument. ``required``: options without a default. Raises ValueError unless exactly one model is given."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(PlanRequest, include_extras=True)
        asked = {own.name: own for own in fields(PlanRequest) if own.name != "model"}
        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=None)
            for name, hint in _BESIDES.items()
        ]
        for name, own in asked.items():
            hint = Annotated[hints[name], own.metadata["option"]] if own.metadata else hints[name]
            default = inspect.Parameter.empty if name in required else own.default
            shared.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default))

        @functools.wraps(command)
        def run(*, model: str | None, model_option: str | None, boxes: int | None, **values: Any) -> None:
            models = [given for given in (model, model_option) if given is not None]
            if len(models) != 1:
                raise ValueError(
                    f"{len(models)} models were given; give one: a checkpoint folder, a config.json or a name in the "
                    "Hub"
                )
            request = PlanRequest(model=models[0], **{name: values.pop(name) for name in asked})
            command(request, **values)

        _, *others = inspect.signature(command, eval_str=True).parameters.values()
        shared += [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in others]
        run.__signature__ = inspect.Signature(shared)  # type: ignore[attr-defined]
        return run

    return decorate
