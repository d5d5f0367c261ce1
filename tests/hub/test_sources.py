"""Where kernels are looked for: overrides, folders and buckets, and in which order."""

from __future__ import annotations

import uuid
from pathlib import Path

import fsspec
import pytest

import tpu_kernels
from tpu_kernels.authoring import build, build_registry
from tpu_kernels.errors import (
    ConfigurationError,
    InvalidMetadataError,
    KernelNotFoundError,
    SourceUnavailableError,
    VerificationError,
)
from tpu_kernels.hub import bucket as hub_bucket
from tpu_kernels.hub import configuration, layout, metadata

from .conftest import REPO, MakeSource, Serve, UseRegistry

VARIANT = f"{REPO}/v1/build/torch-tpu"


class TestLocalKernels:
    def test_an_override_comes_first_whatever_the_version(
        self,
        make_source: MakeSource,
        use_registry: UseRegistry,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        use_registry(make_source("PLACE = 'registry'"))
        build(make_source("PLACE = 'local'"), tmp_path / "out")
        monkeypatch.delenv("TPU_KERNELS_SOURCES")
        monkeypatch.setenv("LOCAL_KERNELS", f"acme/other=/nowhere:{REPO}={tmp_path / 'out'}")
        assert tpu_kernels.get_kernel(REPO, version=7).PLACE == "local"
        assert tpu_kernels.get_kernel(REPO, version=1, source="registry").PLACE == "registry"
        assert (
            str(tpu_kernels.explain(REPO).decisions[0]) == f"local: {REPO}: accepted: LOCAL_KERNELS names it"
        )
        with pytest.raises(KernelNotFoundError, match="/nowhere holds no built kernel"):
            tpu_kernels.get_kernel("acme/other", version=1)

    @pytest.mark.parametrize("value", ["relu=/x", f"{REPO}", f"{REPO}="])
    def test_a_malformed_entry_is_named(self, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        monkeypatch.setenv("LOCAL_KERNELS", value)
        with pytest.raises(ConfigurationError, match=f"LOCAL_KERNELS has the entry '{value}'"):
            tpu_kernels.has_kernel(REPO, version=1)


class TestFolders:
    @pytest.mark.parametrize("form", ["path", "string", "url"])
    def test_a_folder_is_a_source(self, make_source: MakeSource, tmp_path: Path, form: str) -> None:
        folder = tmp_path / "our kernels"
        build_registry(make_source().parent, folder)
        source = {"path": folder, "string": str(folder), "url": folder.as_uri()}[form]
        assert tpu_kernels.get_kernel(REPO, version=1, source=source).add(1, 2) == 3
        with pytest.raises(KernelNotFoundError, match="use version=1"):
            tpu_kernels.get_kernel(REPO, version=2, source=source)

    def test_a_folder_that_is_no_registry_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(KernelNotFoundError, match=r"the kernel registry cannot be read: .*index\.json"):
            tpu_kernels.get_kernel(REPO, version=1, source=tmp_path)


class TestBuckets:
    @pytest.fixture
    def bucket(self, make_source: MakeSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
        """A registry in a bucket, and an empty place to keep what is fetched from it."""
        monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
        build_registry(make_source().parent, tmp_path / "registry")
        url = f"memory://{uuid.uuid4().hex}"
        for file in (tmp_path / "registry").rglob("*"):
            if file.is_file():
                path = file.relative_to(tmp_path / "registry").as_posix()
                fsspec.filesystem("memory").pipe_file(f"{url}/{path}", file.read_bytes())
        return url

    def kept(self, tmp_path: Path) -> list[Path]:
        return list((tmp_path / "home" / "tpu-kernels" / "builds").iterdir())

    def test_a_build_is_fetched_once(self, bucket: str, tmp_path: Path) -> None:
        assert tpu_kernels.explain(REPO, version=1, source=bucket).build is not None
        kernel = tpu_kernels.get_kernel(REPO, version=1, source=bucket)
        assert (kernel.add(1, 2), kernel.table(), kernel.late()) == (3, {"tile": 128}, "verified")
        [folder] = self.kept(tmp_path)
        assert Path(str(kernel.__file__)).parent == folder
        fsspec.filesystem("memory").rm(f"{bucket}/tpu-kernels", recursive=True)
        assert tpu_kernels.get_kernel(REPO, revision="v1", source=bucket) is kernel

    def test_a_bad_copy_is_refused_and_not_kept(self, bucket: str, tmp_path: Path) -> None:
        memory = fsspec.filesystem("memory")
        right = memory.cat_file(f"{bucket}/{VARIANT}/late.py")
        memory.pipe_file(f"{bucket}/{VARIANT}/late.py", right[:4])
        with pytest.raises(VerificationError, match=r"changed: late\.py"):
            tpu_kernels.get_kernel(REPO, version=1, source=bucket)
        memory.rm_file(f"{bucket}/{VARIANT}/late.py")
        with pytest.raises(VerificationError, match=r"missing: late\.py"):
            tpu_kernels.get_kernel(REPO, version=1, source=bucket)
        assert not self.kept(tmp_path)
        memory.pipe_file(f"{bucket}/{VARIANT}/late.py", right)
        assert tpu_kernels.get_kernel(REPO, version=1, source=bucket).late() == "verified"

    def test_metadata_that_the_index_does_not_promise_is_refused(self, bucket: str) -> None:
        memory = fsspec.filesystem("memory")
        content = memory.cat_file(f"{bucket}/{VARIANT}/metadata.json")
        memory.pipe_file(f"{bucket}/{VARIANT}/metadata.json", content + b"\n")
        with pytest.raises(VerificationError, match="is not the one that the registry's index promises"):
            tpu_kernels.get_kernel(REPO, version=1, source=bucket)

    def test_a_bucket_that_cannot_be_reached_serves_what_was_loaded(
        self, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def unreachable(*args: object, **kwargs: object) -> bytes:
            raise ConnectionError("no route to the bucket")

        with monkeypatch.context() as patch:
            patch.setattr(fsspec.filesystem("memory"), "cat_file", unreachable)
            with pytest.raises(SourceUnavailableError, match="no route"):
                tpu_kernels.get_kernel(REPO, version=1, source=bucket)
        tpu_kernels.install_kernel(REPO, version=1, source=bucket)
        monkeypatch.setattr(fsspec.filesystem("memory"), "cat_file", unreachable)
        assert tpu_kernels.get_kernel(REPO, version=1, source=bucket).late() == "verified"
        [record] = caplog.records
        assert "no route to the bucket; the index is the one that was read last" in record.getMessage()

    def test_an_index_without_end_is_refused(self, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(layout, "LARGEST_DOCUMENT", 1000)
        monkeypatch.setattr(metadata, "LARGEST_DOCUMENT", 1000)
        monkeypatch.setattr(hub_bucket, "LARGEST_DOCUMENT", 1000)
        memory = fsspec.filesystem("memory")
        memory.pipe_file(f"{bucket}/index.json", b" " * 1_000_000)
        with pytest.raises(InvalidMetadataError, match="it is larger than 1000 bytes"):
            tpu_kernels.get_kernel(REPO, version=1, source=bucket)

    def test_a_bucket_without_an_index_is_named(self) -> None:
        with pytest.raises(KernelNotFoundError, match=r"memory://nothing is no registry of kernels"):
            tpu_kernels.get_kernel(REPO, version=1, source="memory://nothing")

    def test_a_protocol_without_its_package_is_named(self) -> None:
        with pytest.raises(SourceUnavailableError, match="nonsense://bucket cannot be read: "):
            tpu_kernels.get_kernel(REPO, version=1, source="nonsense://bucket")


class TestOrder:
    def test_a_source_that_cannot_be_reached_is_passed_over(
        self, make_source: MakeSource, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = serve(make_source("PLACE = 'hub'"))
        monkeypatch.setattr(configuration, "registry_root", lambda: server.root)
        monkeypatch.setenv("TPU_KERNELS_SOURCES", "hub,registry")
        server.close()
        assert tpu_kernels.get_kernel(REPO, version=1).PLACE == "hub"
        steps = tpu_kernels.explain(REPO, version=1).decisions
        assert [(step.source, step.accepted) for step in steps] == [("hub", False), ("registry", True)]
        with pytest.raises(SourceUnavailableError, match="; there is version 1: use version=1"):
            tpu_kernels.get_kernel(REPO, version=2)

    def test_the_registry_comes_before_the_hub(
        self, make_source: MakeSource, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = serve(make_source())
        monkeypatch.setattr(configuration, "registry_root", lambda: server.root)
        monkeypatch.delenv("TPU_KERNELS_SOURCES")
        assert tpu_kernels.explain(REPO, version=1).decisions[0].source == "registry"
        assert not server.requests

    def test_an_unknown_source_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TPU_KERNELS_SOURCES", "registry,hubb")
        with pytest.raises(ConfigurationError, match="TPU_KERNELS_SOURCES names 'hubb', which is no source"):
            tpu_kernels.has_kernel(REPO, version=1)
