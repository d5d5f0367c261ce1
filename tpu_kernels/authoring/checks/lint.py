"""What the code of a kernel tells without running it: rules that hold for every kernel, by its syntax trees."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from .report import Finding
from .subject import Subject

# What registers an op in torch, by the last part of its name; the op's name comes first.
_REGISTERING = {"custom_op", "define", "jax_op", "Library", "triton_op"}
_ONLY_OF_TORCH = {"define", "Library"}
# What computes, opens or starts something, by how its name begins.
_WORKING = (
    "jnp.",
    "jax.numpy.",
    "jax.random.",
    "jax.device",
    "jax.local_device",
    "jax.default_backend",
    "np.random.",
)
_WORKING_CALLS = {
    *("open", "print", "exec", "eval", "jax.block_until_ready", "time.sleep"),
    *(
        "torch.arange",
        "torch.empty",
        "torch.ones",
        "torch.rand",
        "torch.randn",
        "torch.tensor",
        "torch.zeros",
    ),
    *("subprocess.run", "subprocess.Popen", "os.system", "requests.get", "urllib.request.urlopen"),
}
# Of these only dtypes and the like are made.
_HARMLESS = {"jnp.dtype", "jnp.finfo", "jnp.iinfo", "jax.numpy.dtype", "jnp.float32"}


def check_lint(subject: Subject) -> Iterator[Finding]:
    """Lint: relative imports, no fixed op names, no reshape on refs, no work at import, a reference of each op."""
    packages = {path.name for path in subject.source.glob("torch-ext/*") if path.is_dir()}
    for file in sorted(subject.source.glob("torch-ext/**/*.py")):
        name = str(file.relative_to(subject.source))
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError) as error:
            yield Finding("error", f"it is no Python: {error}", name, getattr(error, "lineno", None))
            continue
        siblings = {path.stem for path in file.parent.iterdir() if path.suffix == ".py" or path.is_dir()}
        own = packages | {each for each in siblings if each not in sys.stdlib_module_names}
        for line, message in _violations(tree, own):
            yield Finding("error", message, name, line)


Violation = tuple[int, str]


def _violations(tree: ast.Module, own: set[str]) -> Iterator[Violation]:
    """Lines and what is wrong there; `own` are the names of the kernel's own modules."""
    yield from _imports(tree, own)
    yield from _import_time_work(tree.body)
    for call in _calls(tree):
        for rule in (_op_name, _reshape, _reference):
            message = rule(call)
            if message is not None:
                yield call.lineno, message


def _imports(tree: ast.Module, own: set[str]) -> Iterator[Violation]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(level=0, module=str(name)):
                modules = [name]
            case _:
                continue
        for module in modules:
            root, _, inner = module.partition(".")
            if root in own:
                yield (
                    node.lineno,
                    f"absolute import of {module!r}, which is the kernel's own: it is loaded under another name; "
                    f"import it relatively, as in: from .{inner or root} import ...",
                )


def _import_time_work(body: list[ast.stmt]) -> Iterator[Violation]:
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            yield from _import_time_work(statement.body)
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            for call in _calls(statement, within=False):
                name = _dotted(call.func)
                if name in _WORKING_CALLS or (name.startswith(_WORKING) and name not in _HARMLESS):
                    yield (
                        call.lineno,
                        f"work at import, {name}(...): it runs before anyone knows the device; move it into the "
                        "function that needs it",
                    )


def _op_name(call: ast.Call) -> str | None:
    function = _dotted(call.func).rpartition(".")
    if function[2] not in _REGISTERING or (function[2] in _ONLY_OF_TORCH and "library" not in function[0]):
        return None
    given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg in ("name", "ns"))]
    match given:
        case [ast.Constant(value=str(name)), *_]:
            return (
                f"fixed op name {name!r}: two versions of the kernel would change each other's ops; declare it with "
                "tpu_ops.op, or begin its name with that of the module, __name__"
            )
    return None


def _reshape(call: ast.Call) -> str | None:
    match call.func:
        case ast.Attribute(value=ast.Name(id=name), attr="reshape") if name.endswith(("ref", "refs")):
            return (
                f"reshape on a ref, {name}.reshape(...): Mosaic refuses most of them; read a value first, "
                f"{name}[...].reshape(...), or give the BlockSpec that shape"
            )
    return None


def _reference(call: ast.Call) -> str | None:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if _dotted(call.func) != "op" or "kernel" not in given:
        return None
    if "reference" not in given:
        return "the op has no reference: give op(..., reference=), the same in plain jax.numpy"
    if ast.dump(given["kernel"]) == ast.dump(given["reference"]):
        return "the op's reference is its kernel: write it in plain jax.numpy, in reference.py"
    return None


def _calls(tree: ast.AST, *, within: bool = True) -> Iterator[ast.Call]:
    """The calls in a tree; without `within`, not those that only run when a function in it is called."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.Call):
            yield node
        if within or not isinstance(node, ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef):
            pending += ast.iter_child_nodes(node)


def _dotted(node: ast.expr) -> str:
    """`a.b.c` of such an expression; empty for others."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute):
            inner = _dotted(value)
            return f"{inner}.{attribute}" if inner else ""
    return ""
