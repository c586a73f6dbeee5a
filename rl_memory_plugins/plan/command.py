"""The command `rl-memory plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError
from rl_memory_plugins.extras import needs
from rl_memory_plugins.plan.gpus import GPUS
from rl_memory_plugins.plan.options import CHOICES, DEFAULT_FRACTION, Options

with needs("cli"):
    import typer
    from rich.console import Console

DOES_NOT_FIT = 3
"""The exit code of a plan that does not fit; an error has 1, as with all commands, and bad usage 2."""

_DEFAULT = Options()


def _choice(name: str, meaning: str) -> Any:
    return typer.Option(help=f"{meaning}: {', '.join(CHOICES[name])}.")


def plan(
    model: Annotated[str, typer.Argument(help="A model's local folder, or its config.json.")],
    gpu: Annotated[str, typer.Option(help=f"{', '.join(GPUS)}, or GiB.")] = _DEFAULT.gpu,
    vllm: Annotated[bool, typer.Option("--vllm/--sglang", help="The engine.")] = True,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of an engine.")] = _DEFAULT.tp,
    gpus: Annotated[int, typer.Option(help="GPUs of the host; with 0 those of one engine.")] = _DEFAULT.gpus,
    fraction: Annotated[
        float | None,
        typer.Option(
            help="Of the GPU, as vLLM's --gpu-memory-utilization or SGLang's --mem-fraction-static. "
            f"By default {DEFAULT_FRACTION['vllm']} and {DEFAULT_FRACTION['sglang']}."
        ),
    ] = None,
    kv_gib: Annotated[float, typer.Option(help="KV cache on each GPU, in place of a fraction.")] = _DEFAULT.kv_gib,
    max_running: Annotated[int, typer.Option(help="Requests that the engine runs at once.")] = _DEFAULT.max_running,
    dtype: Annotated[str, _choice("dtype", "What the engine computes in")] = _DEFAULT.dtype,
    kv_dtype: Annotated[str, _choice("kv_dtype", "Of the KV cache")] = _DEFAULT.kv_dtype,
    level: Annotated[int, typer.Option(help="Of the engine's sleeps: 1 or 2.")] = _DEFAULT.level,
    from_host: Annotated[bool, typer.Option("--from-host", help="Send the weights from host memory.")] = False,
    share_host_backups: Annotated[
        bool, typer.Option("--share-host-backups", help="Several engines keep one copy of equal weights.")
    ] = False,
    trainer: Annotated[str, _choice("trainer", "How processes share the trainer's state")] = _DEFAULT.trainer,
    optimizer: Annotated[str, _choice("optimizer", "The optimiser")] = _DEFAULT.optimizer,
    precision: Annotated[str, _choice("precision", "Parameters and states")] = _DEFAULT.precision,
    micro_tokens: Annotated[int, typer.Option(help="Tokens of a micro-batch of one process.")] = _DEFAULT.micro_tokens,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing/--no-checkpointing", help="Keep each layer's input only.")
    ] = True,
    offload: Annotated[str, _choice("offload", "What leaves the GPU for a rollout")] = _DEFAULT.offload,
    bucket_mib: Annotated[int, typer.Option(help="The largest bucket of an update.")] = _DEFAULT.bucket_mib,
    host_gib: Annotated[float, typer.Option(help="The host's memory; with 0 it is not checked.")] = _DEFAULT.host_gib,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw the steps into this .png, .svg or .pdf.")] = None,
) -> None:
    """Show what fits before anything starts: the GPU's memory in each step, and the host's.

    Exit code 3 if it does not fit.
    """
    from rl_memory_plugins.plan import plan as make
    from rl_memory_plugins.plan.picture import draw
    from rl_memory_plugins.plan.show import show

    options = {
        **dict(gpu=gpu, tp=tp, gpus=gpus, fraction=fraction, kv_gib=kv_gib, max_running=max_running),
        **dict(dtype=dtype, kv_dtype=kv_dtype, level=level, from_host=from_host, offload=offload),
        **dict(share_host_backups=share_host_backups, trainer=trainer, optimizer=optimizer, precision=precision),
        **dict(micro_tokens=micro_tokens, checkpointing=checkpointing, bucket_mib=bucket_mib, host_gib=host_gib),
        "engine": "vllm" if vllm else "sglang",
    }
    try:
        if picture is not None and picture.suffix not in (".png", ".svg", ".pdf"):
            raise InvalidRequestError(
                f"a picture's name ends in .png, .svg or .pdf, not as {picture.name!r}",
                field="picture",
                got=str(picture),
                allowed=[".png", ".svg", ".pdf"],
            )
        made = make(model, **options)
        if as_json:
            typer.echo(json.dumps(made.to_record(), indent=2))
        else:
            show(made, Console())
        if picture is not None:
            draw(made, picture)
    except RLMemoryError as error:
        typer.echo(json.dumps(error.to_record()) if as_json else f"{error.code}: {error.message}", err=True)
        raise typer.Exit(1) from None
    if not made.fits:
        raise typer.Exit(DOES_NOT_FIT)
