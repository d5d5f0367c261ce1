import dataclasses
import io
import struct
import zlib
from pathlib import Path

import pytest
from rich.console import Console

from tpu_kernels.bench import plot
from tpu_kernels.bench.comparison import compare
from tpu_kernels.bench.html import page
from tpu_kernels.bench.output import check_writable, write_result
from tpu_kernels.bench.report import render
from tpu_kernels.bench.results import (
    ArmResult,
    DecodeConfig,
    DecodeResult,
    Difference,
    Evidence,
    Measurement,
    Summary,
)
from tpu_kernels.errors import BenchmarkError

MEASUREMENT = Measurement(
    first_run_s=12.0,
    prefill_ms=Summary(5.0, 4.0, 6.0),
    step_ms=Summary(2.0, 1.5, 2.5),
    host_ms=Summary(0.5, 0.4, 0.6),
    tokens_per_s=Summary(12345.0, 450.0, 98765.4),
    graphs=8,
    late_graphs=0,
    recompile_limit_hit=False,
    reference="stock",
    difference=None,
    prefill_samples_ms=(5.0,),
    step_samples_ms=((2.0,),),
)
TROUBLED = dataclasses.replace(
    MEASUREMENT, late_graphs=2, recompile_limit_hit=True, difference=Difference(row=1, position=7)
)


def outcome(evidence: Evidence, *arms: ArmResult) -> DecodeResult:
    config = DecodeConfig(
        "org/[model]", experts=tuple(dict.fromkeys(arm.experts for arm in arms)), batches=(1, 8), repeats=1
    )
    return DecodeResult(config, evidence, "TPU v6e", "SomeForCausalLM", {"python": "3.11"}, "2026", arms)


def text(result: DecodeResult) -> str:
    shown = io.StringIO()
    Console(file=shown, width=200).print(render(result))
    return shown.getvalue()


MIXED = (
    ArmResult("stock", "grouped_mm (decode: batched_mm)", 1, MEASUREMENT, None),
    ArmResult("stock", "grouped_mm (decode: batched_mm)", 8, MEASUREMENT, None),
    ArmResult("ours", "ours", 1, TROUBLED, None),
    ArmResult("ours", "ours", 8, None, "no room for [8]"),
)


def test_the_table_says_everything() -> None:
    shown = text(outcome("measured", *MIXED))
    assert "Decode of org/[model]: TPU v6e" in shown
    assert "12,345 [450–98,765]" in shown
    assert "the reference" in shown
    assert "differ from stock at row 1, token 7" in shown
    assert "8 + 2 (limit)" in shown
    assert "recompile limit was hit" in shown
    assert "compiled during the timed runs" in shown
    assert "ours at batch 8 not run: no room for [8]" in shown
    assert "stock runs as grouped_mm (decode: batched_mm)." in shown
    assert "Evidence: measured" in shown


@pytest.mark.parametrize("evidence", ["emulated", "cpu"])
def test_only_a_tpu_has_tpu_speeds(evidence: Evidence) -> None:
    caution = "not TPU speeds"
    assert text(outcome(evidence, *MIXED)).count(caution) == 2
    assert caution in plot._caption(outcome(evidence, *MIXED))
    assert caution not in text(outcome("measured", *MIXED))
    assert caution not in plot._caption(outcome("measured", *MIXED))


@pytest.mark.parametrize("arms", [MIXED, MIXED[3:]], ids=["mixed", "nothing ran"])
def test_the_plot_is_a_whole_png(arms: tuple[ArmResult, ...]) -> None:
    picture = plot.draw(outcome("emulated", *arms))
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    position, kinds = 8, []
    while position < len(picture):
        (size,) = struct.unpack(">I", picture[position : position + 4])
        chunk = picture[position + 4 : position + 8 + size]
        (checksum,) = struct.unpack(">I", picture[position + 8 + size : position + 12 + size])
        assert zlib.crc32(chunk) == checksum
        kinds.append(chunk[:4])
        position += 12 + size
    assert (kinds[0], kinds[-1]) == (b"IHDR", b"IEND")


def test_a_missing_matplotlib_is_noticed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    plot.check_available()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BenchmarkError, match=r"install tpu-kernels\[bench\]"):
        plot.check_available()


def test_a_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "result.json"
    write_result(file, b"one")
    write_result(file, b"two")
    assert file.read_bytes() == b"two"

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(BenchmarkError, match=r"cannot write .*result\.json: disk full"):
        write_result(file, b"three")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("result.json", b"two")]


def test_paths_that_cannot_be_written_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable(tmp_path / "new.json")
    with pytest.raises(BenchmarkError, match="it is a folder; name a file in it"):
        check_writable(tmp_path)
    with pytest.raises(BenchmarkError, match=r"there is no folder .*missing; make it"):
        check_writable(tmp_path / "missing" / "new.json")
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "old.json")
    (tmp_path / "old.json").touch()
    with pytest.raises(BenchmarkError, match=r"no permission for .*old\.json; change it"):
        check_writable(tmp_path / "old.json")


def test_a_page_is_one_file_with_everything() -> None:
    made = page(outcome("emulated", *MIXED))
    assert "data:image/png;base64,iVBOR" in made
    assert "org/[model]" in made
    assert "not TPU speeds" in made
    assert "no room for [8]" in made
    assert 'src="http' not in made


def test_a_comparison_says_what_has_become_faster() -> None:
    faster = dataclasses.replace(MEASUREMENT, tokens_per_s=Summary(2e5, 1e5, 3e5))
    before = outcome("emulated", *MIXED)
    after = outcome("emulated", dataclasses.replace(MIXED[0], measurement=faster), *MIXED[1:])
    after = dataclasses.replace(after, versions={"python": "3.12"})
    shown = io.StringIO()
    Console(file=shown, width=200).print(compare(before, after))
    lines = [line.split() for line in shown.getvalue().splitlines()]
    assert ["stock", "1", "1.234e+04", "2e+05", "16.20", "0.5", "0.5", "faster"] in lines
    assert next(line for line in lines if line[:2] == ["stock", "8"])[-3:] == ["within", "the", "spread"]
    assert not any(line[:2] == ["ours", "8"] for line in lines), "it did not run"
    assert "python: 3.11, then 3.12." in shown.getvalue()
    assert "not TPU speeds" in shown.getvalue()


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(BenchmarkError, match="two of a kind"):
        compare(outcome("measured", *MIXED), outcome("cpu", *MIXED))
    with pytest.raises(BenchmarkError, match="no arm and batch size in common"):
        compare(outcome("cpu", MIXED[0]), outcome("cpu", MIXED[1]))
