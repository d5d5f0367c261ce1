"""A build whose files are not the ones its digests promise is refused before anything of it runs."""

from __future__ import annotations

import importlib.util
import json
import os
import py_compile
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tpu_kernels
from tpu_kernels.authoring import build
from tpu_kernels.errors import KernelNotFoundError, VerificationError

from .conftest import MakeSource, UseRegistry


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """The file that the kernel in `variant` writes when it runs."""
    return tmp_path / "it-ran"


@pytest.fixture
def variant(make_source: MakeSource, tmp_path: Path, marker: Path) -> Path:
    """The variant folder of a built kernel."""
    build(make_source(f"Path({str(marker)!r}).touch()"), tmp_path / "out")
    return tmp_path / "out" / "build" / "torch-tpu"


def change(variant: Path) -> None:
    (variant / "numbers" / "addition.py").write_text("def add(left, right):\n    return left - right\n")


def change_data(variant: Path) -> None:
    (variant / "table.json").write_text('{"tile": 1}')


def remove(variant: Path) -> None:
    (variant / "late.py").unlink()


def add(variant: Path) -> None:
    (variant / "extra.py").write_text("")


def add_bytecode(variant: Path) -> None:
    """A module that Python would import from bytecode alone."""
    (variant / "extra.pyc").write_bytes(b"")


def link(variant: Path) -> None:
    """The very same content, through a link."""
    target = variant.parent / "late.py"
    (variant / "late.py").rename(target)
    (variant / "late.py").symlink_to(target)


def link_metadata(variant: Path) -> None:
    target = variant.parent / "metadata.json"
    (variant / "metadata.json").rename(target)
    (variant / "metadata.json").symlink_to(target)


def link_folder(variant: Path) -> None:
    target = variant.parent / "numbers"
    (variant / "numbers").rename(target)
    (variant / "numbers").symlink_to(target)


def add_pipe(variant: Path) -> None:
    os.mkfifo(variant / "pipe")


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (change, "changed: numbers/addition.py"),
        (change_data, "changed: table.json"),
        (remove, "missing: late.py"),
        (add, "not listed: extra.py"),
        (add_bytecode, "not listed: extra.pyc"),
        (link, "late.py is a symbolic link"),
        (link_metadata, "metadata.json is a symbolic link"),
        (link_folder, "numbers is a symbolic link"),
        (add_pipe, "pipe is no regular file"),
    ],
)
def test_a_build_that_was_tampered_with_does_not_run(
    variant: Path, marker: Path, tamper: Callable[[Path], None], message: str
) -> None:
    tamper(variant)
    with pytest.raises(VerificationError) as raised:
        tpu_kernels.get_local_kernel(variant)
    assert message in str(raised.value)
    assert not marker.exists()
    kernel_id = json.loads((variant / "metadata.json").read_text())["id"]
    assert kernel_id not in sys.modules


def test_every_violation_is_named_at_once(variant: Path) -> None:
    change(variant)
    remove(variant)
    add(variant)
    with pytest.raises(VerificationError) as raised:
        tpu_kernels.get_local_kernel(variant)
    assert str(raised.value) == (
        f"the files in {variant} are not the ones its metadata.json lists:\n"
        "  missing: late.py\n  changed: numbers/addition.py\n  not listed: extra.py\n"
        "nothing of the kernel was run; install or build it again"
    )


def test_a_registry_kernel_that_was_tampered_with_does_not_run(
    make_source: MakeSource, use_registry: UseRegistry, marker: Path
) -> None:
    registry = use_registry(make_source(f"Path({str(marker)!r}).touch()"))
    change(registry / "tpu-kernels" / "sample-kernel" / "v1" / "build" / "torch-tpu")
    with pytest.raises(VerificationError, match=r"changed: numbers/addition\.py"):
        tpu_kernels.get_kernel("tpu-kernels/sample-kernel", version=1)
    assert not marker.exists()


def test_bytecode_beside_the_sources_is_neither_run_nor_written(variant: Path, tmp_path: Path) -> None:
    """pip writes `__pycache__` folders beside what it installs; whoever can write there can plant one."""
    source = variant / "late.py"
    planted = tmp_path / "late.py"
    planted.write_text(source.read_text().replace("verified", "poisoned"))
    # Python takes bytecode for that of a source by the source's size and time.
    os.utime(planted, (source.stat().st_atime, source.stat().st_mtime))
    cached = importlib.util.cache_from_source(str(source))
    py_compile.compile(str(planted), cached, doraise=True)
    assert runpy.run_path(cached)["WORD"] == "poisoned"
    assert tpu_kernels.get_local_kernel(variant).late() == "verified"
    assert list(variant.rglob("*.pyc")) == [Path(cached)]


READS = """
import importlib.resources, pkgutil
def read_loaded():
    return pkgutil.get_data(__name__, "table.json")
def read_resource(name="table.json"):
    return importlib.resources.files(__name__).joinpath(name).read_bytes()
def read_within():
    return [entry.name for entry in importlib.resources.files(f"{__name__}.numbers").iterdir()]
"""


def test_data_files_are_read_as_they_were_verified(make_source: MakeSource, tmp_path: Path) -> None:
    build(make_source(READS), tmp_path / "out")
    variant = tmp_path / "out" / "build" / "torch-tpu"
    verified = (variant / "table.json").read_bytes()
    kernel = tpu_kernels.get_local_kernel(variant)
    change_data(variant)
    add(variant)
    assert kernel.read_loaded() == kernel.read_resource() == verified
    assert kernel.read_resource("numbers/addition.py").startswith(b"def ")
    assert kernel.read_within() == ["__init__.py", "addition.py"]
    with pytest.raises(FileNotFoundError):
        kernel.read_resource("extra.py")
    with pytest.raises(FileNotFoundError, match=r"has no file .*extra\.py"):
        kernel.__spec__.loader.get_data(str(variant / "extra.py"))
    with pytest.raises(FileNotFoundError):
        kernel.__spec__.loader.get_data(__file__)


class TestLocalKernel:
    def test_the_repository_its_build_folder_and_the_variant_are_one_kernel(self, variant: Path) -> None:
        kernel = tpu_kernels.get_local_kernel(variant.parents[1])
        assert tpu_kernels.get_local_kernel(str(variant.parent)) is kernel
        assert tpu_kernels.get_local_kernel(variant) is kernel

    def test_a_copy_is_the_same_kernel(self, variant: Path, tmp_path: Path) -> None:
        kernel = tpu_kernels.get_local_kernel(variant)
        copy = shutil.copytree(variant, tmp_path / "copy")
        assert tpu_kernels.get_local_kernel(copy) is kernel

    def test_a_kernel_that_was_built_again_is_another_kernel(
        self, make_source: MakeSource, tmp_path: Path
    ) -> None:
        build(make_source("NUMBER = 1"), tmp_path / "out")
        first = tpu_kernels.get_local_kernel(tmp_path / "out")
        build(make_source("NUMBER = 2"), tmp_path / "out")
        second = tpu_kernels.get_local_kernel(tmp_path / "out")
        assert (first.NUMBER, second.NUMBER) == (1, 2)

    def test_digests_are_checked_where_there_are_any(self, variant: Path, marker: Path) -> None:
        path = variant / "metadata.json"
        metadata = json.loads(path.read_text())
        del metadata["digest"]
        path.write_text(json.dumps({**metadata, "id": f"{metadata['id']}_unsigned"}))
        change(variant)
        assert tpu_kernels.get_local_kernel(variant).add(3, 2) == 1
        assert marker.exists()

    def test_a_folder_without_a_kernel_names_what_is_missing(self, tmp_path: Path) -> None:
        with pytest.raises(KernelNotFoundError, match=r"there is no build/torch-tpu/metadata\.json in it"):
            tpu_kernels.get_local_kernel(tmp_path)
