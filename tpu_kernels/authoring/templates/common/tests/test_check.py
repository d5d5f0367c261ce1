"""What `tpu-kernels check --quick` says about this kernel."""

from pathlib import Path

from tpu_kernels.authoring import check


def test_the_kernel_passes_its_check() -> None:
    report = check(Path(__file__).parents[1], quick=True)
    assert report.ok, str(report)
