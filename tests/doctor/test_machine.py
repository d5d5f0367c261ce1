"""The TPU, its users, and traps, on machines that are made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tpu_kernels import device
from tpu_kernels.device import Device
from tpu_kernels.doctor import Finding, machine

from .conftest import by_subject

TPU = Device("tpu", "v6e", chips=4)
CPU = Device("cpu", None, chips=0)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[[Device], dict[str, Finding]]:
    def examine(found: Device) -> dict[str, Finding]:
        monkeypatch.setattr(device, "current", lambda: found)
        return by_subject(machine.examine())

    return examine


def test_a_cpu_with_libtpu(
    here: Callable[[Device], dict[str, Finding]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = here(CPU)
    assert (found["TPU"].level, found["libtpu"].level) == ("ok", "warning")
    assert found["libtpu"].remedy == "export TPU_SKIP_MDS_QUERY=1"
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    assert set(here(CPU)) == {"TPU", "jax"}


def test_a_tpu(here: Callable[[Device], dict[str, Finding]], monkeypatch: pytest.MonkeyPatch) -> None:
    found = here(TPU)
    assert found["TPU"].message == "TPU v6e, 4 chips"
    assert found["tcmalloc"].level == "warning"
    assert (found["jax"].level, "libtpu" in found) == ("ok", False)
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    assert here(TPU)["jax"].level == "warning"
    assert here(Device("tpu", None, chips=1))["TPU"].level == "warning"


def test_who_has_the_chips_open(
    here: Callable[[Device], dict[str, Finding]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    assert here(TPU)["TPU users"].level == "ok"
    monkeypatch.setattr(machine, "_PROCESSES", tmp_path)
    for number, target in enumerate(("/dev/vfio/0", "/dev/null")):
        process = tmp_path / str(100 + number)
        (process / "fd").mkdir(parents=True)
        (process / "fd" / "3").symlink_to(target)
        (process / "comm").write_text("python\n")
    found = here(TPU)["TPU users"]
    assert (found.level, found.message) == ("warning", "open in python (process 100)")
