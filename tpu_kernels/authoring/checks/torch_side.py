"""A kernel's ops as torch sees them, on the device of this process: a CPU, or an emulated TPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..comparison import compare, tolerance_of
from ..examples import Example
from .gradients import gradient_tolerance
from .report import Finding
from .subject import NotRun, Subject, describe, guarded


def check_torch(subject: Subject) -> Iterator[Finding]:
    """Torch on the CPU: `opcheck`, eager, compiled without a graph break, autograd."""
    yield from _on_device(subject, "cpu", "aot_eager")


def check_emulated(subject: Subject) -> Iterator[Finding]:
    """Torch on an emulated TPU: the same through the real torch_tpu."""
    from ... import emulation
    from ...errors import EmulationError

    try:
        emulation.install()
    except EmulationError as error:
        raise NotRun(str(error)) from error
    yield from _on_device(subject, "tpu", "tpu")
    ops = {example.op.__name__: example.op for example in subject.examples}
    for name, op in ops.items():
        if op.paths["reference"]:
            yield Finding(
                "note",
                f"{name} could not be interpreted there for {op.paths['reference']} programs: its "
                "reference ran instead",
            )


def _on_device(subject: Subject, device: str, backend: str) -> Iterator[Finding]:
    findings: list[Finding] = []
    for example in subject.some(subject.examples):
        with guarded(subject, example, findings):
            findings += _results(subject, example, device, backend)
        with guarded(subject, example, findings):
            _opcheck(example, device)
    yield from findings


def _results(subject: Subject, example: Example, device: str, backend: str) -> Iterator[Finding]:
    import torch

    ways: dict[str, Any] = {
        "eager": example.op,
        "compiled": torch.compile(example.op, backend=backend, fullgraph=True),
    }
    expected = example.expected()
    gradients: dict[str, list[Any]] = {}
    for way, function in ways.items():
        given = example.tensors(device)
        wanted = example.differentiable()
        for name in wanted:
            given[name].requires_grad_()
        try:
            result = function(**given, **example.static)
            results = [result] if isinstance(result, torch.Tensor) else list(result)
            if wanted:
                # Squares, since a plain sum may not depend on anything: of a softmax it is one.
                torch.autograd.backward(
                    [each.float().square().sum() for each in results if each.requires_grad]
                )
        except Exception as error:  # noqa: BLE001  whatever torch raises is the answer
            yield subject.error(f"{example.name}, {way} on {device}: {describe(error)}", error)
            continue
        found = [each.detach().cpu().double().numpy() for each in results]
        difference = compare(found, expected, tolerance_of(example.dtype()))
        if difference.wrong:
            text = f"{example.name}, {way} on {device}: {difference.wrong}"
            yield subject.error(text, example.op.jax_fn)
        gradients[way] = [given[name].grad.cpu().double().numpy() for name in wanted]
    if len(gradients) == len(ways):
        for place, name in enumerate(example.differentiable()):
            found, expected = ([gradients[way][place]] for way in ("compiled", "eager"))
            difference = compare(found, expected, gradient_tolerance(example, name))
            if difference.wrong:
                text = f"{example.name} on {device}: the compiled gradient in {name} is not the eager one"
                yield subject.error(f"{text}: {difference.wrong}", example.op.jax_fn)


def _opcheck(example: Example, device: str) -> None:
    import torch

    checks = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if device == "cpu":
        checks.append("test_autograd_registration")
    namespace, _, name = example.op.name.partition("::")
    overload = getattr(getattr(torch.ops, namespace), name).default
    given = example.tensors(device)
    for tensor in example.differentiable():
        given[tensor].requires_grad_()
    # By position, as autograd wants tensors; those that are left out at the end are left out here too.
    places = [argument.name for argument in overload._schema.arguments if not argument.kwarg_only]
    last = max(place for place, tensor in enumerate(places) if tensor in given)
    arguments = tuple(given.get(tensor) for tensor in places[: last + 1])
    torch.library.opcheck(overload, arguments, dict(example.static), test_utils=checks)
