"""What the pages show runs, and the commands they name exist with these options."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import tpu_kernels
from tpu_kernels.cli import app

from .conftest import CARDS, PAGES, ROOT, Block, blocks, name

TUTORIAL = ROOT / "docs" / "tutorial.md"
RUNNING = [
    page
    for page in PAGES
    if page != TUTORIAL and any(block.language == "python" and block.runs for block in blocks(page))
]


def run(page: Path) -> None:
    """Runs a page's Python from top to bottom, as one program."""
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in blocks(page):
        if block.language == "python" and block.runs:
            # (Blank lines in front: a traceback then shows the line of the page.)
            source = "\n" * (block.line - 1) + block.text
            exec(compile(source, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", RUNNING, ids=name)
def test_python_of_a_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels_src").symlink_to(ROOT / "kernels_src")
    monkeypatch.chdir(tmp_path)
    try:
        run(page)
    finally:
        tpu_kernels.disable()


@pytest.mark.slow
def test_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a reader does it: commands and Python in their order, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    folder = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for block in blocks(TUTORIAL):
        if block.language == "python":
            subprocess.run([sys.executable, "-c", block.text], env=environment, check=True)
        for line in block.text.splitlines() if block.language == "console" else ():
            assert line.startswith("$ ")
            expected = 1 if line.endswith("# exit status 1") else 0
            done = subprocess.run(line[2:], shell=True, env=environment, capture_output=True, text=True)
            assert done.returncode == expected, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.device
@pytest.mark.parametrize("page", CARDS, ids=name)
def test_python_of_a_card(page: Path, device: str) -> None:
    if device != "tpu":
        pytest.skip("cards show device tpu")
    run(page)


_COMMAND = re.compile(r"\s*(?:\$ )?(\w+=\S+ +)*tpu-kernels +(?P<words>.*)")


def command_lines(block: Block) -> list[str]:
    """The calls of `tpu-kernels` in a block of shell lines, without what is around them."""
    text = block.text.replace("\\\n", " ")
    lines = (_COMMAND.match(line) for line in text.splitlines())
    return [shlex.join(shlex.split(match["words"], comments=True)) for match in lines if match]


COMMANDS = sorted(
    {
        (name(page), line)
        for page in (*PAGES, *CARDS)
        for block in blocks(page)
        if block.language in ("", "console", "bash")
        for line in command_lines(block)
    }
)


def test_commands_are_found_in_the_pages() -> None:
    assert len(COMMANDS) > 20


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_command(page: str, line: str) -> None:
    command: Any = typer.main.get_command(app)
    words = shlex.split(line)
    while (commands := getattr(command, "commands", None)) and words[0] != "COMMAND":
        assert words[0] in commands, f"{page}: there is no command {words[0]!r}"
        command = commands[words.pop(0)]
    known = {
        option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
    }
    if command.context_settings.get("ignore_unknown_options"):
        return
    for word in words:
        option = word.partition("=")[0]
        assert not option.startswith("-") or option in known | {"--help"}, (
            f"{page}: {line}: no option {option}"
        )
