"""Nothing of a kernel is fetched or run before somebody whom the user trusts vouches for it."""

from __future__ import annotations

from pathlib import Path

import pytest

import tpu_kernels
from tpu_kernels.authoring import build_registry
from tpu_kernels.errors import ConfigurationError, UntrustedKernelError
from tpu_kernels.hub.trust import Trust

from .conftest import REPO, MakeSource, RunPython, Serve

PUBLISHER = "/api/organizations/tpu-kernels/overview"


def test_an_untrusted_kernel_is_refused_with_what_to_add(make_source: MakeSource, serve: Serve) -> None:
    server = serve(make_source(), trusted=[])
    with pytest.raises(UntrustedKernelError) as raised:
        tpu_kernels.get_kernel(REPO, version=1)
    assert str(raised.value) == (
        f"{REPO} is not trusted: the Hub ({server.url}) does not call tpu-kernels a trusted publisher; nothing "
        f"of it was run. If you trust it, pass trust_remote_code=['{REPO}'] (or ['tpu-kernels'] for all of "
        f"tpu-kernels), or --trust to a command, set TPU_KERNELS_TRUST={REPO}, or add the line {REPO} to the file that "
        "TPU_KERNELS_TRUST_FILE names"
    )
    assert [request.path for request in server.requests] == [f"/api/kernels/{REPO}/refs", PUBLISHER]
    assert not tpu_kernels.has_kernel(REPO, version=1)
    assert "UntrustedKernelError: " in str(tpu_kernels.explain(REPO, version=1))


@pytest.mark.parametrize("trust", [True, ["tpu-kernels"], [REPO], ("other", REPO)])
def test_a_call_can_trust(make_source: MakeSource, serve: Serve, trust: bool | list[str]) -> None:
    server = serve(make_source(), trusted=[])
    assert tpu_kernels.get_kernel(REPO, version=1, trust_remote_code=trust).add(1, 2) == 3
    assert PUBLISHER not in [request.path for request in server.requests]
    # What was allowed to one call is not allowed to another.
    with pytest.raises(UntrustedKernelError):
        tpu_kernels.get_kernel(REPO, version=1)


def test_an_allow_list_can_trust(
    make_source: MakeSource, serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve(make_source(), trusted=[])
    monkeypatch.setenv("TPU_KERNELS_TRUST", f"acme, {REPO}")
    assert f"TPU_KERNELS_TRUST lists {REPO}" in str(tpu_kernels.explain(REPO, version=1))
    monkeypatch.delenv("TPU_KERNELS_TRUST")
    file = tmp_path / "trusted.txt"
    file.write_text("# ours\n\ntpu-kernels  # everything\n")
    monkeypatch.setenv("TPU_KERNELS_TRUST_FILE", str(file))
    assert f"{file} lists tpu-kernels" in str(tpu_kernels.explain(REPO, version=1))


@pytest.mark.parametrize("trust", [REPO, ["a/b/c"], [""], [1]])
def test_what_names_nobody_is_a_mistake(trust: object) -> None:
    with pytest.raises(ConfigurationError, match="trust_remote_code"):
        tpu_kernels.has_kernel(REPO, version=1, trust_remote_code=trust)  # type: ignore[arg-type]


def test_an_allow_list_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_KERNELS_TRUST_FILE", "/nowhere/trusted.txt")
    with pytest.raises(
        ConfigurationError, match=r"TPU_KERNELS_TRUST_FILE=/nowhere/trusted\.txt cannot be read"
    ):
        Trust.of()


def test_a_name_is_no_prefix() -> None:
    trust = Trust.of(["tpu", "tpu-kernels/sample"])
    assert trust.reason("tpu/x") is not None
    assert trust.reason("tpu-kernels/sample-kernel") is None


def test_a_publisher_that_is_trusted_no_more_publishes_no_more(make_source: MakeSource, serve: Serve) -> None:
    server = serve(make_source(version=1))
    assert tpu_kernels.get_kernel(REPO, version=1).VERSION == 1
    server.trusted.clear()
    build_registry(make_source(version=2).parent, server.root)
    assert tpu_kernels.has_kernel(REPO, version=1)
    with pytest.raises(UntrustedKernelError):
        tpu_kernels.get_kernel(REPO, version=2)


def test_offline_a_copy_alone_is_no_trust(
    make_source: MakeSource, serve: Serve, run_python: RunPython
) -> None:
    """As where stock `kernels` fetched it, for a user who opted in there."""
    server = serve(make_source(), trusted=[])
    load = f"import tpu_kernels\nprint(tpu_kernels.get_kernel({REPO!r}, version=1, trust_remote_code=True).VERSION)"
    run_python(load, server)
    assert run_python(load, server, HF_HUB_OFFLINE="1") == "1\n"
    asked = f"import tpu_kernels\nprint(tpu_kernels.explain({REPO!r}, version=1))"
    assert "cannot be asked whether it trusts tpu-kernels" in run_python(asked, server, HF_HUB_OFFLINE="1")
