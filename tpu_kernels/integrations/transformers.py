"""transformers: kernels in its experts table, and models switched to them.

A kernel says in its metadata what it can be used as (``provides``); `enable` registers that under ``tpu_<name>``.
An experts function may carry ``explain(module)``, which tells the path it takes for a module and why: the report
is made of that.
"""

from __future__ import annotations

import functools
import importlib.metadata
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import IntegrationError
from ..log import get_logger, warn_once
from . import attention as attention_tables
from . import diffusers as diffusers_dispatcher
from . import generation as generation_loop
from . import layers as small_layers

if TYPE_CHECKING:
    import torch

# What `enable` loads: the versions that this release was tested with. It switches models to the first one's.
EXPERTS_KERNELS = (("tpu-kernels/moe-experts", 1), ("tpu-kernels/ragged-dot", 1))
EXPERTS_POINT = "transformers.experts"
PREFIX = "tpu_"
EXPERTS = f"{PREFIX}fused_experts"
# transformers replaces its own "grouped_mm" by "batched_mm" while decoding; under another name it is left alone.
GROUPED_MM = f"{PREFIX}grouped_mm"
SUPPORTED = ("5.22.2", "5.25")


@dataclass(frozen=True)
class ModuleReport:
    """How the experts of one module are computed.

    Attributes:
      name: the module's name in the model.
      kind: its class.
      active: the kernel serves it.
      path: the kernel's path for it, e.g. "fused" or "composed"; "own" where the model's own code runs.
      reason: why not a faster path; empty where there is none.
    """

    name: str
    kind: str
    active: bool
    path: str
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """What `enable` did. ``print(report)`` shows it.

    Attributes:
      registered: names that transformers now knows as ``experts_implementation``.
      kernel: the kernel that models are switched to, e.g. "tpu-kernels/moe-experts v1".
      device: what the kernels run on here.
      modules: each experts module of the model; empty where no model was given.
      note: what the model as a whole is told; empty where there is nothing to tell.
      attention: what became of the model's attention; empty where nothing was to.
      layers: what became of its small layers; likewise.
      generation: what became of its `generate`; likewise.
    """

    registered: tuple[str, ...]
    kernel: str
    device: str
    modules: tuple[ModuleReport, ...] = ()
    note: str = ""
    attention: str = ""
    layers: str = ""
    generation: str = ""

    def __str__(self) -> str:
        lines = [f"{self.kernel} on {self.device}; experts implementations: {', '.join(self.registered)}"]
        kinds = Counter((m.kind, m.active, m.path, m.reason) for m in self.modules)
        for (kind, active, path, reason), count in kinds.items():
            state = f"{path} path of the kernel" if active else "not served, the model's own code runs"
            lines.append(f"  {count} x {kind}: {state}" + (f" ({reason})" if reason else ""))
        lines += [f"  {line}" for line in (self.note, self.attention, self.layers, self.generation) if line]
        return "\n".join(lines)


def enable(
    model: torch.nn.Module | None = None,
    *,
    experts: bool = True,
    attention: bool = False,
    layers: bool = False,
    generation: bool = False,
) -> Report:
    """Registers this library's kernels with transformers and, given a model, switches it to them.

    Call it before loading models, then ``from_pretrained(..., experts_implementation="tpu_fused_experts")`` uses
    the kernel; or after, with the model. `disable` undoes both.

    Args:
      model: a transformers model, loaded already.
      experts: use kernels for mixture-of-experts layers.
      attention: use the attention kernel for prefill, training and decode steps over a static cache; what it does not
        serve keeps to sdpa. While loading, ``attn_implementation="tpu_attention"`` asks for it.
      layers: use kernels for the norms, the rotation and the router of `model`, where it has kernelizable ones and
        compiled programs show a gain; by stock `kernels`.
      generation: make ``model.generate`` `tpu_kernels.generate`, with its cache, so that calls stay as they are.

    Returns: what is active per module, and why not where not.

    Raises:
      IntegrationError: transformers is missing or too old, or `model` is no transformers model.

    Example:
      >>> import tpu_kernels
      >>> print(tpu_kernels.enable())  # doctest: +ELLIPSIS
      tpu-kernels/moe-experts v1 on ...; experts implementations: tpu_fused_experts, tpu_ragged_dot, tpu_grouped_mm
    """
    if model is not None and not hasattr(model, "set_experts_implementation"):
        raise IntegrationError(
            f"{type(model).__name__} is no transformers model with set_experts_implementation; give the "
            "PreTrainedModel itself, or call enable() without a model and load with "
            f"experts_implementation={EXPERTS!r}"
        )
    report = Report((), "no kernel", _device())
    if experts:
        repo_id, version = EXPERTS_KERNELS[0]
        report = Report(_register_experts(), f"{repo_id} v{version}", report.device)
        report = report if model is None else _switch(model, report)
    if attention:
        _tables()
        report = replace(report, attention=_enable_attention(model))
    if layers:
        if model is None:
            raise IntegrationError(
                "layers=True is for a model that is loaded; give it, or call register_layers"
            )
        report = replace(report, layers=small_layers.replace_layers(model))
    if generation:
        if model is None:
            raise IntegrationError("generation=True is for a model that is loaded; give it, or call generate")
        generation_loop.switch(model)
        report = replace(report, generation="generate: tpu_kernels.generate, with tpu_kernels.StaticCache")
    return report


def disable(model: torch.nn.Module | None = None) -> None:
    """Undoes `enable`: gives `model`, or every model it switched, its former implementation back.

    Without a model the names are taken out of transformers' tables too, and what `enable_diffusers` did is undone. A
    model that was itself loaded with ``experts_implementation="tpu_fused_experts"`` has no former one: it goes to
    transformers' default.

    Example:
      >>> import tpu_kernels
      >>> tpu_kernels.disable()
    """
    generation_loop.restore(model)
    small_layers.restore_layers(model)
    if model is None:
        diffusers_dispatcher.unregister()
        attention_tables.unregister()
    else:
        attention_tables.restore(model)
    switched: Any
    for switched in [model] if model is not None else list(_former):
        former = _former.pop(switched, None)
        if former is not None:
            switched.set_experts_implementation(former)
    if model is None and _registered:
        moe, fp8 = _tables()
        for name in _registered:
            for table in (moe.ExpertsInterface, fp8.FP8ExpertsInterface):
                table._global_mapping.pop(name, None)
        from . import mxfp4

        mxfp4.unregister()
        _registered.clear()


# The names registered so far, and what each switched model used before.
_registered: list[str] = []
_former: weakref.WeakKeyDictionary[Any, dict[str, str | None]] = weakref.WeakKeyDictionary()


def _register_experts() -> tuple[str, ...]:
    if not _registered:
        moe, fp8 = _tables()
        functions = {**_experts_functions(), GROUPED_MM: moe.grouped_mm_experts_forward}
        for name, function in functions.items():
            moe.ExpertsInterface.register(name, function)
            # FP8 models look names up in a table of their own. Without an entry there a name passes transformers'
            # check and fails in the first forward.
            fp8.FP8ExpertsInterface.register(name, _fp8_experts(name, fp8.fp8_grouped_mm_experts_forward))
        from . import mxfp4

        mxfp4.register()
        _registered.extend(functions)
    return tuple(_registered)


def _tables() -> tuple[ModuleType, ModuleType]:
    """transformers' modules with the experts tables: the common one and that of FP8 models."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise IntegrationError(
            "transformers is not installed; install it with: pip install 'tpu-kernels[transformers]'"
        ) from None
    from packaging.version import Version

    oldest, newest = (Version(v) for v in SUPPORTED)
    if Version(version) < oldest:
        raise IntegrationError(
            f"transformers {version} is too old: its experts table came with {oldest}; "
            f"pip install 'transformers>={oldest},<{newest}'"
        )
    if Version(version) >= newest:
        warn_once(f"transformers {version} is newer than this release was tested with (below {newest})")
    from transformers.integrations import finegrained_fp8, moe

    return moe, finegrained_fp8


@functools.cache
def _experts_functions() -> dict[str, Callable[..., Any]]:
    """The experts functions of the kernels, by the names they are registered under."""
    from ..device import keep_jax_off_tpu
    from ..hub import find_loaded, get_kernel

    keep_jax_off_tpu()
    functions = {}
    for repo_id, version in EXPERTS_KERNELS:
        module = get_kernel(repo_id, version=version)
        record = find_loaded(module)
        assert record is not None
        assert record.metadata.tpu is not None
        provided = record.metadata.tpu.provides.get(EXPERTS_POINT, {})
        functions.update({PREFIX + name: getattr(module, attribute) for name, attribute in provided.items()})
    if EXPERTS not in functions:
        raise IntegrationError(
            f"no kernel of {', '.join(repo_id for repo_id, _ in EXPERTS_KERNELS)} provides {EXPERTS!r}; they "
            f"provide {', '.join(functions) or 'none'}"
        )
    return functions


def _fp8_experts(name: str, fallback: Callable[..., Any]) -> Callable[..., Any]:
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        warn_once(f"{name} has no FP8 path: the experts of FP8 models run transformers' grouped_mm")
        return fallback(module, *args, **kwargs)

    return forward


def _switch(model: Any, report: Report) -> Report:
    modules = tuple(_modules(model))
    if not any(m.active for m in modules):
        note = (
            "the model keeps its own experts: "
            + "; ".join(sorted({f"{m.kind}: {m.reason}" for m in modules}))
            if modules
            else f"{type(model).__name__} has no mixture-of-experts layers"
        )
        get_logger().info("%s", note)
        return Report(report.registered, report.kernel, report.device, modules, note)
    former = model.get_experts_implementation()
    model.set_experts_implementation(EXPERTS)
    if model.get_experts_implementation() != former:
        _former.setdefault(model, {key: None if value == EXPERTS else value for key, value in former.items()})
    return Report(report.registered, report.kernel, report.device, modules)


def _enable_attention(model: Any) -> str:
    name = attention_tables.register()
    if model is not None and not attention_tables.switch(model):
        return f"the model keeps its own attention: transformers cannot switch that of {type(model).__name__}"
    repo_id, version = attention_tables.KERNEL
    of = "attention implementation" if model is None else "attention"
    return f"{of}: {name} ({repo_id} v{version}) for prefill, training and static caches; sdpa for the rest"


def _modules(model: Any) -> Iterator[ModuleReport]:
    """The experts modules of `model`: those transformers dispatches, and those that look like experts."""
    explain = getattr(_experts_functions()[EXPERTS], "explain", None)
    for name, module in model.named_modules():
        kind = type(module).__name__
        if is_dispatched(module):
            if _is_fp8(module):
                yield ModuleReport(name, kind, False, "own", "the kernel has no FP8 path")
                continue
            path = explain(module) if explain is not None else None
            yield ModuleReport(
                name,
                kind,
                path is None or path.name != "own",
                path.name if path else "kernel",
                path.reason if path else "",
            )
        elif "Experts" in kind:
            yield ModuleReport(
                name,
                kind,
                False,
                "own",
                "transformers has no table for its experts: they are computed in place",
            )


def is_dispatched(module: Any) -> bool:
    """Whether transformers looks up in its experts table how to compute `module`.

    Example:
      >>> is_dispatched(model.model.layers[0].mlp.experts)  # doctest: +SKIP
      True
    """
    # The marks that ``use_experts_implementation`` leaves on the instances of a class it has decorated.
    return all(hasattr(module, mark) for mark in ("has_gate", "has_bias", "_is_expert_parallel"))


def _is_fp8(module: Any) -> bool:
    return any(c.__module__.endswith("finegrained_fp8") for c in type(module).__mro__)


def _device() -> str:
    from ..device import current

    return current().describe()
