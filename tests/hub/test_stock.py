"""Stock `kernels` accepts what is built here: its metadata, its digests, its loader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tpu_kernels.authoring import build
from tpu_kernels.hub import registry_root
from tpu_kernels.testing import FakeHub

from .conftest import REPO, MakeSource, RunPython, Serve

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


def test_stock_loads_the_artifact(make_source: MakeSource, run_stock: RunPython, tmp_path: Path) -> None:
    kernel = build(make_source(), tmp_path / "out")
    script = f"""
from pathlib import Path
import kernels
kernel = kernels.get_local_kernel(Path({str(tmp_path / "out")!r}))
assert kernel.__name__ == {kernel.metadata.id!r}
assert kernel.add(2, 3) == 5
assert kernel.late() == "verified"
"""
    with FakeHub(tmp_path / "out") as server:
        run_stock(script, server)


# What a user of stock `kernels` has written.
SCRIPT = """
import sys
from pathlib import Path
from kernels import (
    get_kernel, get_loaded_kernels, get_local_kernel, get_locked_kernel, has_kernel, install_kernel, load_kernel
)
repo_id, commit, folder, lock = sys.argv[1:]
kernel = get_kernel(repo_id, version=1)
assert kernel.add(2, 3) == 5
assert kernel.table() == {"tile": 128}
assert has_kernel(repo_id, version=1)
assert get_kernel(repo_id, revision="v1", trust_remote_code=[repo_id]).late() == "verified"
assert get_kernel(repo_id, version=1, user_agent={"who": "me"}, check_arch=False) is kernel
[loaded] = get_loaded_kernels()[:1]
assert (str(loaded.metadata.name), loaded.metadata.version, loaded.module) == ("sample-kernel", 1, kernel)
assert (loaded.repo_info.repo_id, loaded.repo_info.revision) == (repo_id, commit)
assert install_kernel(repo_id, version=1, trust_remote_code=True).joinpath("late.py").is_file()
assert get_locked_kernel(repo_id, lockfile=Path(lock)).add(2, 3) == 5
assert load_kernel(repo_id, lockfile=Path(lock), backend="tpu").add(2, 3) == 5
assert get_local_kernel(Path(folder)).add(2, 3) == 5
"""


def test_one_import_line_is_the_migration_and_spares_requests(
    make_source: MakeSource, serve: Serve, run_stock: RunPython, run_python: RunPython, tmp_path: Path
) -> None:
    server = serve(make_source())
    # Stock's load_kernel wants the whole of the commit to be here, and its get_kernel does not bring the card.
    (server.root / REPO / "v1" / "README.md").unlink()
    commit = server.commit(REPO)
    lock = tmp_path / "kernels.lock"
    lock.write_text(json.dumps([{"dependency": {"repo-id": REPO, "version": 1}, "lock": {"commit": commit}}]))
    arguments = f"import sys\nsys.argv = {['', REPO, commit, str(server.root / REPO / 'v1'), str(lock)]!r}\n"
    run_stock(arguments + SCRIPT, server)
    stock = len(server.requests)
    server.clear()
    run_python(arguments + SCRIPT.replace("from kernels", "from tpu_kernels"), server)
    assert 0 < len(server.requests) < stock


def test_stock_loads_the_shipped_kernel(run_stock: RunPython) -> None:
    with FakeHub(registry_root(), trusted=["tpu-kernels"]) as server:
        script = (
            "import kernels\n"
            "kernel = kernels.get_kernel('tpu-kernels/ragged-dot', version=1)\n"
            "assert callable(kernel.ragged_dot)"
        )
        run_stock(script, server)
