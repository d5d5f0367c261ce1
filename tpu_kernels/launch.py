"""`tpu-kernels run`: a script as one process a chip, by torchrun, with the environment that torch_tpu wants.

torch.distributed is the engine: it rendezvouses, starts the ranks and, where one ends in failure, ends the others.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from . import device
from .errors import LaunchError

Target = Literal["auto", "tpu", "cpu"]

# What torch_tpu tells of the hosts of a job, by torchrun's name for it.
_FROM_TPU = {
    "nnodes": "NNODES",
    "node_rank": "NODE_RANK",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}


def launch(
    program: Sequence[str],
    *,
    nproc_per_node: int | None = None,
    target: Target = "auto",
    rendezvous: Mapping[str, str] | None = None,
    module: bool = False,
) -> None:
    """Runs a program as several ranks, and waits for them.

    On a TPU each rank has a chip: `torch.device("tpu", 0)` in each, and the backend `tpu_dist`. On the CPU they use
    gloo. In both, `torch.distributed` and transformers' `distributed_config` find the ranks by themselves.

    Args:
        program: A script, and its arguments.
        nproc_per_node: Ranks on this host; as many as there are chips unless given.
        target: Where they compute; `auto` takes TPUs where there are any.
        rendezvous: Options of torchrun's by name, such as `nnodes` and `rdzv_endpoint`. On a TPU slice of several hosts
            they are known by its environment.
        module: `program` begins with a module's name, as after `python -m`.

    Raises:
        LaunchError: There are no such chips, or a rank failed; the message says which and how.

    Example:
        >>> launch(["generate.py", "--tokens", "32"], nproc_per_node=8)  # doctest: +SKIP
    """
    if target not in get_args(Target):
        raise LaunchError(f"there is no device {target!r}; choose one of {', '.join(get_args(Target))}")
    chips = device.attached_chips()
    where = target if target != "auto" else "tpu" if chips else "cpu"
    count = _ranks(nproc_per_node, chips, where)
    options = dict(rendezvous or {})
    if where == "tpu":
        options = _tpu_options(options, count)
    else:
        # Ranks share the cores; else each would take all of them.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if not any(name.startswith(("nnodes", "rdzv", "master")) for name in options):
        options["standalone"] = ""
    _run(options, count, program, module)


def _ranks(nproc_per_node: int | None, chips: int, where: str) -> int:
    if nproc_per_node is not None and nproc_per_node < 1:
        raise LaunchError(f"--nproc-per-node is {nproc_per_node}; it must be at least 1")
    if where == "cpu":
        return nproc_per_node or 1
    if not chips:
        raise LaunchError("there is no TPU on this machine; give --device cpu to run the ranks on the CPU")
    if nproc_per_node is not None and nproc_per_node > chips:
        raise LaunchError(
            f"--nproc-per-node is {nproc_per_node}, and this machine has {chips} chips: a rank needs one of its own; "
            f"give at most {chips}, and --nnodes for more hosts"
        )
    return nproc_per_node or chips


def _tpu_options(options: dict[str, str], count: int) -> dict[str, str]:
    """torchrun's options, completed by what torch_tpu finds out about the slice; sets its environment."""
    import torch

    nodes = options.get("nnodes")
    try:
        torch.tpu.distributed.set_tpu_launch_env(  # type: ignore[attr-defined]
            nnodes=int(nodes) if nodes and nodes.isdigit() else None, nproc_per_node=count
        )
    except ValueError as error:
        raise LaunchError(f"the TPU slice cannot be launched on: {error}") from error
    several = int(os.environ.get("NNODES", "1")) > 1
    if several and not any(name.startswith("rdzv") for name in options):
        found = {name: os.environ[variable] for name, variable in _FROM_TPU.items() if variable in os.environ}
        options = found | options
    return options


def _run(options: Mapping[str, str], count: int, program: Sequence[str], module: bool) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = [f"--nproc-per-node={count}"]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        arguments.append(f"{flag}={value}" if value else flag)
    try:
        run.run(run.parse_args([*arguments, *(["--module"] if module else []), *program]))
    except ChildFailedError as error:
        raise LaunchError(_failure(error)) from error


def _failure(error: object) -> str:
    """Which rank failed first, and how. Its own words are above, on stderr."""
    rank, failure = error.get_first_failure()  # type: ignore[attr-defined]
    how = f"exit status {failure.exitcode}"
    if failure.exitcode < 0:
        how = f"signal {signal.Signals(-failure.exitcode).name}"
    said = f"; it said: {failure.message}" if failure.exitcode > 0 and _told(failure.message) else ""
    return f"rank {rank} (process {failure.pid}) ended with {how}{said}; the other ranks were ended with it"


def _told(message: object) -> bool:
    # Without a record of its own torchrun has a hint where to look for one.
    return isinstance(message, str) and not message.startswith(("Signal", "To enable"))
