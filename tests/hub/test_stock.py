"""Stock `kernels` accepts what is built here: its metadata, its digests, its loader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tpu_kernels.authoring import build
from tpu_kernels.hub import registry_root
from tpu_kernels.testing import FakeHub

from .conftest import ON_A_TPU, REPO, MakeSource, RunPython, Serve

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
    script = f"""{ON_A_TPU}
from pathlib import Path
import kernels
kernel = kernels.get_local_kernel(Path({str(tmp_path / "out")!r}))
assert kernel.__name__ == {kernel.metadata.id!r}
assert kernel.add(2, 3) == 5
assert kernel.late() == "verified"
"""
    subprocess.run([sys.executable, "-B", "-c", script], check=True, timeout=300)


# What a user of stock `kernels` has written.
SCRIPT = f"""
from kernels import get_kernel, get_loaded_kernels, has_kernel
kernel = get_kernel({REPO!r}, version=1)
assert kernel.add(2, 3) == 5
assert kernel.table() == {{"tile": 128}}
assert has_kernel({REPO!r}, version=1)
assert get_kernel({REPO!r}, revision="v1", trust_remote_code=[{REPO!r}]).late() == "verified"
assert get_kernel({REPO!r}, version=1, user_agent={{"who": "me"}}, check_arch=False) is kernel
[loaded] = get_loaded_kernels()
assert (str(loaded.metadata.name), loaded.module) == ("sample-kernel", kernel)
"""


def test_one_import_line_is_the_migration_and_spares_requests(
    make_source: MakeSource, serve: Serve, run_python: RunPython, tmp_path: Path
) -> None:
    server = serve(make_source())
    run_python(ON_A_TPU + SCRIPT, server, HF_HOME=str(tmp_path / "stock"))
    stock = len(server.requests)
    server.clear()
    run_python(SCRIPT.replace("from kernels", "from tpu_kernels"), server)
    assert 0 < len(server.requests) < stock


def test_stock_loads_the_shipped_kernel(run_python: RunPython) -> None:
    with FakeHub(registry_root(), trusted=["tpu-kernels"]) as server:
        script = (
            f"{ON_A_TPU}import kernels\n"
            "kernel = kernels.get_kernel('tpu-kernels/ragged-dot', version=1)\n"
            "assert callable(kernel.ragged_dot)"
        )
        run_python(script, server)
