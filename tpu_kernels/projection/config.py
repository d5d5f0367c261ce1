"""A model's config, which is all that a projection needs of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ProjectionError


def read_config(model: str | Path) -> dict[str, Any]:
    """The config of a causal language model, of one that has other parts too, its text part.

    Args:
        model: A Hub id, a folder with a config.json, or such a file.

    Raises:
        ProjectionError: There is none, or transformers does not know the model.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ProjectionError(
            "projections need transformers: pip install 'tpu-kernels[transformers]'"
        ) from error
    path = Path(model).expanduser()
    source: Any = path.parent if path.is_file() and path.name == "config.json" else path
    if not path.exists():
        source = str(model)
        if source.startswith(("/", ".", "~")) or source.count("/") > 1:
            raise ProjectionError(
                f"there is no {model}; give a model's folder, its config.json or its Hub id"
            )
    try:
        if path.is_file() and path.name != "config.json":
            config = _from_file(path)
        else:
            config = AutoConfig.from_pretrained(source)
        values: dict[str, Any] = config.get_text_config(decoder=True).to_dict()
    except (OSError, ValueError, KeyError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ProjectionError(f"the config of {model} cannot be read: {reason}") from error
    # A model of several parts may tell its dtype only as a whole.
    values["dtype"] = values.get("dtype") or str(config.dtype or "bfloat16").removeprefix("torch.")
    # Where it came from and which release wrote it make no other model.
    return {
        name: value for name, value in values.items() if name not in ("_name_or_path", "transformers_version")
    }


def _from_file(path: Path) -> Any:
    import json

    from transformers import AutoConfig

    values = json.loads(path.read_text(encoding="utf-8"))
    if "model_type" not in values:
        raise ValueError("it has no model_type")
    return AutoConfig.for_model(**values)
