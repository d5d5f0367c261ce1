"""`tpu-kernels run`: a script as one process a chip."""

from __future__ import annotations

from typing import Annotated, cast

import typer

from ..launch import Target, launch
from .emulate import CONTEXT_SETTINGS as CONTEXT_SETTINGS


def run(
    ctx: typer.Context,
    nproc_per_node: Annotated[
        int | None, typer.Option(help="Ranks on this host; as many as there are chips unless given.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, tpu, or cpu (with gloo).")] = "auto",
    nnodes: Annotated[str | None, typer.Option(help="Hosts, where the TPU slice does not tell.")] = None,
    node_rank: Annotated[str | None, typer.Option(help="Which of them this is.")] = None,
    rdzv_backend: Annotated[str | None, typer.Option(help="torchrun's, such as c10d.")] = None,
    rdzv_endpoint: Annotated[str | None, typer.Option(help="Where the hosts meet, host:port.")] = None,
    rdzv_id: Annotated[str | None, typer.Option(help="A name of the job, the same on each host.")] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="The program is a module, as after python -m.")
    ] = False,
) -> None:
    """Run a script with its arguments as one rank a chip, by torchrun; where one fails, all are ended.

    Example: tpu-kernels run --nproc-per-node 8 generate.py --tokens 32
    """
    if not ctx.args:
        raise typer.BadParameter("give a script, as in: tpu-kernels run --nproc-per-node 8 generate.py")
    rendezvous = {
        "nnodes": nnodes,
        "node_rank": node_rank,
        "rdzv_backend": rdzv_backend,
        "rdzv_endpoint": rdzv_endpoint,
        "rdzv_id": rdzv_id,
    }
    launch(
        ctx.args,
        nproc_per_node=nproc_per_node,
        target=cast(Target, device),
        rendezvous={name: value for name, value in rendezvous.items() if value is not None},
        module=module,
    )
