"""A kernel's numbers, interpreted on the CPU, beside those of its reference in float64."""

from __future__ import annotations

from collections.abc import Iterator

from ..comparison import compare, tolerance_of
from ..examples import Example, edges
from .report import Finding
from .subject import Subject, guarded


def check_numerics(subject: Subject) -> Iterator[Finding]:
    """Numerics: declared examples, and calls at the edges of what the op takes, against the reference."""
    findings: list[Finding] = []
    worst: dict[str, float] = {}
    tried = 0
    for example, declared in _examples(subject):
        with guarded(subject, example, findings):
            if not declared and not example.accepted():
                continue
            difference = compare(
                example.interpreted(subject.generation), example.expected(), tolerance_of(example.dtype())
            )
            tried += 1
            key = f"{example.op.__name__} in {example.dtype()}"
            worst[key] = max(worst.get(key, 0.0), difference.error)
            if difference.wrong:
                message = f"{example.name}: kernel and reference disagree: {difference.wrong}"
                findings.append(subject.error(message, example.op.jax_fn))
    yield from findings
    for name in dict.fromkeys(each.op.__name__ for each in subject.examples if each.precision != "float64"):
        yield Finding(
            "note",
            f"the reference of {name} converts to float32, and is no more exact than that; there, use "
            "jnp.promote_types(x.dtype, jnp.float32)",
        )
    errors = ", ".join(f"{key} {error:.1g}" for key, error in worst.items())
    yield Finding("note", f"{tried} calls; largest relative errors: {errors or 'none'} (emulated)")


def _examples(subject: Subject) -> Iterator[tuple[Example, bool]]:
    """What is tried, and whether the kernel declares it itself."""
    for example in subject.examples:
        yield example, True
        for edge in () if subject.quick else edges(example, subject.dtypes(example.op)):
            yield edge, False
