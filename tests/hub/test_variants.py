"""Which of a version's builds is taken: stock's names in stock's order, and the reasons against the others."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

import tpu_kernels
from tpu_kernels.errors import IncompatibleKernelError
from tpu_kernels.hub.variants import is_for_tpu, judge

from .conftest import Publish, Serve

REPO = "tpu-kernels/many-builds"
TORCH = Version(importlib.metadata.version("torch"))
THIS = f"torch{TORCH.major}{TORCH.minor}"
OLDER, NEWER = (f"torch-stable-abi{TORCH.major}{TORCH.minor + step}" for step in (-1, 1))
HERE = f"{platform.machine()}-{platform.system().lower()}"
# In the order of preference of stock `kernels`.
ACCEPTED = [
    f"torch-stable-abi{TORCH.major}{TORCH.minor}-tpu-{HERE}",
    f"{OLDER}-tpu-{HERE}",
    f"{THIS}-tpu-{HERE}",
    f"{THIS}-cxx11-tpu-{HERE}",
    "torch-tpu",
    "torch-universal",
]
REFUSED = [
    f"{NEWER}-tpu-{HERE}",
    f"torch{TORCH.major}{TORCH.minor - 1}-tpu-{HERE}",
    f"{THIS}-cxx98-tpu-{HERE}",
    f"{THIS}-tpu-riscv64-linux",
    f"{THIS}-cu128-{HERE}",
    f"tvm-ffi01-tpu-{HERE}",
    "torch-cuda",
    "torch-cpu",
    "torch-noarch",
    "torch-tpu-v5e",
]


@given(st.permutations(ACCEPTED + REFUSED))
def test_the_order_is_that_of_stock(names: list[str]) -> None:
    verdicts = judge(names)
    assert [verdict.name for verdict in verdicts if not verdict.refusal] == ACCEPTED
    assert {verdict.name for verdict in verdicts if verdict.refusal} == set(REFUSED)


def test_stock_takes_and_prefers_the_same() -> None:
    variants = pytest.importorskip("kernels.variants")
    backends = pytest.importorskip("kernels.backends")
    import torch

    # With tvm-ffi installed stock takes its builds too; this library loads kernels for torch.
    known = [variants.parse_variant(name) for name in ACCEPTED + REFUSED if not name.startswith("tvm")]
    version = Version(f"{TORCH.major}.{TORCH.minor}")
    cpu, system = HERE.split("-")
    abi = torch.compiled_with_cxx11_abi()
    found, _ = variants._resolve_variant_for_system(known, backends.TPU(), cpu, system, version, abi, None)
    assert [variant.variant_str for variant in found] == ACCEPTED


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            f"{NEWER}-tpu-{HERE}",
            f"it needs torch>={TORCH.major}.{TORCH.minor + 1}, .* run: pip install 'torch>=",
        ),
        (
            f"torch{TORCH.major}{TORCH.minor - 1}-tpu-{HERE}",
            rf"it needs torch=={TORCH.major}\.{TORCH.minor - 1}\.\*, ",
        ),
        (f"{THIS}-tpu-riscv64-linux", f"it is compiled for riscv64-linux, and this machine is {HERE}"),
        ("torch-cuda", "it is built for cuda"),
        (f"tvm-ffi01-tpu-{HERE}", "it is built for tvm-ffi"),
        ("torch-tpu-v5e", "no build has such a name"),
    ],
)
def test_a_refusal_says_why(name: str, reason: str) -> None:
    [verdict] = judge([name])
    assert re.match(reason, verdict.refusal)


@given(st.text() | st.from_regex(r"torch[-a-z0-9_./]*"))
def test_a_name_that_is_taken_names_no_other_folder(name: str) -> None:
    [verdict] = judge([name])
    if is_for_tpu(name) or not verdict.refusal:
        assert not set(name) & set("./\\:\0")


class TestLoading:
    def test_the_best_build_is_fetched_alone(self, publish: Publish, serve: Serve, tmp_path: Path) -> None:
        best = f"{THIS}-tpu-{HERE}"
        for number, variant in enumerate(["torch-cuda", "torch-tpu", best]):
            publish(REPO, f"# {number}", variants=[variant])
        serve()
        assert best == tpu_kernels.get_kernel(REPO, version=1).VARIANT
        fetched = (tmp_path / "cache").glob("kernels--*/snapshots/*/build/*/__init__.py")
        assert [path.parent.name for path in fetched] == [best]
        steps = tpu_kernels.explain(REPO, version=1).decisions
        assert [(step.subject, step.accepted) for step in steps] == [
            (f"{REPO} v1 torch-cuda", False),
            (f"{REPO} v1 {best}", True),
            (f"{REPO} v1 torch-tpu", False),
        ]
        assert [steps[0].reason, steps[2].reason] == ["it is built for cuda", f"{best} is preferred"]

    def test_a_build_for_any_hardware_is_taken(self, publish: Publish, serve: Serve) -> None:
        publish(REPO, "# any", variants=["torch-universal"], backend={"type": "cpu"})
        serve()
        assert tpu_kernels.get_kernel(REPO, version=1).VARIANT == "torch-universal"

    def test_the_next_best_is_taken_where_the_best_needs_more(self, publish: Publish, serve: Serve) -> None:
        publish(REPO, "# a", variants=[ACCEPTED[0]], tpu={"requires": {"no-such-package": ">=1"}})
        publish(REPO, "# b", variants=["torch-tpu"])
        serve()
        assert tpu_kernels.get_kernel(REPO, version=1).VARIANT == "torch-tpu"

    def test_builds_for_tpus_that_do_not_run_here_say_what_they_need(
        self, publish: Publish, serve: Serve
    ) -> None:
        publish(REPO, "", variants=[f"{NEWER}-tpu-{HERE}", "torch-cuda"])
        serve()
        with pytest.raises(
            IncompatibleKernelError, match=rf"no build that runs here: {NEWER}-tpu-{HERE}: it needs torch>="
        ):
            tpu_kernels.get_kernel(REPO, version=1)

    def test_a_local_kernel_is_chosen_alike(self, publish: Publish, tmp_path: Path) -> None:
        for number, variant in enumerate([ACCEPTED[2], "torch-tpu"]):
            publish(REPO, f"# local {number}", variants=[variant])
        folder = tmp_path / "repositories" / REPO / "v1"
        assert ACCEPTED[2] == tpu_kernels.get_local_kernel(folder).VARIANT
        renamed = (folder / "build" / "torch-tpu").rename(tmp_path / "any name")
        assert tpu_kernels.get_local_kernel(renamed).VARIANT == "torch-tpu"
