"""Building a kernel: what the artifact holds, that it is reproducible, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tpu_kernels.authoring import build
from tpu_kernels.errors import BuildError, InvalidMetadataError, TpuKernelsError

REPOSITORY = Path(__file__).parents[2]


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_the_artifact_has_the_stock_layout(source: Path, tmp_path: Path) -> None:
    kernel = build(source, tmp_path / "out")
    files = tree(tmp_path / "out")
    ops = {
        path.relative_to(REPOSITORY / "tpu_kernels" / "ops").as_posix()
        for path in (REPOSITORY / "tpu_kernels" / "ops").rglob("*.py")
    }
    assert set(files) == {
        "README.md",
        *(
            f"build/torch-tpu/{name}"
            for name in (
                "metadata.json",
                "__init__.py",
                "late.py",
                "table.json",
                "numbers/__init__.py",
                "numbers/addition.py",
                "sample_kernel/__init__.py",
                *(f"tpu_ops/{path}" for path in ops),
            )
        ),
    }
    assert files == kernel.files


def test_the_metadata_holds_stock_keys_and_the_tpu_section(source: Path, tmp_path: Path) -> None:
    kernel = build(source, tmp_path / "out")
    metadata = json.loads((tmp_path / "out" / "build" / "torch-tpu" / "metadata.json").read_text())
    assert metadata.pop("id") == kernel.metadata.id
    assert kernel.metadata.id.startswith("_sample_kernel_tpu_")
    assert kernel.metadata.id.isidentifier()
    digest = metadata.pop("digest")
    assert digest["algorithm"] == "sha256"
    assert "metadata.json" not in digest["files"]
    assert metadata == {
        "name": "sample-kernel",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "tpu"},
        "tpu": {
            "generations": ["v5e", "v6e"],
            "ops": {
                "add": {
                    "constraints": "whole numbers",
                    "differentiable": True,
                    "dtypes": ["bfloat16", "float32"],
                }
            },
            "provides": {"transformers.experts": {"sample": "add"}},
            "requires": {"packaging": ">=20", "torch-tpu": ">=0.2"},
        },
    }


def test_the_same_source_gives_the_same_bytes(source: Path, package: Path, tmp_path: Path) -> None:
    build(source, tmp_path / "first")
    # What differs between checkouts of one source: its place, times, modes, bytecode, editors' leftovers.
    twin = Path(shutil.copytree(source, tmp_path / "elsewhere"))
    os.utime(twin / "build.toml", (0, 0))
    (twin / "torch-ext" / "sample_kernel" / "late.py").chmod(0o755)
    cache = twin / "torch-ext" / "sample_kernel" / "__pycache__"
    cache.mkdir()
    (cache / "late.cpython-311.pyc").write_bytes(b"bytecode")
    (twin / "torch-ext" / "sample_kernel" / ".late.py.swp").write_bytes(b"swap")
    build(twin, tmp_path / "second")
    assert tree(tmp_path / "first") == tree(tmp_path / "second")


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("torch-ext/sample_kernel/late.py", '"verified"', '"other"'),
        ("torch-ext/sample_kernel/table.json", "128", "256"),
        ("build.toml", "version = 1", "version = 2"),
        ("build.toml", 'packaging = ">=20"', 'packaging = ">=21"'),
    ],
)
def test_builds_that_differ_have_different_ids(
    source: Path, tmp_path: Path, file: str, old: str, new: str
) -> None:
    first = build(source, tmp_path / "first")
    edit(source / file, old, new)
    assert build(source, tmp_path / "second").metadata.id != first.metadata.id


def test_the_card_does_not_change_the_id(source: Path, tmp_path: Path) -> None:
    first = build(source, tmp_path / "first")
    (source / "README.md").write_text("# another text\n")
    assert build(source, tmp_path / "second").metadata == first.metadata


def test_a_stock_build_file_is_read(source: Path, tmp_path: Path) -> None:
    (source / "build.toml").write_text(
        '[general]\nname = "sample-kernel"\nversion = 3\nedition = 5\nlicense = "MIT"\n'
        'backends = ["cpu", "tpu"]\nupstream = "https://github.com/org/sample"\n'
        '[general.hub]\nrepo-id = "org/sample-kernel"\n[torch-noarch]\npyext = ["py", "json"]\n[kernel]\n'
    )
    kernel = build(source, tmp_path / "out")
    assert (kernel.repo_id, kernel.metadata.version, kernel.metadata.tpu) == ("org/sample-kernel", 3, None)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "version = 1",
            'version = "1"',
            "build.toml: general.version: Input should be a valid integer, got '1'",
        ),
        ("version = 1", "version = 0", "general.version: Input should be greater than or equal to 1, got 0"),
        ("version = 1", "version = ", "build.toml: Invalid value"),
        ('license = "Apache-2.0"', "", "general.license: Field required"),
        ('name = "sample-kernel"', 'name = "../sample"', "general.name: String should match pattern"),
        (
            '"tpu-kernels/sample-kernel"',
            '"tpu-kernels/../sample"',
            "general.hub.repo-id: 'tpu-kernels/../sample'",
        ),
        ('["kernels-community/sample-kernel"]', '["sample"]', "tpu.aliases.0: 'sample' names no kernel"),
        ("generations =", "generatoins =", "tpu.generatoins: Extra inputs are not permitted"),
        ("differentiable = true", "diff = true", "tpu.ops.add.diff: Extra inputs are not permitted"),
        ('packaging = ">=20"', 'packaging = "20 or so"', "tpu.requires.packaging: Invalid specifier"),
        ('sample = "add"', 'sample = "a.b"', "sample: 'a.b' is no Python identifier"),
    ],
)
def test_a_malformed_build_file_is_named_with_field_and_value(
    source: Path, tmp_path: Path, old: str, new: str, message: str
) -> None:
    edit(source / "build.toml", old, new)
    with pytest.raises(InvalidMetadataError) as raised:
        build(source, tmp_path / "out")
    assert message in str(raised.value)
    assert str(source / "build.toml") in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_named(source: Path, package: Path, tmp_path: Path) -> None:
    for path in (package / "__init__.py", source / "README.md", source / "build.toml"):
        path.unlink()
        with pytest.raises(TpuKernelsError, match="is missing") as raised:
            build(source, tmp_path / "out")
        assert str(path) in str(raised.value)


def test_a_kernel_for_other_backends_only_is_refused(source: Path, tmp_path: Path) -> None:
    edit(source / "build.toml", '["tpu"]', '["cuda"]')
    with pytest.raises(BuildError, match=r"general\.backends: 'tpu' is not in"):
        build(source, tmp_path / "out")


@pytest.mark.parametrize(
    "statement",
    [
        "import tpu_kernels",
        "import os, tpu_kernels.ops as ops",
        "from tpu_kernels.ops import op",
        "from tpu_kernels import ops",
        "def late():\n    import tpu_kernels",
    ],
)
def test_a_kernel_that_imports_this_library_is_refused(
    source: Path, package: Path, tmp_path: Path, statement: str
) -> None:
    (package / "late.py").write_text(f"\n{statement}\n")
    with pytest.raises(BuildError, match=r"late\.py:[23]: it imports 'tpu_kernels.*from \.tpu_ops import"):
        build(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_module_that_is_merely_called_alike_is_not_refused(
    source: Path, package: Path, tmp_path: Path
) -> None:
    (package / "late.py").write_text("from .tpu_kernels import x\nimport tpu_kernels_extra\n")
    build(source, tmp_path / "out")


def test_a_layer_has_to_say_whether_it_has_a_gradient(source: Path, package: Path, tmp_path: Path) -> None:
    layer = "from torch import nn\n\nclass Silu(nn.Module):\n    pass\n"
    (package / "layers.py").write_text(layer)
    with pytest.raises(BuildError, match=r"the layer Silu does not say .* add has_backward = True or"):
        build(source, tmp_path / "out")
    (package / "layers.py").write_text(layer.replace("pass", "has_backward: bool = False"))
    build(source, tmp_path / "out")


def test_code_that_does_not_parse_is_refused(source: Path, package: Path, tmp_path: Path) -> None:
    (package / "late.py").write_text("def broken(:\n")
    with pytest.raises(BuildError, match=r"late\.py: .*line 1"):
        build(source, tmp_path / "out")


def test_symbolic_links_are_refused(source: Path, package: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.py"
    secret.write_text("TOKEN = 1\n")
    (package / "linked.py").symlink_to(secret)
    with pytest.raises(BuildError, match=r"linked\.py is a symbolic link"):
        build(source, tmp_path / "out")
    (package / "linked.py").unlink()
    moved = package.rename(tmp_path / "moved")
    package.symlink_to(moved)
    with pytest.raises(BuildError, match="symbolic link"):
        build(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["tpu_ops/extra.py", "tpu_ops.py", "sample_kernel/__init__.py", "metadata.json"]
)
def test_names_that_the_build_writes_are_refused(
    source: Path, package: Path, tmp_path: Path, name: str
) -> None:
    (package / name).parent.mkdir(exist_ok=True)
    (package / name).write_text("")
    with pytest.raises(BuildError, match=f"the package holds {name}"):
        build(source, tmp_path / "out")


def test_a_former_build_is_replaced(source: Path, package: Path, tmp_path: Path) -> None:
    build(source, tmp_path / "out")
    (package / "late.py").unlink()
    build(source, tmp_path / "out")
    assert "build/torch-tpu/late.py" not in tree(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernels", "out"]


@pytest.mark.parametrize("precious", ["thesis.txt", "build/torch-cuda/metadata.json"])
def test_a_folder_that_holds_something_else_is_not_replaced(
    source: Path, tmp_path: Path, precious: str
) -> None:
    out = tmp_path / "out"
    build(source, out)
    (out / precious).parent.mkdir(exist_ok=True)
    (out / precious).write_text("precious")
    with pytest.raises(BuildError, match="is no former build"):
        build(source, out)
    assert (out / precious).read_text() == "precious"


def test_a_build_that_fails_leaves_the_former_one(source: Path, package: Path, tmp_path: Path) -> None:
    build(source, tmp_path / "out")
    before = tree(tmp_path / "out")
    (package / "late.py").write_text("import tpu_kernels\n")
    with pytest.raises(BuildError):
        build(source, tmp_path / "out")
    assert tree(tmp_path / "out") == before


def test_a_write_that_fails_leaves_nothing(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cannot be written"):
        build(source, tmp_path / "file" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "kernels"]


def test_the_compatibility_module_gives_the_kernel_under_its_id(source: Path, tmp_path: Path) -> None:
    """As `kernels` releases before the flat layout load it: the package below the variant folder."""
    kernel = build(source, tmp_path / "out")
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path / "out" / "build" / "torch-tpu")!r})
import sample_kernel
assert sample_kernel.add(2, 3) == 5
assert sample_kernel.late() == "verified"
assert sample_kernel.__all__ == ["add", "late", "table"]
assert sample_kernel.__name__ == "sample_kernel"
assert sample_kernel.add.__module__ == {kernel.metadata.id!r}
"""
    subprocess.run([sys.executable, "-I", "-c", script], check=True, timeout=60)


@pytest.fixture
def including(source: Path) -> Path:
    """A kernel beside the sample kernel, which includes it."""
    folder = source.with_name("other-kernel")
    shutil.copytree(source, folder)
    (folder / "torch-ext" / "sample_kernel").rename(folder / "torch-ext" / "other_kernel")
    config = (folder / "build.toml").read_text().replace("sample-kernel", "other-kernel")
    config = config.replace("[tpu]\n", '[tpu]\ninclude = ["sample-kernel"]\n')
    (folder / "build.toml").write_text(config)
    return folder


def test_an_included_kernel_becomes_a_sub_package(including: Path, source: Path, tmp_path: Path) -> None:
    kernel = build(including, tmp_path / "out")
    variant = "build/torch-tpu"
    package = tree(source / "torch-ext" / "sample_kernel")
    for name in ("__init__.py", "late.py", "numbers/addition.py"):
        assert kernel.files[f"{variant}/sample_kernel/{name}"] == package[name]
    assert b"include" not in kernel.metadata_file
    # Both use one copy of the ops.
    code = f"""
import importlib, sys
sys.path.insert(0, {str(tmp_path / "out" / "build")!r})
package = importlib.import_module("torch-tpu")
inner = importlib.import_module("torch-tpu.sample_kernel.tpu_ops")
assert inner.op is importlib.import_module("torch-tpu.tpu_ops").op
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert build(including, tmp_path / "again").files == kernel.files


def test_a_change_of_an_included_kernel_changes_the_id(including: Path, source: Path, tmp_path: Path) -> None:
    before = build(including, tmp_path / "before").metadata.id
    late = source / "torch-ext" / "sample_kernel" / "late.py"
    late.write_text(late.read_text() + "\n# changed\n")
    assert build(including, tmp_path / "after").metadata.id != before


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('include = ["sample-kernel"]', 'include = ["no-such-kernel"]', "no-such-kernel.*is missing"),
        ('include = ["sample-kernel"]', 'include = ["../sample-kernel"]', "include"),
        ('include = ["sample-kernel"]', 'include = ["other-kernel"]', "includes other-kernel itself"),
    ],
)
def test_what_cannot_be_included(including: Path, tmp_path: Path, old: str, new: str, message: str) -> None:
    edit(including / "build.toml", old, new)
    with pytest.raises(TpuKernelsError, match=message):
        build(including, tmp_path / "out")
