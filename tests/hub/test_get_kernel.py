"""From a reference to a module, through a registry."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tpu_kernels
from tpu_kernels import device, hub
from tpu_kernels.authoring import build, build_registry
from tpu_kernels.errors import (
    IncompatibleKernelError,
    InvalidMetadataError,
    InvalidReferenceError,
    KernelNotFoundError,
    VerificationError,
)
from tpu_kernels.hub.sources import registry_root

from .conftest import REPO, MakeSource, UseRegistry

ALIAS = "kernels-community/sample-kernel"


def variant(registry: Path, version: int = 1) -> Path:
    return registry / REPO / f"v{version}" / "build" / "torch-tpu"


def test_a_kernel_loads_with_its_modules_and_data(make_source: MakeSource, use_registry: UseRegistry) -> None:
    registry = use_registry(make_source())
    kernel = tpu_kernels.get_kernel(REPO, version=1)
    assert kernel.add(2, 3) == 5
    assert kernel.table() == {"tile": 128}
    assert kernel.late() == "verified"
    [loaded] = [loaded for loaded in tpu_kernels.get_loaded_kernels() if loaded.module is kernel]
    assert (loaded.repo_id, loaded.version) == (REPO, 1)
    assert loaded.path == variant(registry)
    assert sys.modules[loaded.id] is kernel
    assert kernel.__name__ == loaded.id
    assert hub.find_loaded(kernel) is loaded
    assert loaded.metadata.tpu is not None
    assert loaded.metadata.tpu.provides == {"transformers.experts": {"sample": "add"}}


def test_a_module_that_is_no_kernel_has_no_record() -> None:
    assert hub.find_loaded(json) is None


def test_versions_live_side_by_side(make_source: MakeSource, use_registry: UseRegistry) -> None:
    use_registry(make_source(version=1), make_source(version=2))
    first = tpu_kernels.get_kernel(REPO, version=1)
    second = tpu_kernels.get_kernel(REPO, version=2)
    assert (first.VERSION, second.VERSION) == (1, 2)
    assert first.__name__ != second.__name__
    assert first.numbers is not second.numbers
    assert tpu_kernels.get_kernel(REPO, version=1) is first


def test_an_alias_leads_to_the_same_module(make_source: MakeSource, use_registry: UseRegistry) -> None:
    use_registry(make_source())
    assert tpu_kernels.get_kernel(ALIAS, version=1) is tpu_kernels.get_kernel(REPO, version=1)
    assert f"{ALIAS} is another name for {REPO}" in str(tpu_kernels.explain(ALIAS, version=1))


def test_a_version_branch_is_the_version(make_source: MakeSource, use_registry: UseRegistry) -> None:
    use_registry(make_source())
    assert tpu_kernels.get_kernel(REPO, revision="v1") is tpu_kernels.get_kernel(REPO, version=1)
    assert not tpu_kernels.has_kernel(REPO, revision="main")


def test_the_newest_version_is_the_default_with_one_warning(
    make_source: MakeSource, use_registry: UseRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    use_registry(make_source(version=2), make_source(version=10))
    with caplog.at_level(logging.WARNING, logger="tpu_kernels"):
        kernels = [tpu_kernels.get_kernel(REPO) for _ in range(3)]
    assert [kernel.VERSION for kernel in kernels] == [10, 10, 10]
    [record] = caplog.records
    assert f"pin it: get_kernel('{REPO}', version=10)" in record.getMessage()


def test_a_pinned_version_warns_of_nothing(
    make_source: MakeSource, use_registry: UseRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    use_registry(make_source())
    tpu_kernels.get_kernel(REPO, version=1)
    assert not caplog.records


def test_a_loaded_kernel_is_returned_without_a_look_at_any_file(
    make_source: MakeSource, use_registry: UseRegistry
) -> None:
    registry = use_registry(make_source())
    kernel = tpu_kernels.get_kernel(REPO, version=1)
    shutil.rmtree(registry)
    assert tpu_kernels.get_kernel(REPO, version=1) is kernel


def test_what_runs_is_what_was_verified(make_source: MakeSource, use_registry: UseRegistry) -> None:
    registry = use_registry(make_source())
    kernel = tpu_kernels.get_kernel(REPO, version=1)
    (variant(registry) / "late.py").write_text('WORD = "swapped after the check"\n')
    assert kernel.late() == "verified"


def test_threads_that_load_a_kernel_at_once_get_one_module(
    make_source: MakeSource, use_registry: UseRegistry, tmp_path: Path
) -> None:
    imports = tmp_path / "imports"
    code = f"import time\ntime.sleep(0.05)\nwith open({str(imports)!r}, 'a') as file:\n    file.write('x')"
    use_registry(make_source(code))
    barrier = threading.Barrier(8)

    def load() -> object:
        barrier.wait()
        return tpu_kernels.get_kernel(REPO, version=1)

    with ThreadPoolExecutor(8) as pool:
        kernels = [future.result() for future in [pool.submit(load) for _ in range(8)]]
    assert len(set(map(id, kernels))) == 1
    assert imports.read_text() == "x"


def test_a_failed_import_leaves_nothing_behind(
    make_source: MakeSource, use_registry: UseRegistry, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    code = f"if not Path({str(ready)!r}).exists():\n    raise RuntimeError('the kernel is not ready')"
    use_registry(make_source(code))
    before = set(sys.modules)
    with pytest.raises(RuntimeError, match="the kernel is not ready") as raised:
        tpu_kernels.get_kernel(REPO, version=1)
    assert "while importing kernel 'sample-kernel', version 1" in raised.value.__notes__[0]
    assert not {name for name in set(sys.modules) - before if "sample_kernel" in name}
    ready.touch()
    assert tpu_kernels.get_kernel(REPO, version=1).add(1, 1) == 2


def test_a_missing_module_of_a_kernel_is_an_import_error(
    make_source: MakeSource, use_registry: UseRegistry
) -> None:
    use_registry(make_source("from . import nothing"))
    with pytest.raises(ImportError, match="nothing"):
        tpu_kernels.get_kernel(REPO, version=1)


def test_an_id_that_is_taken_is_refused(
    make_source: MakeSource, use_registry: UseRegistry, tmp_path: Path
) -> None:
    """Two builds with one id, as a publisher can make them by hand."""
    first, second = tmp_path / "first", tmp_path / "second"
    kernel_id = build(make_source("NUMBER = 1"), first).metadata.id
    build(make_source("NUMBER = 2"), second)
    path = second / "build" / "torch-tpu" / "metadata.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "id": kernel_id}))
    assert tpu_kernels.get_local_kernel(first).NUMBER == 1
    with pytest.raises(IncompatibleKernelError, match="no two builds may share an id"):
        tpu_kernels.get_local_kernel(second)


@pytest.mark.parametrize("name", ["json", "wave"])
def test_an_id_that_hides_a_module_is_refused(make_source: MakeSource, tmp_path: Path, name: str) -> None:
    build(make_source(), tmp_path / "out")
    path = tmp_path / "out" / "build" / "torch-tpu" / "metadata.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "id": name}))
    with pytest.raises(IncompatibleKernelError, match=f"{name!r} is the name of another module"):
        tpu_kernels.get_local_kernel(tmp_path / "out")


class TestSources:
    def test_the_first_source_that_has_a_build_that_runs_here_gives_it(
        self, make_source: MakeSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        unusable = make_source(version=2, edit=('packaging = ">=20"', 'packaging = ">=999"'))
        build_registry(make_source("PLACE = 1").parent, tmp_path / "first")
        build_registry(unusable.parent, tmp_path / "first")
        build_registry(make_source("PLACE = 2").parent, tmp_path / "second")
        build_registry(make_source("PLACE = 2", version=2).parent, tmp_path / "second")
        first, second = tmp_path / "first", tmp_path / "second"
        monkeypatch.setenv("TPU_KERNELS_SOURCES", f"{first}, {second}")
        assert tpu_kernels.get_kernel(REPO, version=1).PLACE == 1
        assert tpu_kernels.get_kernel(REPO, version=2).PLACE == 2
        assert tpu_kernels.get_kernel(REPO).PLACE == 1
        with pytest.raises(
            KernelNotFoundError, match=rf"looked in: {first}, {second}\); there is version 1, 2"
        ):
            tpu_kernels.get_kernel(REPO, version=3)


class TestNotFound:
    def test_a_missing_version_names_those_there_are(
        self, make_source: MakeSource, use_registry: UseRegistry
    ) -> None:
        use_registry(make_source(version=1), make_source(version=2))
        with pytest.raises(KernelNotFoundError) as raised:
            tpu_kernels.get_kernel(REPO, version=3)
        assert str(raised.value) == (
            f"there is no {REPO}, version 3 (looked in: registry); there is version 1, 2: use version=2"
        )
        assert not tpu_kernels.has_kernel(REPO, version=3)
        assert tpu_kernels.has_kernel(REPO, version=2)

    def test_a_misspelt_name_names_the_close_ones(
        self, make_source: MakeSource, use_registry: UseRegistry
    ) -> None:
        use_registry(make_source())
        with pytest.raises(KernelNotFoundError, match=f"did you mean .*{REPO}"):
            tpu_kernels.get_kernel("tpu-kernels/sampel-kernel", version=1)
        with pytest.raises(KernelNotFoundError, match=f"did you mean {ALIAS} or {REPO}"):
            tpu_kernels.get_kernel("someone/sample-kernel")
        assert not tpu_kernels.has_kernel("someone/sample-kernel")

    def test_a_name_like_none_names_all(self, make_source: MakeSource, use_registry: UseRegistry) -> None:
        use_registry(make_source())
        with pytest.raises(KernelNotFoundError, match=f"there is: {ALIAS}, {REPO}$"):
            tpu_kernels.get_kernel("zz/qq")

    def test_a_registry_without_an_index_names_the_remedy(
        self, use_registry: UseRegistry, tmp_path: Path
    ) -> None:
        use_registry()
        with pytest.raises(KernelNotFoundError, match="tpu-kernels build kernels_src --registry registry"):
            tpu_kernels.get_kernel("zz/qq")
        assert not tpu_kernels.has_kernel("zz/qq")

    def test_a_malformed_reference_is_a_mistake_not_a_no(self) -> None:
        with pytest.raises(InvalidReferenceError):
            tpu_kernels.has_kernel("ragged-dot")


class TestRequirements:
    def test_an_unmet_range_names_what_is_there_what_is_needed_and_the_command(
        self, make_source: MakeSource, use_registry: UseRegistry
    ) -> None:
        installed = importlib.metadata.version("packaging")
        use_registry(make_source(edit=('packaging = ">=20"', 'packaging = ">=999"')))
        with pytest.raises(IncompatibleKernelError) as raised:
            tpu_kernels.get_kernel(REPO, version=1)
        assert str(raised.value) == (
            f"{REPO} v1 needs packaging>=999, {installed} is installed; run: pip install 'packaging>=999'"
        )
        assert not tpu_kernels.has_kernel(REPO, version=1)

    def test_the_newest_version_that_runs_here_is_loaded(
        self, make_source: MakeSource, use_registry: UseRegistry
    ) -> None:
        newer = make_source(version=2, edit=('packaging = ">=20"', 'no-such-package = ">=1"'))
        use_registry(make_source(version=1), newer)
        assert tpu_kernels.get_kernel(REPO).VERSION == 1
        explanation = tpu_kernels.explain(REPO)
        assert [(step.subject, step.accepted) for step in explanation.decisions] == [
            (f"{REPO} v2", False),
            (f"{REPO} v1", True),
        ]
        assert "needs no-such-package>=1, it is not installed" in explanation.decisions[0].reason

    def test_torch_tpu_may_be_missing_but_not_too_old(
        self, make_source: MakeSource, use_registry: UseRegistry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        versions: dict[str, str] = {"packaging": "26"}

        def version(distribution: str) -> str:
            if distribution not in versions:
                raise importlib.metadata.PackageNotFoundError(distribution)
            return versions[distribution]

        monkeypatch.setattr(importlib.metadata, "version", version)
        use_registry(make_source())
        assert tpu_kernels.has_kernel(REPO, version=1)
        versions["torch-tpu"] = "0.1.9"
        assert not tpu_kernels.has_kernel(REPO, version=1)
        versions["torch-tpu"] = "0.2.1.dev20260101"
        assert tpu_kernels.has_kernel(REPO, version=1)

    def test_a_build_for_other_hardware_is_refused(self, make_source: MakeSource, tmp_path: Path) -> None:
        build(make_source(), tmp_path / "out")
        path = tmp_path / "out" / "build" / "torch-tpu" / "metadata.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "backend": {"type": "cuda"}}))
        with pytest.raises(IncompatibleKernelError, match="is built for 'cuda', not for 'tpu'"):
            tpu_kernels.get_local_kernel(tmp_path / "out")

    def test_a_version_of_python_can_be_required(self, make_source: MakeSource, tmp_path: Path) -> None:
        build(make_source(edit=('packaging = ">=20"', 'python = "<3"')), tmp_path / "out")
        with pytest.raises(IncompatibleKernelError, match=r"needs python<3, this is Python 3\.\d+\.\d+$"):
            tpu_kernels.get_local_kernel(tmp_path / "out")

    def test_a_kernel_for_other_generations_is_refused_unless_told_otherwise(
        self, make_source: MakeSource, use_registry: UseRegistry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use_registry(make_source())
        monkeypatch.setattr(device, "current", lambda: device.Device("tpu", "v4", chips=4))
        assert not tpu_kernels.has_kernel(REPO, version=1)
        assert tpu_kernels.has_kernel(REPO, version=1, check_arch=False)
        with pytest.raises(IncompatibleKernelError, match="made for v5e, v6e, and the TPU here is a v4"):
            tpu_kernels.get_kernel(REPO, version=1)
        assert tpu_kernels.get_kernel(REPO, version=1, check_arch=False).add(1, 1) == 2
        monkeypatch.setattr(device, "current", lambda: device.Device("tpu", "v6e", chips=4))
        assert tpu_kernels.has_kernel(REPO, version=1)


@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_another_backend_is_refused(
    make_source: MakeSource, use_registry: UseRegistry, tmp_path: Path, backend: str
) -> None:
    use_registry(make_source())
    build(make_source(), tmp_path / "out")
    with pytest.raises(IncompatibleKernelError, match=f"backend={backend!r}; .* 'tpu' only"):
        tpu_kernels.get_kernel(REPO, version=1, backend=backend)
    with pytest.raises(IncompatibleKernelError, match=f"backend={backend!r}"):
        tpu_kernels.get_local_kernel(tmp_path / "out", backend=backend)
    assert not tpu_kernels.has_kernel(REPO, version=1, backend=backend)
    assert tpu_kernels.has_kernel(REPO, version=1, backend="tpu")


class TestExplain:
    def test_the_trace_reads_as_text(self, make_source: MakeSource, use_registry: UseRegistry) -> None:
        registry = use_registry(make_source())
        assert str(tpu_kernels.explain(REPO)) == (
            f"{REPO}, newest version\n"
            f"  registry: {REPO} v1: accepted: the newest version that runs here\n"
            f"  chosen: {variant(registry)}"
        )
        assert str(tpu_kernels.explain("zz/qq", version=1)).startswith(
            "zz/qq, version 1\n  registry: zz/qq: rejected: no matching version\n  KernelNotFoundError: "
        )

    def test_nothing_is_loaded(self, make_source: MakeSource, use_registry: UseRegistry) -> None:
        use_registry(make_source("raise AssertionError('explained, not loaded')"))
        assert tpu_kernels.explain(REPO).build is not None


class TestTheIndex:
    def test_metadata_that_the_index_does_not_promise_is_refused(
        self, make_source: MakeSource, use_registry: UseRegistry
    ) -> None:
        path = variant(use_registry(make_source(version=1), make_source(version=2)), 2) / "metadata.json"
        path.write_text(path.read_text() + "\n")
        with pytest.raises(VerificationError, match="is not the one that the registry's index promises"):
            tpu_kernels.get_kernel(REPO, version=2)
        # Nor does an older version quietly take its place.
        with pytest.raises(VerificationError):
            tpu_kernels.get_kernel(REPO)
        assert not tpu_kernels.has_kernel(REPO)

    def test_metadata_for_another_version_is_refused(
        self, make_source: MakeSource, use_registry: UseRegistry
    ) -> None:
        path = use_registry(make_source()) / "index.json"
        index = json.loads(path.read_text())
        index["kernels"][REPO] = {"2": index["kernels"][REPO]["1"]}
        path.write_text(json.dumps(index))
        with pytest.raises(InvalidMetadataError, match="it says 1 where version 2 was released"):
            tpu_kernels.get_kernel(REPO, version=2)

    def test_a_link_out_of_the_registry_is_refused(
        self, make_source: MakeSource, use_registry: UseRegistry, tmp_path: Path
    ) -> None:
        folder = use_registry(make_source()) / REPO / "v1"
        folder.symlink_to(folder.rename(tmp_path / "outside"))
        with pytest.raises(VerificationError, match="leads out of the registry"):
            tpu_kernels.get_kernel(REPO, version=1)


def test_the_shipped_registry_is_found() -> None:
    assert (registry_root() / "index.json").is_file()
