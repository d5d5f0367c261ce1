"""Compiles one program for a TPU topology. Run as a process of its own, because libtpu takes a process over,
and a compiler that crashes should only lose that::

    python -m tpu_kernels.analysis.worker PROGRAM TOPOLOGY DEVICES RESULT PARENT [--every-schedule]

PROGRAM is a file of serialized StableHLO; RESULT is where the outcome goes, as JSON (`outcome.Outcome`);
the compiler's files go beside it. PARENT is the process that waits for it. The outcome has the schedules of the
program's kernels, or of all its ops.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from ..orphans import die_with
from .outcome import Outcome, pack

# Read when jax and libtpu load: there is no TPU to look for, on this machine or through the metadata server.
_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
# Another library than libtpu in these would be loaded in its place.
_UNSET = ("TPU_LIBRARY_PATH", "PJRT_NAMES_AND_LIBRARY_PATHS")

# What makes libtpu write each kernel's schedule, after its last pass only.
_DUMP_FLAGS = (
    "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_"
)
_SCHEDULE = r"\d+-(?P<name>.+)-\d+-final_{}\.txt"
_KERNEL = re.compile(r'^\s+(?:ROOT )?%(\S+) = .*custom_call_target="tpu_custom_call"', re.MULTILINE)
_OP = re.compile(r"^\s+(?:ROOT )?%(\S+) = ", re.MULTILINE)

# The kernels themselves, megabytes of base64.
_KERNEL_BODY = re.compile(r'"body":"[^"]*"')


def compile_program(
    module: bytes, topology: str, devices: int, folder: Path, *, every_schedule: bool = False
) -> Outcome:
    """Compiles serialized StableHLO for the first `devices` devices of `topology`.

    Args:
        module: The program.
        topology: libtpu's name, e.g. `v6e:2x2`.
        devices: How many the program is partitioned over.
        folder: Takes the compiler's own files.
        every_schedule: Keep the schedules of all ops, not only of kernels.
    """
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.interpreters import mlir
    from jaxlib import xla_client
    from jaxlib.mlir.dialects import stablehlo

    description = topologies.get_topology_desc(topology_name=topology, platform="tpu")
    available: list[Any] = list(description.devices)
    if len(available) < devices:
        return Outcome(error=f"The program is for {devices} devices; {topology} has {len(available)}.")
    chosen = available[:devices]
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, devices
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[d.id for d in chosen]]))
    build = options.executable_build_options
    build.use_spmd_partitioning = build.use_shardy_partitioner = True
    # The optimised program as text, from the compiler itself: jaxlib cannot read some back from the executable.
    build.debug_options.xla_dump_to = str(folder)
    build.debug_options.xla_dump_hlo_as_text = True
    build.debug_options.xla_dump_hlo_as_long_text = True
    with mlir.make_ir_context() as context:
        computation = stablehlo.deserialize_portable_artifact(context, module)
        started = time.perf_counter()
        try:
            # Layouts of arguments and results are left to XLA, as they are when a program runs.
            executable = chosen[0].client.compile(computation, xla_client.DeviceList(tuple(chosen)), options)
        except jax.errors.JaxRuntimeError as error:
            return Outcome(error=str(error), seconds=time.perf_counter() - started)
        seconds = time.perf_counter() - started
    memory = executable.get_compiled_memory_stats()
    cost = executable.cost_analysis()
    # The last one also tells what each kernel came to use.
    [hlo] = folder.glob("*.after_codegen.txt")
    text = hlo.read_text()
    scheduled = set((_OP if every_schedule else _KERNEL).findall(text))
    return Outcome(
        seconds=seconds,
        hlo=_KERNEL_BODY.sub('"body":""', text),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        flops=cost.get("flops"),
        bytes_accessed=cost.get("bytes accessed"),
        bundles=_schedules(folder, "bundles", scheduled),
        utilization=_schedules(folder, "hlo-static-per-bundle-utilization", scheduled),
    )


def _schedules(folder: Path, content: str, scheduled: set[str]) -> dict[str, str]:
    """The files on the ops `scheduled` among the many in `folder`, packed."""
    found = {}
    for path in folder.iterdir():
        match = re.fullmatch(_SCHEDULE.format(content), path.name)
        if match and match["name"] in scheduled:
            found[match["name"]] = pack(path.read_text(errors="replace"))
    return found


def main() -> None:
    program, topology, devices, result, parent, *options = sys.argv[1:]
    die_with(int(parent))
    os.environ.update(_ENVIRONMENT)
    for name in _UNSET:
        os.environ.pop(name, None)
    folder = Path(result).parent / "dump"
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    os.environ["LIBTPU_INIT_ARGS"] = f"{flags} {_DUMP_FLAGS.format(folder=folder)}".strip()
    every_schedule = "--every-schedule" in options
    outcome = compile_program(
        Path(program).read_bytes(), topology, int(devices), folder, every_schedule=every_schedule
    )
    Path(result).write_text(outcome.to_json())


if __name__ == "__main__":
    main()
