"""What compilers make of the decode loop's program, in which caches are donated: a TPU's, the emulated device's."""

import hashlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tpu_kernels import analysis
from tpu_kernels.analysis.export import Program

WRITER = Path(__file__).with_name("step_on_tpu.py")
LENGTH = 2048

needs_emulation = pytest.mark.skipif(
    find_spec("lammps_jax_pjrt_cpu") is None, reason="needs the emulation extra"
)


@needs_emulation
@pytest.mark.parametrize(
    ("family", "generation"),
    [
        ("qwen3-moe", "v6e"),
        *(
            pytest.param(family, generation, marks=pytest.mark.slow)
            for family, generation in (
                ("qwen3-moe", "v5e"),
                ("qwen3-moe", "tpu7x"),
                ("gpt-oss", "v6e"),
                ("gpt-oss", "tpu7x"),
                ("gemma4", "v6e"),
                ("gemma4", "tpu7x"),
            )
        ),
    ],
)
def test_a_tpu_copies_neither_caches_nor_weights(family, generation, tmp_path):
    """A whole model's step with this library's attention and experts, several in one loop."""
    path = tmp_path / "program"
    command = [sys.executable, str(WRITER), family, str(LENGTH), generation, str(path)]
    subprocess.run(
        command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, timeout=500, check=True
    )
    module = path.read_bytes()
    program = Program(module, hashlib.sha256(module).hexdigest(), 1, {})

    [report] = analysis.compile_many([analysis.Job(program, (), generation)])

    assert report.compiled
    written = re.findall(rf"= bf16\[8,\d,{LENGTH},\d+\]\S* dynamic-update-slice\(", report.hlo)
    assert len(report.kernels) == len(written) > 0  # attention and experts, keys and values of each layer
    # (A dense layer's matrix may get other tiles, once for all steps.)
    assert not [op for op in report.overhead if op.shape.count(",") > 1 and op.bytes >= 2**20]
    assert report.memory.outputs < 2**20  # the rest takes an argument's place


@pytest.mark.slow
@needs_emulation
def test_no_copy_of_the_cache_on_the_emulated_device(tmp_path):
    """In the program of the loop itself, as XLA writes it down in a process of its own."""
    command = [sys.executable, "-c", "from tpu_kernels.cli import main; main()", "bench", "decode"]
    command += ["--model", "preset:qwen3-moe", "--device", "emulated", "--experts", "stock+loop"]
    command += ["--batch", "3", "--prompt-length", "20", "--new-tokens", "16", "--repeats", "1"]
    subprocess.run(
        command,
        env=os.environ | {"XLA_FLAGS": f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"},
        timeout=500,
        check=True,
    )
    programs = [path.read_text() for path in tmp_path.glob("*cpu_after_optimizations.txt")]
    layers, cache = 2, r"f32\[3,2,64,32\]"
    # Token, finished, position, keys and values are written in place, in this program only.
    in_place = 3 + 2 * layers
    [loop] = [program for program in programs if program.partition("\n")[0].count("may-alias") == in_place]
    assert " while(" in loop
    assert len(re.findall(rf"ROOT \S+ = {cache}\S* dynamic-update-slice\(", loop)) == 2 * layers
    assert not re.findall(rf"= \(?{cache}\S* copy(?:-start)?\(", loop)
