"""Random faults in child processes: each load gives the right kernel or a clear error, and the next one succeeds.

Twelve runs are part of every test run, one of each fault at least; `pytest -m slow` makes it two hundred.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tpu_kernels.authoring import build_registry
from tpu_kernels.testing import FakeHub, Fault

from .conftest import DROPPED, REPO, SAMPLE

RUNS, QUICK = 200, 12

RIGHT, REFUSED = 0, 3
LOAD = f"""
import sys, time
import tpu_kernels
from tpu_kernels.errors import TpuKernelsError
time.sleep = lambda seconds: None  # nobody waits here for a busy Hub
try:
    kernel = tpu_kernels.get_kernel({REPO!r}, version=1, source="hub")
except TpuKernelsError as error:
    print(f"{{type(error).__name__}}: {{error}}")
    sys.exit({REFUSED})
assert (kernel.add(2, 3), kernel.table(), kernel.late()) == (5, {{"tile": 128}}, "verified")
"""
PARTS = [
    "/refs",
    "/overview",
    "/tree/",
    "metadata.json",
    "__init__.py",
    "addition.py",
    "late.py",
    "table.json",
]


class Machine:
    """A machine with a cache of its own that loads from a Hub."""

    def __init__(self, server: FakeHub, home: Path, chance: random.Random) -> None:
        self.server, self.home, self.chance = server, home, chance

    def start(self, *, limit: int | None = None) -> subprocess.Popen[str]:
        """A process that loads the kernel, and can write no file of more than `limit` bytes."""
        inherited = {name: value for name, value in os.environ.items() if name not in DROPPED}
        environment = {**inherited, **self.server.environment(self.home), "TPU_KERNELS_FRESH": "0"}
        for timeout in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
            environment[timeout] = "1"
        sizes = (limit, limit) if limit is not None else resource.getrlimit(resource.RLIMIT_FSIZE)
        return subprocess.Popen(
            [sys.executable, "-B", "-c", LOAD],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, sizes),
        )

    def cached_files(self) -> list[Path]:
        """The files that loading left behind, but for the locks, which hold nothing."""
        files = sorted(path for path in self.home.rglob("*") if path.is_file() and not path.is_symlink())
        return [path for path in files if path.suffix != ".lock" and path.stat().st_size]

    def part(self) -> str:
        return self.chance.choice(PARTS)


def finish(*processes: subprocess.Popen[str], killed: bool = False) -> None:
    """Waits, and sees that each process had the right kernel or a clear error."""
    for process in processes:
        printed, _ = process.communicate(timeout=120)
        allowed = {RIGHT, REFUSED, -signal.SIGKILL} if killed else {RIGHT, REFUSED}
        assert process.returncode in allowed, printed
        if process.returncode == REFUSED:
            assert "Traceback" not in printed
            assert "Error: " in printed


def kill(machine: Machine) -> None:
    process = machine.start()
    time.sleep(machine.chance.uniform(0, 1.2))
    process.kill()
    finish(process, killed=True)


def kill_while_downloading(machine: Machine) -> None:
    part = machine.part()
    machine.server.inject(Fault(part, delay=30))
    process = machine.start()
    while process.poll() is None and not any(part in request.path for request in machine.server.requests):
        time.sleep(0.01)
    process.kill()
    finish(process, killed=True)


def cut(machine: Machine) -> None:
    times = machine.chance.choice([1, 2, None])
    machine.server.inject(
        Fault(machine.part(), cut=True, method=machine.chance.choice(["GET", "HEAD", None]), times=times)
    )
    finish(machine.start())


def truncate(machine: Machine) -> None:
    for path in machine.chance.sample(machine.cached_files(), k=min(2, len(machine.cached_files()))):
        os.truncate(path, machine.chance.randrange(path.stat().st_size))
    finish(machine.start())


def flip(machine: Machine) -> None:
    for path in machine.chance.sample(machine.cached_files(), k=min(1, len(machine.cached_files()))):
        content = bytearray(path.read_bytes())
        content[machine.chance.randrange(len(content))] ^= 1 << machine.chance.randrange(8)
        path.chmod(0o644)
        path.write_bytes(content)
    finish(machine.start())


def flip_on_the_way(machine: Machine) -> None:
    variant = machine.server.root / REPO / "v1" / "build" / "torch-tpu"
    path = machine.chance.choice(sorted(path for path in variant.rglob("*") if path.is_file()))
    content = bytearray(path.read_bytes())
    if content:
        content[machine.chance.randrange(len(content))] ^= 1 << machine.chance.randrange(8)
    place = path.relative_to(variant).as_posix()
    machine.server.inject(Fault(f"torch-tpu/{place}", method="GET", status=200, body=bytes(content), times=1))
    finish(machine.start())


def fill_the_disk(machine: Machine) -> None:
    with small_disk(machine) as limit:
        finish(machine.start(limit=limit))


def answer(status: int) -> Callable[[Machine], None]:
    def fault(machine: Machine) -> None:
        times = machine.chance.choice([1, 3, None])
        headers = machine.chance.choice([{}, {"Retry-After": "0"}])
        machine.server.inject(Fault(machine.part(), status=status, headers=headers, times=times))
        finish(machine.start())

    return fault


def time_out(machine: Machine) -> None:
    # huggingface_hub waits ten seconds for everything that is no file, and that is not for a test to sit out.
    part = machine.chance.choice([part for part in PARTS if not part.startswith("/")])
    machine.server.inject(Fault(part, delay=3, times=1))
    finish(machine.start())


def load_at_once(machine: Machine) -> None:
    finish(*[machine.start() for _ in range(3)])


def load_at_once_and_kill(machine: Machine) -> None:
    processes = [machine.start() for _ in range(3)]
    time.sleep(machine.chance.uniform(0.3, 1.2))
    processes[0].kill()
    finish(processes[0], killed=True)
    finish(*processes[1:])


FAULTS = [
    kill,
    kill_while_downloading,
    cut,
    truncate,
    flip,
    flip_on_the_way,
    fill_the_disk,
    answer(429),
    answer(500),
    time_out,
    load_at_once,
    load_at_once_and_kill,
]


@contextlib.contextmanager
def small_disk(machine: Machine) -> Iterator[int | None]:
    """A disk with next to no room under the cache; where none can be mounted, a limit on the size of files."""
    room = machine.chance.choice([4, 8, 16, 32, 48])
    mount = ["mount", "-t", "tmpfs", "-o", f"size={room}k", "tmpfs", str(machine.home)]
    is_mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield None if is_mounted else machine.chance.randrange(3000)
        after = shutil.copytree(machine.home, machine.home.with_name("after"), symlinks=True)
    finally:
        if is_mounted:
            subprocess.run(["umount", str(machine.home)], check=True)
    # What the full disk held is what the next load finds, with room again.
    shutil.rmtree(machine.home)
    after.rename(machine.home)


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hub's repositories, with the sample kernel."""
    root = tmp_path_factory.mktemp("hub") / "repositories"
    build_registry(SAMPLE.parent, root)
    return root


@pytest.fixture(scope="module")
def filled(repositories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of a machine that has loaded the kernel."""
    home = tmp_path_factory.mktemp("filled")
    with FakeHub(repositories, trusted=["tpu-kernels"]) as server:
        process = Machine(server, home, random.Random(0)).start()
        assert process.wait(timeout=120) == RIGHT
    return home


@pytest.mark.parametrize(
    "seed", [*range(QUICK), *(pytest.param(n, marks=pytest.mark.slow) for n in range(QUICK, RUNS))]
)
def test_a_fault_leaves_nothing_that_the_next_load_trips_over(
    seed: int, repositories: Path, filled: Path, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    fault = FAULTS[seed % len(FAULTS)]
    home = tmp_path / "home"
    has_cache = chance.random() < 0.3
    if fault in (truncate, flip) or (has_cache and fault is not fill_the_disk):
        shutil.copytree(filled, home, symlinks=True)
    else:
        home.mkdir()
    with FakeHub(repositories, trusted=["tpu-kernels"]) as server:
        machine = Machine(server, home, chance)
        fault(machine)
        server.clear()
        process = machine.start()
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == RIGHT, printed
