"""Locks on what is used: who waits, who is told no, and what happens where nothing can be locked."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

from tpu_kernels.hub import usage


def test_those_who_use_exclude_those_who_delete(tmp_path: Path) -> None:
    lock = tmp_path / "x.lock"
    with usage.shared(lock), usage.shared(lock), usage.alone(lock) as free:
        assert not free
    with usage.alone(lock) as free:
        assert free
        with usage.alone(lock) as again:
            assert not again


def test_who_wants_to_use_waits_for_who_deletes(tmp_path: Path) -> None:
    lock = tmp_path / "x.lock"
    with usage.alone(lock) as free:
        assert free
        thread = threading.Thread(target=usage.hold, args=(lock,))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
    thread.join(10)
    with usage.alone(lock) as free:
        assert not free


def test_a_use_ends_with_its_process_and_leaves_its_time(tmp_path: Path) -> None:
    lock = tmp_path / "x.lock"
    script = f"from pathlib import Path; from tpu_kernels.hub import usage; usage.hold(Path({str(lock)!r}))"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert abs(lock.stat().st_mtime - time.time()) < 60
    with usage.alone(lock) as free:
        assert free


def test_where_nothing_can_be_written_nothing_is_free_and_nobody_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lock = tmp_path / "file" / "x.lock"
    usage.hold(lock)
    with usage.shared(lock), usage.alone(lock) as free:
        assert not free


def test_a_folder_is_for_one_at_a_time(tmp_path: Path) -> None:
    entered: list[str] = []

    def enter() -> None:
        with usage.folder_alone(tmp_path / "new"):
            entered.append("other")

    with usage.folder_alone(tmp_path / "new"):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join(0.1)
        entered.append("first")
    thread.join(10)
    assert entered == ["first", "other"]
    assert not list((tmp_path / "new").iterdir())
