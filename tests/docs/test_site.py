"""The documentation builds, with every warning an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .conftest import CARDS, ROOT


def test_site(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for card in CARDS:
        assert (tmp_path / "kernels" / card.parent.name / "index.html").exists()
    assert "get_kernel" in (tmp_path / "reference" / "tpu_kernels" / "index.html").read_text()
