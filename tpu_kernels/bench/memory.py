"""Whether a benchmark fits a device: weights and cache, counted without allocating them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BenchmarkError
from ..projection.plan import ONE_CHIP, ParallelPlan
from ..projection.sharding import shard

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

GIB = 2**30


def weight_bytes(config: PreTrainedConfig, dtype: torch.dtype, plan: ParallelPlan = ONE_CHIP) -> int:
    """Bytes of the weights and buffers of the causal language model that `config` describes; of a rank of `plan`."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    shard(model, plan)
    return sum(tensor.nbytes for tensor in itertools.chain(model.parameters(), model.buffers()))


def cache_bytes(config: PreTrainedConfig, batch: int, length: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of a static cache of `length` positions for `batch` sequences.

    The states of linear attention are left out: they do not grow with the length.
    """
    from transformers import StaticCache
    from transformers.configuration_utils import get_head_shapes

    text_config = config.get_text_config(decoder=True)
    cache = StaticCache(config=text_config, max_cache_len=length)
    heads, head_dim = get_head_shapes(text_config)
    cache.early_initialization(batch, heads, head_dim, dtype=dtype, device="meta")
    states = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(state.nbytes for state in states if state is not None)


def check_fits(
    config: PreTrainedConfig,
    batches: Sequence[int],
    length: int,
    dtype: torch.dtype,
    capacity: int,
    device: str,
    plan: ParallelPlan = ONE_CHIP,
) -> None:
    """Refuses a batch whose weights and cache alone exceed `capacity` bytes of a rank. Activations come on top."""
    weights = weight_bytes(config, dtype, plan)
    batch = max(batches)
    cache = cache_bytes(config, batch, length, dtype) // plan.tp
    if weights + cache <= capacity:
        return
    room = (capacity - weights) // (cache // batch) if cache else 0
    way_out = (
        f"use a batch of at most {room}, or fewer tokens" if room > 0 else "use a smaller model or dtype"
    )
    raise BenchmarkError(
        f"batch {batch} of {length} tokens needs {(weights + cache) / GIB:.1f} GiB "
        f"(weights {weights / GIB:.1f}, cache {cache / GIB:.1f}), but "
        f"{device} has {capacity / GIB:.1f} GiB; {way_out}"
    )


def host_bytes() -> int | None:
    """Bytes of the host's memory that are free to use; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kibibytes = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    return None if kibibytes is None else kibibytes * 1024
