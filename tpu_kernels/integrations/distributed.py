"""A parallel plan as transformers takes it, checked against the model before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import IntegrationError

if TYPE_CHECKING:
    from transformers.distributed import DistributedConfig

# transformers' style of a module that is whole on each rank. An empty plan would say so too, but is refused.
_WHOLE = "replicated_with_grad_allreduce"


def distributed_config(model: str | Path, parallel: str) -> DistributedConfig:
    """What `from_pretrained(distributed_config=...)` takes for a plan, under `tpu-kernels run`.

    Args:
        model: A Hub id, a folder with a config.json, or such a file; only the config is read.
        parallel: `ep8`: each rank has some of the experts, and all of the rest; `tp8`: each has a part of every matrix.

    Raises:
        ProjectionError: The model cannot be split like this: heads or experts do not divide. The message says what can.
        IntegrationError: transformers cannot be asked for the plan.

    Example:
        >>> config = distributed_config("Qwen/Qwen3-30B-A3B", "ep8")  # doctest: +SKIP
        >>> AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", distributed_config=config)  # doctest: +SKIP
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from ..projection.config import read_config
    from ..projection.plan import parse_plan
    from ..projection.sharding import shard

    plan = parse_plan(parallel)
    if plan.tp > 1 and plan.ep > 1:
        raise IntegrationError(
            f"transformers splits experts over all ranks or within each, not both as in {plan}; give ep{plan.chips} or "
            f"tp{plan.tp}"
        )
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**read_config(model)))
    rules = dict(whole.tp_plan)
    shard(whole, plan)
    if plan.ep == 1:
        return DistributedConfig(tp_size=plan.tp)
    return DistributedConfig(tp_size=plan.ep, ep_size=plan.ep, tp_plan=dict.fromkeys(rules, _WHOLE))
