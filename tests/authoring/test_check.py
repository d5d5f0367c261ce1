"""`check`: it finds faults that were put into a kernel, names each, and says where."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tpu_kernels.authoring import build, check, init
from tpu_kernels.authoring.checks import CHECKS
from tpu_kernels.authoring.checks.report import Outcome
from tpu_kernels.authoring.checks.subject import Subject
from tpu_kernels.errors import BuildError

PACKAGE = "torch-ext/faulty"

UNORDERED = """
def _swiglu(gate, up, *, tiles, interpret=False):
    from jax.experimental.pallas import tpu as pltpu
    return pl.pallas_call(
        _block,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.VMEM)],
        out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
        out_shape=jax.ShapeDtypeStruct(gate.shape, gate.dtype),
        scratch_shapes=[pltpu.VMEM(gate.shape, gate.dtype), pltpu.SemaphoreType.DMA],
        interpret=interpret,
    )(gate, up)


def _block(gate_ref, up_ref, out_ref, buffer_ref, semaphore):
    from jax.experimental.pallas import tpu as pltpu
    copy = pltpu.make_async_copy(gate_ref, buffer_ref, semaphore)
    copy.start()
    out_ref[...] = jax.nn.silu(buffer_ref[...]) * up_ref[...]
    copy.wait()
"""


@dataclass(frozen=True)
class Fault:
    """A fault: what is edited (path in the package or the source, old, new), and how it is found.

    Attributes:
        check: The check that finds it.
        message: What the finding has in it, a pattern.
        at: File and a text of the line that the finding names.
        template: The kernel it is put into.
        files: Files that are added.
    """

    edits: tuple[tuple[str, str, str], ...]
    check: str
    message: str
    at: tuple[str, str] | None = None
    template: str = "elementwise"
    files: dict[str, str] = field(default_factory=dict)


def code(path: str, old: str, new: str) -> tuple[str, str, str]:
    return f"{PACKAGE}/{path}", old, new


FAULTS = {
    "a race": Fault(
        (
            code("kernel.py", "def _swiglu(", f"{UNORDERED}\n\ndef _unused("),
            code("kernel.py", "def _block(gate_ref: Any", "def _unused_block(gate_ref: Any"),
        ),
        "memory",
        "race between a (read and a write|write and a read)",
        ("kernel.py", "copy.start()"),
    ),
    "an off-by-one block index": Fault(
        (code("kernel.py", "[block, block]", "[pl.BlockSpec(block.block_shape, lambda i, j: (i + 1, j)), block]"),),
        "memory",
        r'Out-of-bounds block index \(1, 0\) for input "gate_ref"',
        ("kernel.py", "pl.pallas_call("),
    ),
    "uninitialised memory": Fault(
        (code("kernel.py", "jnp.zeros_like(sum_ref)", "sum_ref[...]"),),
        "memory",
        "uninitialised memory reaches .* elements of the result",
        ("kernel.py", "def matmul"),
        template="matmul",
    ),
    "a fixed op name": Fault(
        (code("ops.py", "DTYPES =", 'torch.library.define("faulty::swiglu", "(Tensor x) -> Tensor")\nDTYPES ='),),
        "lint",
        "fixed op name 'faulty::swiglu'",
        ("ops.py", "torch.library.define"),
    ),
    "an absolute import": Fault(
        (code("kernel.py", "from . import reference", "from faulty import reference"),),
        "lint",
        "absolute import of 'faulty'",
        ("kernel.py", "from faulty"),
    ),
    "a reshape on a ref": Fault(
        (code("kernel.py", "gate_ref[...].astype", "gate_ref.reshape(8, 128)[...].astype"),),
        "lint",
        r"reshape on a ref, gate_ref.reshape\(...\)",
        ("kernel.py", "gate_ref.reshape"),
    ),
    "work at import": Fault(
        (code("kernel.py", "OFFERED =", "ZERO = jnp.zeros((8, 128))\nOFFERED ="),),
        "lint",
        r"work at import, jnp.zeros\(...\)",
        ("kernel.py", "ZERO ="),
    ),
    "no reference": Fault(
        (code("ops.py", "    reference=reference.swiglu,\n", ""),),
        "lint",
        "the op has no reference",
        ("ops.py", "@op("),
    ),
    "a VMEM overflow": Fault(
        (
            code("kernel.py", "jnp.float32)]", "jnp.float32), pltpu.VMEM((1 << 14, 1 << 12), jnp.float32)]"),
            code("kernel.py", "sum_ref: Any)", "sum_ref: Any, spare_ref: Any)"),
        ),
        "compile",
        r"matmul one-block does not compile for v6e: vmem overflow: kernel matmul needs .* allowed",
        template="matmul",
    ),
    "a wrong gradient": Fault(
        (code("gradient.py", "jax.vjp(reference, *arrays)[1](grad)", "jax.vjp(reference, *arrays)[1](2 * grad)"),),
        "gradients",
        "wrong gradient in gate",
        ("kernel.py", "def swiglu"),
    ),
    "a reference that disagrees": Fault(
        (code("reference.py", "jax.nn.silu", "jax.nn.gelu"),),
        "numerics",
        "kernel and reference disagree: has a relative error of",
        ("kernel.py", "def swiglu"),
    ),
    "an unknown generation": Fault(
        (("build.toml", '"v6e"', '"v9"'),),
        "layout",
        "there is no TPU 'v9'",
        ("../../build.toml", "generations ="),
    ),
    "an undeclared generation": Fault(
        (("build.toml", '"v6e", ', ""),),
        "declaration",
        "the table is for v6e, a generation that build.toml does not declare",
        files={f"{PACKAGE}/tuned/v6e.json": "[]"},
    ),
    "an op that is not there": Fault(
        (("build.toml", "[tpu.ops.swiglu]", "[tpu.ops.geglu]"),),
        "declaration",
        "tpu.ops.geglu: the package exports no such op",
        ("../../build.toml", "[tpu.ops.geglu]"),
    ),
    "an op that takes more than it says": Fault(
        (code("ops.py", "DTYPES = (torch.bfloat16, torch.float32)", "DTYPES = (torch.float32,)"),),
        "declaration",
        "the op does not take bfloat16, as it declares|is refused: InputError: gate has dtype torch.bfloat16",
    ),
}  # fmt: skip


def look(source: Path, name: str, *, quick: bool) -> Outcome:
    """Makes a check in this process."""
    out = source.with_name("build")
    if name not in ("layout", "lint"):
        build(source, out)
    [wanted] = [each for each in CHECKS if each.name == name]
    return wanted.run(Subject(source.resolve(), out, quick))


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_it_finds_and_names(fault: Fault, tmp_path: Path) -> None:
    source = init("acme/faulty", fault.template, tmp_path / "faulty")
    for path, old, new in fault.edits:
        text = (source / path).read_text()
        assert old in text
        (source / path).write_text(text.replace(old, new, 1))
    for path, content in fault.files.items():
        (source / path).parent.mkdir(exist_ok=True)
        (source / path).write_text(content)
    outcome = look(source, fault.check, quick=True)
    assert outcome.status == "failed"
    errors = [finding for finding in outcome.findings if finding.level == "error"]
    found = next((each for each in errors if re.search(fault.message, each.message)), None)
    assert found is not None, "\n".join(map(str, errors))
    if fault.at is not None:
        path, text = fault.at
        assert found.file is not None
        assert (source / found.file).samefile(source / PACKAGE / path)
        assert found.line is not None
        assert text in (source / found.file).read_text().splitlines()[found.line - 1]


def test_a_check_that_kills_its_process_is_a_finding_and_the_next_one_is_made(tmp_path: Path) -> None:
    source = init("acme/faulty", folder=tmp_path / "faulty")
    reference = source / PACKAGE / "reference.py"
    reference.write_text(
        reference.read_text().replace("    wide =", "    import os\n\n    os.abort()\n    wide =")
    )
    report = check(source, quick=True, only=["lint", "numerics", "stock"])
    assert [outcome.status for outcome in report.outcomes] == ["passed", "failed", "passed"]
    [finding] = report.outcome("numerics").findings
    assert finding.message.startswith("the process ended in this check: signal SIGABRT")
    suite = ElementTree.fromstring(report.to_junit())
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "0")
    [failure] = suite.iter("failure")
    assert failure.get("message") == str(finding)


def test_what_cannot_be_built_is_not_run(tmp_path: Path) -> None:
    source = init("acme/faulty", folder=tmp_path / "faulty")
    (source / "README.md").unlink()
    report = check(source, quick=True, only=["layout", "numerics"])
    assert [outcome.status for outcome in report.outcomes] == ["failed", "not run"]
    assert not report.ok
    assert report.id is None


def test_it_wants_a_kernel_and_checks_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"holds no build.toml"):
        check(tmp_path)
    with pytest.raises(BuildError, match=r"no check 'numeric'; there are layout, lint"):
        check(init("acme/faulty", folder=tmp_path / "faulty"), only=["numeric"])
