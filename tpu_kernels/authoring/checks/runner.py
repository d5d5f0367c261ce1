"""Makes the checks: those that run a kernel's code in processes beside this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ...errors import BuildError, TpuKernelsError
from ..builder import assemble, build
from ..project import CONFIG_FILE
from .report import Finding, Outcome, Report
from .subject import Subject
from .table import CHECKS, Check

_PACKAGE_PARENT = Path(__file__).parents[3]
# Interpreting a kernel is slow; a check of one takes minutes at most.
_TIMEOUT = 1800.0
_NO_TPU = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}


def check(
    source: str | Path,
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> Report:
    """Checks a kernel's source; what it runs of the kernel, it runs in other processes, on the CPU.

    Args:
        source: The folder of the source.
        quick: Looks at a part only: some examples, one generation, no simulation, no emulated device.
        only: The names of the checks to make, in place of all.
        on_outcome: Is called with what each check came to.

    Raises:
        BuildError: There is no kernel's source in that folder, or no such check.

    Example:
        >>> from tpu_kernels.authoring import check
        >>> print(check("kernels_src/ragged-dot", quick=True))  # doctest: +SKIP
    """
    source = Path(source).resolve()
    if not (source / CONFIG_FILE).is_file():
        raise BuildError(f"{source} holds no {CONFIG_FILE}: give the folder of a kernel's source")
    names = [each.name for each in CHECKS]
    if unknown := sorted(set(only) - set(names)):
        raise BuildError(f"there is no check {unknown[0]!r}; there are {', '.join(names)}")
    chosen = [each for each in CHECKS if each.name in only or (not only and (each.quick or not quick))]
    kernel, kernel_id = _identity(source)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="tpu-kernels-check-") as folder:
        subject = Subject(source, Path(folder, source.name), quick)
        for outcome in _outcomes(subject, chosen):
            outcomes.append(outcome)
            on_outcome(outcome)
    return Report(kernel, outcomes, kernel_id)


def _identity(source: Path) -> tuple[str, str | None]:
    """The kernel's name and id, as far as they can be told."""
    try:
        metadata = assemble(source).metadata
    except TpuKernelsError:
        return source.name, None
    return metadata.name, metadata.id


def _outcomes(subject: Subject, checks: Sequence[Check]) -> Iterator[Outcome]:
    for each in checks:
        if each.place == "here":
            yield each.run(subject)
    elsewhere = [each for each in checks if each.place != "here"]
    if not elsewhere:
        return
    try:
        build(subject.source, subject.build)
    except TpuKernelsError as error:
        for each in elsewhere:
            yield Outcome(each.name, "not run", (Finding("note", f"it cannot be built: {error}"),))
        return
    for place in ("process", "emulated", "stock"):
        yield from _in_processes(subject, [each for each in elsewhere if each.place == place])


def _in_processes(subject: Subject, checks: Sequence[Check]) -> Iterator[Outcome]:
    """Makes checks of one place in a process, and where it dies in one, the rest in another."""
    pending = list(checks)
    while pending:
        done, ended = _process(subject, pending)
        yield from done
        pending = pending[len(done) :]
        if pending and ended:
            message = f"the process ended in this check: {ended}"
            yield Outcome(pending.pop(0).name, "failed", (Finding("error", message),))


def _process(subject: Subject, checks: Sequence[Check]) -> tuple[list[Outcome], str]:
    """What those checks came to that were made, and how the process ended where it did not make them all."""
    with tempfile.TemporaryDirectory(prefix="tpu-kernels-check-") as folder:
        results = Path(folder, "outcomes")
        # -P: a module in the working directory must not stand in for one of the standard library.
        command = [
            sys.executable,
            "-P",
            "-m",
            f"{__package__}.worker",
            str(subject.source),
            str(subject.build),
        ]
        command += ["quick" if subject.quick else "full", str(results), *(each.name for each in checks)]
        path = os.pathsep.join(filter(None, [str(_PACKAGE_PARENT), os.environ.get("PYTHONPATH")]))
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=_TIMEOUT,
                check=False,
                env=os.environ | _NO_TPU | {"PYTHONPATH": path},
            )
            ended = _end(done)
        except subprocess.TimeoutExpired:
            ended = f"it did not finish within {_TIMEOUT:g} s"
        lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
        return [_parse(line) for line in lines], ended


def _parse(line: str) -> Outcome:
    from .worker import outcome_from_json

    return outcome_from_json(line)


def _end(done: subprocess.CompletedProcess[str]) -> str:
    status = done.returncode
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
    return f"{how}: {last.strip()[:400]}" if last else how
