"""The real TPU compiler, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import typer
from jax.experimental.pallas.ops.tpu import megablox
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from typer.testing import CliRunner

from tpu_kernels import analysis
from tpu_kernels.analysis import compiler, process
from tpu_kernels.cli.compile import compile as compile_command
from tpu_kernels.errors import AnalysisError, TpuKernelsError
from tpu_kernels.ops import InputError, op

from . import kernels
from .conftest import needs_libtpu
from .kernels import MIB, shape

pytestmark = needs_libtpu

TRANSPOSED = ("--static", "transpose_rhs=true")
GENERATION_NUMBERS = {"v4": 4, "v5e": 5, "v5p": 5, "v6e": 6, "tpu7x": 7}


def test_every_generation_and_its_properties() -> None:
    seen: list[str] = []
    jobs = [
        analysis.Job(kernels.generation, (shape(8, 128),), generation) for generation in GENERATION_NUMBERS
    ]
    reports = analysis.compile_many(jobs, workers=2, on_report=lambda report: seen.append(report.target))
    for (generation, number), report in zip(GENERATION_NUMBERS.items(), reports, strict=True):
        assert report.compiled, report.failure
        assert (report.target, report.generation) == (generation, generation)
        assert report.memory.outputs == number * 8 * 128 * 4
        assert [kernel.name for kernel in report.kernels] == ["generation"]
        assert report.versions.keys() == {"jax", "jaxlib", "libtpu"}
    assert sorted(seen) == sorted(GENERATION_NUMBERS)


def test_report() -> None:
    report = analysis.compile(kernels.blocks, shape(2048, 1024), tpu="v6e", static={"rows": 256})
    assert report.compiled
    assert report.evidence == "compiled"
    assert (report.memory.arguments, report.memory.outputs) == (8 * MIB, 8 * MIB)
    assert report.memory.total == 16 * MIB + report.memory.temporaries + report.memory.code
    assert (report.flops, report.bytes_accessed) == (2048 * 1024, 16 * MIB)
    [kernel] = report.kernels
    assert (kernel.name, kernel.vmem_limit_bytes) == ("blocks", 8 * MIB)
    assert kernel.vmem_bytes == 4 * MIB  # two buffers of two blocks
    assert report.overhead == ()
    assert "kernel   blocks: VMEM 4.0 MiB of 8.0 MiB" in str(report)
    document = json.loads(report.to_json())
    assert document["memory"]["arguments"] == 8 * MIB
    assert document["kernels"][0]["vmem_bytes"] == 4 * MIB
    assert "custom-call" in report.hlo


def test_too_much_vmem() -> None:
    report = analysis.compile(kernels.blocks, shape(4096, 1024), tpu="v5e")
    assert not report.compiled
    failure = report.failure
    assert (failure.stage, failure.kernel, failure.memory) == ("compile", "blocks", "vmem")
    assert (failure.asked_bytes, failure.allowed_bytes) == (16 * MIB, 8 * MIB)
    assert "kernel blocks needs 16.0 MiB of VMEM, 2 times the 8.0 MiB allowed" in str(report)
    assert failure.fits == "f32[512,1024]"
    assert failure.summary.endswith(
        "with all blocks cut alike, f32[512,1024] in place of f32[1024,1024] would fit"
    )
    assert [(part.window, part.buffers, part.bytes) for part in failure.allocations] == [
        ("f32[1024,1024]", 2, 8 * MIB)
    ] * 2
    assert "RESOURCE_EXHAUSTED" in failure.text
    assert analysis.compile(kernels.blocks, shape(4096, 1024), tpu="v5e", static={"rows": 512}).compiled
    assert json.loads(report.to_json())["failure"]["asked_bytes"] == 16 * MIB


def test_a_kernel_of_another_library() -> None:
    # It has no name of its own and a grid of unknown length, and jaxlib cannot read the executable's program.
    shapes = (
        shape(512, 2048, dtype="bfloat16"),
        shape(8, 2048, 1536, dtype="bfloat16"),
        shape(8, dtype="int32"),
    )
    report = analysis.compile(megablox.gmm, *shapes, static={"tiling": (128, 1024, 512)})
    assert report.compiled, report.failure
    assert [kernel.name for kernel in report.kernels] == ["gmm"]
    assert report.vmem_bytes > 2 * (128 * 1024 + 1024 * 512) * 2
    too_large = analysis.compile(megablox.gmm, *shapes, static={"tiling": (512, 2048, 1536)}, tpu="v4")
    assert too_large.failure.fits is not None
    assert too_large.failure.summary.startswith("kernel gmm needs ")


def test_what_mosaic_refuses() -> None:
    report = analysis.compile(kernels.misaligned, shape(1, dtype="int32"), shape(8, 512))
    assert report.failure.stage == "compile"
    assert report.failure.kernel == "misaligned"
    assert "multiple of 128" in report.failure.summary
    assert Path(report.failure.location.rsplit(":", 1)[0]).name == "kernels.py"


def test_what_pallas_refuses() -> None:
    report = analysis.compile(kernels.sorting, shape(64, 128))
    assert report.failure.stage == "lower"
    assert "Unimplemented primitive" in report.failure.summary
    assert "Traceback" in report.failure.text


def test_copies_of_weights_are_called_out() -> None:
    # As [8, 704, 2816] they need less padding to tiles, so that is how XLA stores them.
    report = analysis.compile(kernels.row_major_weights, shape(8, 2816, 704, dtype="bfloat16"))
    copy = report.overhead[0]
    assert (copy.kind, copy.shape, copy.bytes) == ("layout copy", "bf16[8,2816,704]", 8 * 2816 * 704 * 2)
    assert copy.source == "weights"
    assert [layout.split(":")[0] for layout in copy.layouts] == ["1,2,0", "2,1,0"]
    assert "layout copy bf16[8,2816,704], 30.2 MiB of weights" in str(report)


def test_a_slice() -> None:
    mesh = AbstractMesh((8,), ("x",))

    def product(x):
        def local(x):
            return jax.lax.psum(x @ x.T, "x")

        return jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec(None, "x"), out_specs=PartitionSpec())(
            x
        )

    x = jax.ShapeDtypeStruct((512, 4096), "bfloat16", sharding=NamedSharding(mesh, PartitionSpec(None, "x")))
    eight, four = analysis.compile_many([analysis.Job(product, (x,), tpu) for tpu in ("v6e-8", "v6e-4")])
    assert eight.compiled, eight.failure
    assert eight.memory.arguments == 512 * 4096 * 2 // 8
    assert "collective" in {op.kind for op in eight.ops}
    assert four.failure.summary == "The program is for 8 devices; v6e:2x2 has 4."


def test_a_compiler_that_hangs() -> None:
    report = analysis.compile(kernels.twice, shape(8, 128), timeout=0.001)
    assert report.failure.stage == "timeout"
    assert "did not finish within 0.001 s" in str(report)
    assert analysis.compile(kernels.twice, shape(8, 128)).compiled


def test_a_compiler_that_crashes(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--no_such_flag=1")
    report = analysis.compile(kernels.twice, shape(8, 128))
    assert report.failure.stage == "crash"
    assert "no_such_flag" in report.failure.text
    assert not list(cache_folder.glob("*"))


def test_cache(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    started = []
    compile_in_process = process.compile_in_process

    def counted(*args):
        started.append(args)
        return compile_in_process(*args)

    monkeypatch.setattr(process, "compile_in_process", counted)
    x = shape(8, 128)
    first, same = analysis.compile_many([analysis.Job(kernels.twice, (x,))] * 2)
    assert len(started) == 1
    assert not first.cached
    assert same == first
    # Where a program is traced from does not matter.
    again = analysis.compile(kernels.twice_elsewhere, x)
    assert len(started) == 1
    assert again.cached
    assert (again.memory, again.kernels, again.seconds) == (first.memory, first.kernels, first.seconds)
    # The target, the shapes and the compiler's flags do.
    analysis.compile(kernels.twice, x, tpu="v5e")
    analysis.compile(kernels.twice, shape(16, 128))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=8192")
    analysis.compile(kernels.twice, x)
    assert len(started) == 4
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    for entry in cache_folder.iterdir():
        entry.write_text(entry.read_text()[:100])
    assert analysis.compile(kernels.twice, x).memory == first.memory
    assert len(started) == 5
    assert analysis.compile(kernels.twice, x).cached


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TPU_KERNELS_CACHE", str(tmp_path / "file"))
    assert analysis.compile(kernels.twice, shape(8, 128)).compiled


def test_arrays_and_tensors() -> None:
    def indexed(x, tree):
        return x + tree["index"].astype(x.dtype)

    index = torch.empty(256, 128, dtype=torch.int64, device="meta")
    x = torch.empty(256, 128, dtype=torch.bfloat16, device="meta")
    of_tensors = analysis.compile(indexed, x, {"index": index})
    assert of_tensors.compiled
    # 64-bit integers become 32-bit ones.
    assert of_tensors.memory.arguments == 256 * 128 * (2 + 4)
    of_arrays = analysis.compile(
        indexed, jnp.zeros((256, 128), jnp.bfloat16), {"index": np.zeros((256, 128), np.int64)}
    )
    assert of_arrays.cached


def _scaled(x, *, scale, dtype, bias=None, tpu, interpret):
    assert (tpu, interpret) == ("v5p", False)
    return (kernels.twice(x) * scale).astype(dtype)


@op(kernel=_scaled, reference=lambda x, *, scale, dtype, bias: x)
def scaled(x: torch.Tensor, scale: int, dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x`, scaled."""
    if x.dim() != 2:
        raise InputError("x must have 2 axes")
    return torch.empty_like(x, dtype=dtype)


def test_an_op() -> None:
    report = analysis.compile(
        scaled, torch.empty(256, 128, device="meta"), tpu="v5p", static={"scale": 2, "dtype": torch.bfloat16}
    )
    assert report.compiled, report.failure.text
    assert report.function == "scaled"
    assert report.memory.outputs == 256 * 128 * 2
    assert [kernel.name for kernel in report.kernels] == ["twice"]
    with pytest.raises(AnalysisError, match="missing a required argument: 'scale'"):
        analysis.compile(scaled, shape(8, 128), tpu="v5p")
    with pytest.raises(InputError, match="2 axes"):
        analysis.compile(scaled, shape(8), tpu="v5p", static={"scale": 2, "dtype": torch.bfloat16})


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AnalysisError, match="pip install libtpu"):
        analysis.compile(kernels.twice, shape(8, 128))
    monkeypatch.setattr(compiler.platform, "machine", lambda: "arm64")
    with pytest.raises(TpuKernelsError, match="Linux on x86-64 only; this is linux on arm64"):
        analysis.compile(kernels.twice, shape(8, 128))


def test_no_torch_and_no_tpu_client_are_needed() -> None:
    code = (
        "import sys\n"
        "from tpu_kernels import analysis\n"
        "assert not {'torch', 'jax', 'numpy'} & sys.modules.keys()\n"
        "import jax\n"
        "x = jax.ShapeDtypeStruct((256, 256), 'bfloat16')\n"
        "assert analysis.compile(jax.numpy.matmul, x, x).compiled\n"
        "assert 'torch' not in sys.modules\n"
        "assert jax.devices()[0].platform == 'cpu'\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


@pytest.mark.skipif(find_spec("lammps_jax_pjrt_cpu") is None, reason="needs the emulation extra")
def test_beside_the_emulated_device() -> None:
    code = (
        "from tpu_kernels import analysis, emulation\n"
        "emulation.install()\n"
        "import torch, jax.numpy as jnp\n"
        "x = torch.ones(256, 256, device='tpu')\n"
        "assert x.sum().item() == 256 * 256\n"
        "report = analysis.compile(jnp.matmul, x, x)\n"
        "assert report.compiled, report.failure\n"
        "assert x.sum().item() == 256 * 256\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_command_line() -> None:
    app = typer.Typer()
    app.command()(compile_command)
    arguments = ["tpu-kernels/ragged-dot", "--op", "ragged_dot", "--version", "1", "--tpu", "v5e,v6e"]
    arguments += ["--arg", "bfloat16[64,2048]", "--arg", "bfloat16[8,1536,2048]", "--arg", "int32[8]"]
    done = CliRunner().invoke(app, [*arguments, *TRANSPOSED])
    assert done.exit_code == 0, done.output
    assert "ragged_dot for v5e: compiled" in done.stdout
    assert "kernel   ragged_dot: VMEM" in done.stdout
    done = CliRunner().invoke(app, [*arguments, *TRANSPOSED, "--json"])
    assert [report["target"] for report in json.loads(done.stdout)] == ["v5e", "v6e"]
    wrong_weights = CliRunner().invoke(app, [*arguments, "--static", "transpose_rhs=false"])
    assert isinstance(wrong_weights.exception, TpuKernelsError)
    in_time = CliRunner().invoke(app, [*arguments, "--static", "preferred_element_type=float32", *TRANSPOSED])
    hurried = CliRunner().invoke(app, [*arguments, *TRANSPOSED, "--tpu", "v4", "--timeout", "0.001"])
    assert (in_time.exit_code, hurried.exit_code) == (0, 1)
    assert "no (timeout)" in hurried.stdout
    for wrong in (
        ["--arg", "bfloat17[2]"],
        ["--arg", "2,3"],
        ["--static", "transpose_rhs"],
        ["--op", "spam"],
    ):
        assert CliRunner().invoke(app, [*arguments, *wrong]).exit_code == 2
