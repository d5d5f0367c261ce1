import pytest

from tpu_kernels.analysis.target import parse_target
from tpu_kernels.errors import AnalysisError


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("v4", "v4:2x2x1"),
        ("v5e", "v5e:2x2"),
        ("v5p", "v5p:2x2x1"),
        ("v6e", "v6e:2x2"),
        ("tpu7x", "tpu7x:2x2x1"),
        ("v6e-1", "v6e:1x1"),
        ("v6e-8", "v6e:2x4"),
        ("v5p-8", "v5p:2x2x1"),  # counts TensorCores
        ("tpu7x-16", "tpu7x:2x2x2"),
        ("v6e:4x8", "v6e:4x8"),
    ],
)
def test_names(name: str, topology: str) -> None:
    target = parse_target(name)
    assert (target.topology, target.name) == (topology, name)
    assert topology.startswith(target.generation)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v3", "unknown TPU target 'v3'; give one of v4, v5e, v5p, v6e, tpu7x, or a slice such as v6e-8"),
        ("", "unknown TPU target ''"),
        ("v6e-5", "unknown TPU slice 'v6e-5'; give one of v6e-1, v6e-4, v6e-8"),
        ("v5p-1", "unknown TPU slice 'v5p-1'; give one of v5p-2, v5p-8"),
        ("v6e:2x2x1", "wrong number of axes; it should be like v6e:2x2"),
    ],
)
def test_no_such_target(name: str, message: str) -> None:
    with pytest.raises(AnalysisError) as raised:
        parse_target(name)
    assert message in str(raised.value)
