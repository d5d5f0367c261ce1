"""The page: what it says of facts, and that a browser shows it."""

from __future__ import annotations

import functools
import html
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tpu_kernels.dashboard import Facts, KernelFacts, ModelFacts, PeerFacts, Run, render

RUN = Run(
    generation="v6e",
    op="ragged_dot",
    case="qwen3-30b-a3b:decode:8 gate-up",
    compiled=True,
    vmem_bytes=1 << 20,
    time_ms=0.25,
    error=0.023,
    floor_ms=0.2,
    evidence="simulated",
)
REFUSED = Run(generation="v4", op="ragged_dot", case="here", compiled=False, reason="17 MiB of 16 MiB <VMEM>")
KERNEL = KernelFacts(
    name="acme/product",
    version=2,
    build="b2",
    generations=("v4", "v6e"),
    runs=(RUN, REFUSED),
    checks={"numerics": "passed", "memory": "failed", "stock": "not run"},
)
OTHER = KernelFacts(name="acme/other", version=1, build="o1", generations=("v6e",))
MODELS = tuple(
    ModelFacts(
        model="preset:mixtral",
        arm=arm,
        batch=1,
        tokens=tokens,
        graphs=1,
        tokens_per_s=123.4,
        evidence=evidence,
        device="a device",
    )
    for arm, tokens, evidence in (("ours", "reference", "measured"), ("stock", "differ", "emulated"))
)
PEER = PeerFacts(
    kernel="acme/product", generation="v6e", problem="M8", ours_ms=0.5, floor_ms=0.4, peer_ms=0.6
)
FACTS = Facts(
    made="2030-01-02 03:04 UTC",
    versions={"jax": "1.2"},
    kernels=(KERNEL, OTHER),
    models=MODELS,
    peers=(PEER,),
    history=(KERNEL.model_copy(update={"build": "b1", "runs": (RUN.model_copy(update={"time_ms": 0.5}),)}),),
)


def text_of(page: str) -> str:
    """What is to be read on it, with single spaces."""
    body = re.sub(r"<(script|style)>.*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_what_the_page_says() -> None:
    text = text_of(render(FACTS))
    for said in (
        "≤ 1.25× floor simulated",  # the kernel's slowest call
        "0 of 1 compile",
        "✓ numerics ✗ memory – stock",
        "17 MiB of 16 MiB <VMEM>",
        "250 µs ± 2.3 %",
        "no case run",
        "1.20×",
    ):
        assert said in text, said
    # Only what was measured on a TPU is shown as a speed.
    assert text.count("123.4") == 1
    assert "no TPU speed" in text


def test_text_is_escaped_and_nothing_is_loaded() -> None:
    page = render(FACTS)
    assert "<VMEM>" not in page
    assert not re.search(r"""(src|href)=|url\(|@import|fetch\(""", page)


def test_what_was_not_given_is_not_run() -> None:
    text = text_of(render(Facts(made="now", versions={})))
    assert "Not run: no comparison was given" in text
    assert "Not run: no decode benchmark was given" in text


def test_a_trend_is_of_a_calls_builds_a_build_once() -> None:
    earlier = Facts(made="2029", versions={}, kernels=(FACTS.history[0],))
    again = FACTS.model_copy(update={"history": ()}).after([earlier, earlier])
    assert len(again.history) == 1
    assert again.trend(KERNEL, RUN) == [0.5, 0.25]
    # The same build again is no step of a trend.
    assert FACTS.after([FACTS]).trend(KERNEL, RUN) == [0.5, 0.25]
    assert "<polyline" in render(again)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PROBE = """<script>
addEventListener("error", event => { document.title = "error: " + event.message; });
addEventListener("load", () => {
  const rows = () => [...document.querySelectorAll("[data-row]")].filter(row => !row.hidden).length;
  const all = rows(), box = document.getElementById("text");
  box.value = "acme/other"; box.dispatchEvent(new Event("input"));
  const some = rows();
  box.value = ""; box.dispatchEvent(new Event("input"));
  document.getElementById("theme").click();
  const theme = document.documentElement.dataset.theme;
  const { scrollWidth } = document.documentElement;
  parent.postMessage([all, some, theme, scrollWidth <= innerWidth, innerWidth].join(" "), "*");
});
</script>"""
FRAME = """<!doctype html><title>waiting</title><iframe src="page.html" style="border:0;width:{width}px;height:1600px">
</iframe><script>addEventListener("message", event => {{ document.title = event.data; }});</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="not run: there is no Chromium")
@pytest.mark.parametrize("width", [390, 1440])
def test_a_browser_shows_it(width: int, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(render(FACTS).replace("</head>", PROBE + "</head>"))
    # (A frame, since the window itself cannot be as narrow as a phone.)
    (tmp_path / "frame.html").write_text(FRAME.format(width=width))
    browser = functools.partial(subprocess.run, capture_output=True, text=True, check=True, timeout=120)
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += ["--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"]
    command += [f"--window-size={max(width, 600)},1600", "--virtual-time-budget=5000"]
    address = (tmp_path / "frame.html").as_uri()
    done = browser([*command, "--dump-dom", address])
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None
    rows = len(FACTS.kernels) + len(KERNEL.runs) + len(FACTS.peers) + len(MODELS)
    assert title[1] in (f"{rows} 1 dark true {width}", f"{rows} 1 light true {width}")
    assert "CONSOLE" not in done.stderr
    folder = Path(os.environ.get("TPU_KERNELS_ARTIFACTS", tmp_path)).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"dashboard-{width}.png"
    browser([*command, f"--screenshot={picture}", address])
    assert picture.stat().st_size > 10_000
