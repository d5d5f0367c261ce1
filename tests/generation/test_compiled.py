"""What compilers make of a loop of decode steps over donated caches.

For v6e the loop is one in JAX, of the form of `steps.make_decode`, with the attention kernel in it, because on the
emulated device kernels are interpreted.
"""

import functools
import importlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import jax
import jax.export
import jax.numpy as jnp
import pytest

import tpu_kernels
from tpu_kernels.analysis import process
from tpu_kernels.analysis.export import Program
from tpu_kernels.analysis.outcome import Outcome
from tpu_kernels.analysis.target import parse_target

BATCH, HEADS, GROUPS, LENGTH, DIM, WIDTH, LAYERS, STEPS = 8, 4, 8, 4096, 128, 256, 2, 16


def loop(attention, x, weights, position, *caches):
    def body(carry, _):
        x, position, *caches = carry
        for layer, (query, key, value, out) in enumerate(weights):
            for place, projection in enumerate((key, value), start=2 * layer):
                new = (x @ projection).reshape(BATCH, HEADS, 1, DIM)
                caches[place] = jax.lax.dynamic_update_slice(caches[place], new, (0, 0, position, 0))
            queries = (x @ query).reshape(BATCH, HEADS * GROUPS, 1, DIM)
            ends = jnp.broadcast_to(position + 1, (BATCH,)).astype(jnp.int32)
            mixed = attention(queries, *caches[2 * layer : 2 * layer + 2], ends, tpu="v6e")
            x = x + mixed.reshape(BATCH, -1) @ out
        return (x, position + 1, *caches), x.sum()

    return jax.lax.scan(body, (x, position, *caches), None, length=STEPS)


@pytest.mark.slow
def test_no_copy_of_the_cache_on_v6e():
    kernel = tpu_kernels.get_kernel("tpu-kernels/attention", version=1)
    attention = importlib.import_module(f"{kernel.__name__}.functions").decode_attention

    def array(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype)

    narrow, wide = HEADS * DIM, HEADS * GROUPS * DIM
    weights = [(array(WIDTH, wide), array(WIDTH, narrow), array(WIDTH, narrow), array(wide, WIDTH))] * LAYERS
    caches = [array(BATCH, HEADS, LENGTH, DIM)] * (2 * LAYERS)
    jitted = jax.jit(functools.partial(loop, attention), donate_argnums=tuple(range(3, 3 + len(caches))))
    checks = [jax.export.DisabledSafetyCheck.custom_call("ALL")]
    exported = jax.export.export(jitted, platforms=["tpu"], disabled_checks=checks)(
        array(BATCH, WIDTH), weights, array(dtype="int32"), *caches
    )

    program = Program(exported.mlir_module_serialized, "", 1, {})
    outcome = process.compile_in_process(program, parse_target("v6e"), timeout=300)

    assert isinstance(outcome, Outcome)
    assert outcome.hlo
    cache = rf"bf16\[{BATCH},{HEADS},{LENGTH},{DIM}\]"
    assert re.search(rf"{cache}\S* dynamic-update-slice\(", outcome.hlo)
    copies = [
        line for line in outcome.hlo.splitlines() if re.search(rf"= \(?{cache}\S* copy(-start)?\(", line)
    ]
    assert not copies
    one = BATCH * HEADS * LENGTH * DIM * 2
    assert outcome.temporary_bytes < one
    assert outcome.alias_bytes >= len(caches) * one


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lammps_jax_pjrt_cpu") is None, reason="needs the emulation extra")
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
