"""What does not work, or is not there, in stock `kernels` 0.17.2, beside what this library does about it.

Each script runs in a process of its own, against the same Hub; first for stock, which documents what it does, then
for this library. The numbers are those of the list in the project's plan. Elsewhere are 2, ops under a fixed name
(`test_registrations`), 6, a benchmark that waits for the TPU (`tests/bench/test_decode`), and 9, building without Nix
(`tests/authoring`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu_kernels.testing import FakeHub

from .conftest import REPO, MakeSource, Publish, RunPython, Serve

pytest.importorskip("kernels")

LOAD = f"kernel = get_kernel({REPO!r}, version=1)\n"


class Both:
    """Runs a script for stock, or for this library."""

    def __init__(self, run_stock: RunPython, run_python: RunPython) -> None:
        self._run_stock, self._run_python = run_stock, run_python

    def stock(self, script: str, server: FakeHub, **environment: str) -> str:
        return self._run_stock(f"from kernels import *\n{script}", server, **environment)

    def ours(self, script: str, server: FakeHub, **environment: str) -> str:
        imports = "from tpu_kernels import *\nfrom tpu_kernels.errors import *\n"
        return self._run_python(imports + script, server, **environment)


@pytest.fixture
def both(run_stock: RunPython, run_python: RunPython) -> Both:
    return Both(run_stock, run_python)


def raising(call: str, error: str, message: str = "") -> str:
    """A script that fails unless `call` raises `error`, with `message` in it."""
    return (
        f"try:\n    {call}\nexcept {error} as error:\n    assert {message!r} in str(error), error\n"
        "else:\n    raise AssertionError('it did not raise')\n"
    )


def test_1_offline_after_online(both: Both, make_source: MakeSource, serve: Serve) -> None:
    server = serve(make_source())
    again = LOAD.strip()
    both.stock(LOAD, server)
    both.stock(
        raising(again, "ValueError", "is not available in the local cache"), server, HF_HUB_OFFLINE="1"
    )
    both.ours(LOAD, server)
    both.ours(LOAD, server, HF_HUB_OFFLINE="1")


def test_3_loading_again(both: Both, make_source: MakeSource, serve: Serve) -> None:
    server = serve(make_source())
    twice = f"{LOAD}print('again', flush=True)\n{LOAD}"
    both.stock(LOAD, server)
    server.clear()
    both.stock(LOAD, server)
    once = len(server.requests)
    server.clear()
    both.stock(twice, server)
    assert len(server.requests) == 2 * once
    both.ours(LOAD, server)
    server.clear()
    both.ours(twice, server)
    assert len(server.requests) == 1
    server.close()
    both.stock(raising(LOAD.strip(), "ValueError", "could not verify publisher trust status"), server)
    assert "; the cache serves " in both.ours(LOAD, server)


def test_4_a_no_is_no_error(both: Both, make_source: MakeSource, publish: Publish, serve: Serve) -> None:
    server = serve(make_source())
    publish("acme/private", "")
    for call, error in [
        ("has_kernel('tpu-kernels/nothing', version=1)", "Exception"),
        (f"has_kernel({REPO!r}, version=9)", "ValueError"),
        ("has_kernel('acme/private', version=1)", "ValueError"),
    ]:
        both.stock(raising(call, error), server)
        both.ours(f"assert {call} is False", server)
    folder = str(server.root / REPO / "v1")
    both.stock(raising(f"get_local_kernel({folder!r})", "TypeError"), server)
    both.ours(f"assert get_local_kernel({folder!r}).add(1, 2) == 3", server)


def test_5_a_lock_holds_the_content_and_what_the_user_trusts(
    both: Both, publish: Publish, serve: Serve, tmp_path: Path
) -> None:
    publish("acme/relu", "NUMBER = 1")
    server = serve(trusted=[])
    (tmp_path / "pyproject.toml").write_text('[tool.kernels.dependencies]\n"acme/relu" = 1\n')
    script = "import sys\nfrom {}.cli import main\nsys.argv = {!r}\nmain()"
    lock = ["kernels", "lock", str(tmp_path)]
    both.stock(
        script.format("kernels", lock).replace("main()", raising("main()", "ValueError", "trusted")), server
    )
    both.ours(script.format("tpu_kernels", [*lock, "--trust", "acme"]), server)
    file = str(tmp_path / "kernels.lock")
    both.ours(f"assert load_kernel('acme/relu', lockfile={file!r}).NUMBER == 1", server)


def test_7_what_a_kernel_needs_is_checked_and_said(both: Both, publish: Publish, serve: Serve) -> None:
    publish(REPO, "", tpu={"requires": {"jax": ">=999"}})
    server = serve()
    both.stock(LOAD, server)
    both.ours(raising(LOAD.strip(), "IncompatibleKernelError", "run: pip install 'jax>=999'"), server)


def test_8_a_layer_that_does_not_say_whether_it_has_a_gradient(
    both: Both, publish: Publish, serve: Serve
) -> None:
    publish(REPO, "from . import layers")
    server = serve()
    (server.root / REPO / "v1/build/torch-tpu/layers.py").write_text(
        "import torch\n\nclass Double(torch.nn.Module):\n"
        "    @torch.no_grad\n    def forward(self, x):\n        return 2 * x\n"
    )
    train = f"""
import torch
@use_kernel_forward_from_hub("Double")
class Double(torch.nn.Module):
    def forward(self, x):
        return x + x
repository = LayerRepository({REPO!r}, layer_name="Double", version=1)
with use_kernel_mapping({{"Double": {{"tpu": repository}}}}):
    model = kernelize(Double(), mode=Mode.TRAINING, device="tpu")
assert not model(torch.ones(1, requires_grad=True)).requires_grad
"""
    both.stock(train, server)
    # Nothing is put into models here by a layer's name; who looks is told, and the build of such a layer is refused.
    look = (
        f"import sys\nfrom tpu_kernels.cli import main\nsys.argv = ['tpu-kernels', 'info', {REPO!r}]\nmain()"
    )
    assert "layer Double" in (told := both.ours(LOAD + look, server))
    assert "does not say whether it has a gradient" in told


def test_10_a_file_that_was_changed_is_refused(
    both: Both, make_source: MakeSource, serve: Serve, tmp_path: Path
) -> None:
    server = serve(make_source())
    for run, cache in ((both.stock, tmp_path / "stock" / "hub"), (both.ours, tmp_path / "home" / "hub")):
        run(LOAD, server)
        [file] = cache.glob("kernels--*/snapshots/*/build/torch-tpu/late.py")
        file.resolve().chmod(0o644)
        file.resolve().write_text("WORD = 'poisoned'\n")
    both.stock(f"{LOAD}assert kernel.late() == 'poisoned'", server)
    both.ours(raising(LOAD.strip(), "VerificationError", "changed: late.py"), server)


def test_10_trust_is_given_to_one_repository_for_good(both: Both, publish: Publish, serve: Serve) -> None:
    publish("acme/relu", "NUMBER = 1")
    server = serve(trusted=[])
    load = "get_kernel('acme/relu', version=1)"
    both.stock(raising(load, "ValueError"), server, TPU_KERNELS_TRUST="acme/relu")
    both.ours(f"assert {load}.NUMBER == 1", server, TPU_KERNELS_TRUST="acme/relu")
