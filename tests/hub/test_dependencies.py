"""Kernels that depend on other kernels: found, verified and loaded first, and reached as stock does it."""

from __future__ import annotations

from pathlib import Path

import pytest

import tpu_kernels
from tpu_kernels.errors import (
    IncompatibleKernelError,
    InvalidMetadataError,
    UntrustedKernelError,
    VerificationError,
)
from tpu_kernels.hub import compatibility

from .conftest import Publish, RunPython, Serve

pytest.importorskip("kernels")

TOP, BASE = "tpu-kernels/top", "tpu-kernels/base"
USES = f"from kernels import get_kernel_dep\nbase = get_kernel_dep({BASE!r})"
SCRIPT = f"""
from kernels import get_kernel
top = get_kernel({TOP!r}, version=1)
assert top.NUMBER == 2
"""


def test_a_kernel_reaches_its_dependency_as_with_stock(
    publish: Publish, serve: Serve, run_stock: RunPython, run_python: RunPython
) -> None:
    publish(BASE, "NUMBER = 1")
    publish(TOP, f"{USES}\nNUMBER = base.NUMBER + 1", depends={BASE: 1})
    server = serve()
    run_stock(SCRIPT, server)
    stock = len(server.requests)
    server.clear()
    run_python(SCRIPT.replace("from kernels", "from tpu_kernels"), server)
    assert len(server.requests) <= stock
    server.clear()
    offline = SCRIPT.replace("from kernels", "from tpu_kernels")
    assert run_python(offline, server, HF_HUB_OFFLINE="1") == ""


def test_versions_of_a_dependency_do_not_conflict(publish: Publish, serve: Serve) -> None:
    publish(BASE, "NUMBER = 1", version=1)
    publish(BASE, "NUMBER = 2", version=2)
    publish("tpu-kernels/old", f"{USES}\nNUMBER = base.NUMBER", depends={BASE: 1})
    publish(TOP, f"{USES}\nNUMBER = base.NUMBER", depends={BASE: 2, "tpu-kernels/old": 1})
    serve()
    top = tpu_kernels.get_kernel(TOP, version=1)
    loaded = {kernel.repo_id: kernel for kernel in tpu_kernels.get_loaded_kernels() if kernel.version == 1}
    assert (top.NUMBER, loaded["tpu-kernels/old"].module.NUMBER) == (2, 1)
    assert tpu_kernels.get_kernel(BASE, version=2) is top.base


def test_a_dependency_is_explained(publish: Publish, serve: Serve) -> None:
    publish(BASE, "")
    publish(TOP, "", depends={BASE: 1})
    serve()
    explanation = tpu_kernels.explain(TOP, version=1)
    assert [step.subject for step in explanation.decisions] == [f"{BASE} v1", f"{TOP} v1"]
    assert explanation.decisions[0].reason.startswith(f"a dependency of {TOP} v1; ")


def test_a_cycle_is_named(publish: Publish, serve: Serve) -> None:
    publish(BASE, "", depends={TOP: 1})
    publish(TOP, "", depends={BASE: 1})
    serve()
    with pytest.raises(
        IncompatibleKernelError, match=f"depend on each other: {TOP} v1 -> {BASE} v1 -> {TOP} v1"
    ):
        tpu_kernels.get_kernel(TOP, version=1)


def test_a_missing_dependency_is_named_with_what_needs_it(publish: Publish, serve: Serve) -> None:
    publish(TOP, "", depends={BASE: 3})
    publish(BASE, "")
    serve()
    with pytest.raises(
        IncompatibleKernelError, match=rf"{TOP} v1 depends on {BASE}: there is no {BASE}, version 3"
    ):
        tpu_kernels.get_kernel(TOP, version=1)
    assert not tpu_kernels.has_kernel(TOP, version=1)


def test_a_dependency_has_to_be_trusted_too(publish: Publish, serve: Serve) -> None:
    publish("acme/base", "")
    publish(TOP, "", depends={"acme/base": 1})
    serve()
    with pytest.raises(UntrustedKernelError, match=rf"acme/base is not trusted.*\({TOP} v1 depends on it\)"):
        tpu_kernels.get_kernel(TOP, version=1)
    assert tpu_kernels.has_kernel(TOP, version=1, trust_remote_code=["acme/base"])


def test_nothing_runs_before_all_of_it_is_verified(publish: Publish, serve: Serve, tmp_path: Path) -> None:
    publish(BASE, f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()")
    wrong = {"algorithm": "sha256", "files": {"__init__.py": "AAAA"}}
    publish(TOP, "", depends={BASE: 1}, digest=wrong)
    serve()
    with pytest.raises(VerificationError, match=r"changed: __init__\.py"):
        tpu_kernels.get_kernel(TOP, version=1)
    assert not (tmp_path / "ran").exists()


def test_a_local_kernel_gets_its_dependencies(publish: Publish, serve: Serve, tmp_path: Path) -> None:
    publish(BASE, "NUMBER = 5")
    publish(TOP, f"{USES}\nNUMBER = base.NUMBER", depends={BASE: 1})
    server = serve()
    (server.root / TOP).rename(tmp_path / "here")
    assert tpu_kernels.get_local_kernel(tmp_path / "here" / "v1").NUMBER == 5


def test_what_they_are_reached_by_has_to_be_installed(
    publish: Publish, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(BASE, "")
    publish(TOP, "", depends={BASE: 1})
    serve()
    monkeypatch.setattr(compatibility, "_DEPENDING", {"no-such-package": ">=1"})
    with pytest.raises(IncompatibleKernelError, match="run: pip install 'no-such-package>=1'"):
        tpu_kernels.get_kernel(TOP, version=1)


@pytest.mark.parametrize(
    "dependency",
    [{"repo-id": BASE}, {"repo-id": "base", "version": 1}, {"repo-id": BASE, "version": 1, "revision": "v1"}],
)
def test_a_dependency_that_names_no_build_is_refused(
    publish: Publish, serve: Serve, dependency: dict[str, object]
) -> None:
    publish(TOP, "", **{"kernel-depends": [dependency]})
    serve()
    with pytest.raises(InvalidMetadataError, match=r"metadata\.json: kernel-depends\.0"):
        tpu_kernels.get_kernel(TOP, version=1)
