"""Stock `kernels` accepts what is built here: its metadata, its digests, its loader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tpu_kernels.authoring import build

from .conftest import MakeSource

pytest.importorskip("kernels")


def test_stock_reads_the_metadata_and_computes_the_same_digests(
    make_source: MakeSource, tmp_path: Path
) -> None:
    from kernels._rust import Backend, Digest, DigestAlgorithm, Metadata

    build(make_source(), tmp_path / "out")
    variant = tmp_path / "out" / "build" / "torch-tpu"
    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert (str(metadata.name), metadata.version, metadata.backend.backend_type) == (
        "sample-kernel",
        1,
        Backend.TPU,
    )
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


def test_stock_loads_the_artifact(make_source: MakeSource, tmp_path: Path) -> None:
    kernel = build(make_source(), tmp_path / "out")
    # Stock takes a process for a TPU's by this attribute, which torch_tpu does not set.
    script = f"""
import types
from pathlib import Path
import torch
torch.backends.tpu = types.ModuleType("torch.backends.tpu")
import kernels
kernel = kernels.get_local_kernel(Path({str(tmp_path / "out")!r}))
assert kernel.__name__ == {kernel.metadata.id!r}
assert kernel.add(2, 3) == 5
assert kernel.late() == "verified"
"""
    subprocess.run([sys.executable, "-B", "-c", script], check=True, timeout=300)
