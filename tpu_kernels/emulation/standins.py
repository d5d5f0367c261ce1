"""Stand-ins for the few ops that torch_tpu lowers to something that only a TPU runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_registered: list[torch.library.Library] = []


def register() -> None:
    """Puts the stand-ins in the place of torch_tpu's kernels.

    Example:
        >>> register()  # doctest: +SKIP
    """
    library = torch.library.Library("aten", "IMPL")
    _registered.append(library)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for op, standin in (
            ("_grouped_mm", grouped_mm),
            ("_unique2", on_host(torch.ops.aten._unique2)),
            ("unique_consecutive", on_host(torch.ops.aten.unique_consecutive)),
        ):
            library.impl(op, standin, "PrivateUse1", allow_override=True)
    # Attention becomes a Mosaic kernel, unless this switch tells torch_tpu to make plain operations of it.
    # Other devices share the switch: on the CPU, too, attention is no longer fused.
    torch.backends.cuda.enable_flash_sdp(False)


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`torch.nn.functional.grouped_mm`, which becomes an HLO ragged-dot that XLA:CPU has no code for.

    Multiplies all by all and keeps what belongs together: as many times the work as there are groups, but no
    data-dependent shape. Rows past the last offset come out as zeros.

    Example:
        >>> a, b = torch.ones(4, 2), torch.stack([torch.ones(2, 1), 3 * torch.ones(2, 1)])
        >>> grouped_mm(a, b, offs=torch.tensor([1, 3])).T
        tensor([[2., 6., 6., 0.]])
    """
    if offs is None:
        return torch.bmm(a, b)
    start, end = F.pad(offs[:-1], (1, 0))[:, None], offs[:, None]

    def members(size: int) -> Tensor:
        position = torch.arange(size, device=offs.device)
        return (start <= position) & (position < end)  # (groups, size)

    if a.dim() == 3:  # the columns of b are in groups
        return (a @ b).where(members(b.shape[1])[:, None, :], 0).sum(0)
    if b.dim() == 3:  # the rows of a are
        return (a @ b).where(members(a.shape[0])[:, :, None], 0).sum(0)
    # The contracted dimension is. Both sides are masked, since what belongs to no group may be nan.
    member = members(a.shape[1])
    return a.where(member[:, None, :], 0) @ b.where(member[:, :, None], 0)


def on_host(op: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """`op` computed by torch on the CPU.

    For `unique` and its kin: torch_tpu sorts in them with "not less" for an order, with which XLA:CPU's sort
    writes past the end of the array.

    Example:
        >>> on_host(torch.ops.aten._unique2)(torch.tensor([2, 1, 2]))[0]
        tensor([1, 2])
    """

    def standin(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return tuple(result.to(x.device) for result in op(x.cpu(), *args, **kwargs))

    return standin
