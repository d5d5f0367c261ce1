"""Loading a kernel: requests and time, by this library and by stock `kernels`, from the same Hub on this machine.

    pytest benchmarks/bench_loader.py --benchmark-columns=median,iqr,rounds

Each load runs in a process of its own, in which torch and JAX are imported before the clock starts: every user of
a kernel has them. The import of the loader is part of the load, and so is running the kernel's own modules, which
costs both the same. The two take turns, round by round, so that what else the machine does hits both. No TPU is
needed, and nothing here says anything about one.

    cold      nothing is in the cache
    cached    the kernel is in the cache
    asked     the same, where the Hub is asked each time (TPU_KERNELS_FRESH=0)
    locked    the same, by a lock
    again     it is loaded in this process already
    offline   it is in the cache, and HF_HUB_OFFLINE=1; stock cannot do that for a version
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tpu_kernels.hub import registry_root
from tpu_kernels.testing import FakeHub

REPO = "tpu-kernels/ragged-dot"
ROUNDS = 9
STATES = ["cold", "cached", "asked", "locked", "again", "offline"]
LIBRARIES = {"stock": ("kernels", ""), "ours": ("tpu_kernels", ', source="hub"')}
STOCK_CANNOT = ("asked", "locked", "offline")
FORKING = Path(__file__).parents[1] / "tests" / "hub" / "forking.py"

# Stock takes a process for a TPU's by the attribute, which torch_tpu does not set.
SCRIPT = """
import types, torch
torch.backends.tpu = types.ModuleType("torch.backends.tpu")
from time import perf_counter
start = perf_counter()
import {module}
{module}.get_kernel({repo!r}, version=1{options})
if {again}:
    start = perf_counter()
    {module}.get_kernel({repo!r}, version=1{options})
print("seconds", perf_counter() - start)
"""


class Clock:
    """A timer that runs while a load does, by that process's own clock."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


clock = Clock()
results: dict[tuple[str, str], tuple[int, list[float]]] = {}


class Loads:
    """Runs loads in fresh processes, each with its own cache."""

    def __init__(self, server: FakeHub, folder: Path, forking: subprocess.Popen[str]) -> None:
        self._server, self._folder, self._forking = server, folder, forking

    def run(self, library: str, state: str) -> int:
        """Loads once, by a library from a state, and returns how many requests that took."""
        module, options = LIBRARIES[library]
        environment = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
        if state == "cold":
            shutil.rmtree(self._folder / library, ignore_errors=True)
        if state == "asked":
            environment["TPU_KERNELS_FRESH"] = "0"
        if state == "offline":
            environment["HF_HUB_OFFLINE"] = "1"
        if state == "locked":
            environment["TPU_KERNELS_LOCK"] = str(self._lock())
            options = ', source="lock"'
        self._server.clear()
        script = SCRIPT.format(module=module, repo=REPO, options=options, again=state == "again")
        clock.now += self._time(script, library, environment)
        return len(self._server.requests)

    def _time(self, script: str, library: str, environment: dict[str, str]) -> float:
        output = self._folder / "printed"
        output.unlink(missing_ok=True)
        environment = {**os.environ, **self._server.environment(self._folder / library), **environment}
        job = {"script": script, "environment": environment, "output": str(output)}
        assert self._forking.stdin is not None
        assert self._forking.stdout is not None
        self._forking.stdin.write(json.dumps(job) + "\n")
        self._forking.stdin.flush()
        assert self._forking.stdout.readline() == "0\n", output.read_text()
        return float(output.read_text().rpartition("seconds ")[2])

    def _lock(self) -> Path:
        lock = self._folder / "kernels.lock"
        entry = {"dependency": {"repo-id": REPO, "version": 1}, "lock": {"commit": self._server.commit(REPO)}}
        lock.write_text(json.dumps([entry]))
        return lock


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    """In the place of what the other benchmarks do: loading needs no device."""


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory):
    pytest.importorskip("kernels")
    command = [sys.executable, "-W", "ignore", str(FORKING), "torch", "jax", "jax.experimental.pallas.tpu"]
    # An installed package has its bytecode beside it, as stock does here; a warm-up writes it for this checkout.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with (
        FakeHub(registry_root(), trusted=["tpu-kernels"]) as server,
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as forking,
    ):
        yield Loads(server, tmp_path_factory.mktemp("loads"), forking)
        forking.stdin.close()


@pytest.fixture(scope="module")
def measured(loads: Loads) -> dict[tuple[str, str], tuple[int, list[float]]]:
    """Requests and seconds of every load, the libraries in turn; the first round is a warm-up."""
    for number in range(ROUNDS + 1):
        for state in STATES:
            for library in LIBRARIES:
                if library == "stock" and state in STOCK_CANNOT:
                    continue
                if state == "cached":
                    # The state before may have been cold or asked: fill the cache, and have the answer fresh.
                    loads.run(library, "cached")
                start = clock()
                requests = loads.run(library, state)
                if state == "again":
                    # The process loaded it once before, from the cache.
                    requests -= results[library, "cached"][0]
                _, seconds = results.setdefault((library, state), (requests, []))
                results[library, state] = (requests, [*seconds, clock() - start] if number else [])
    return results


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.benchmark(timer=clock)
def test_load(benchmark, measured, state, library):
    if (library, state) not in measured:
        pytest.skip(f"stock cannot load {state}")
    requests, seconds = measured[library, state]
    durations = iter(seconds)

    def replay():
        clock.now += next(durations)

    benchmark.group = f"{state}: one load"
    benchmark.extra_info["requests"] = requests
    benchmark.pedantic(replay, rounds=len(seconds))


def test_requests_and_factors(measured, capsys):
    """The aims for requests hold on every machine; the factors are printed, since times are this machine's.

    A factor is the median over the rounds of stock's time by ours, for `asked`, `locked` and `offline` of stock's
    cached load.
    """
    requests = {key: count for key, (count, _) in measured.items()}
    with capsys.disabled():
        print(f"\n{'':9}{'stock':>26}{'ours':>26}{'factor':>9}")
        for state in STATES:
            cells = [
                f"{requests[key]:3} requests {1000 * statistics.median(measured[key][1]):9.2f} ms"
                if key in measured
                else "cannot"
                for key in (("stock", state), ("ours", state))
            ]
            _, base = measured.get(("stock", state), measured["stock", "cached"])
            factor = statistics.median(b / o for b, o in zip(base, measured["ours", state][1], strict=True))
            print(f"{state:9}{cells[0]:>26}{cells[1]:>26}{factor:9.1f}")
    assert requests["ours", "cold"] <= requests["stock", "cold"]
    assert requests["ours", "asked"] == 1
    for state in ("cached", "locked", "again", "offline"):
        assert requests["ours", state] == 0
