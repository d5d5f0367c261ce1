"""The kernel under the name that older `kernels` releases import: the module one folder up, under its id."""

import importlib.util
import json
import sys
from pathlib import Path

_variant = Path(__file__).parent.parent
_id = json.loads((_variant / "metadata.json").read_text(encoding="utf-8"))["id"]

if _id not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_id, _variant / "__init__.py")
    if _spec is None or _spec.loader is None:
        raise ImportError(f"no kernel module in {_variant}")
    sys.modules[_id] = importlib.util.module_from_spec(_spec)
    try:
        _spec.loader.exec_module(sys.modules[_id])
    except BaseException:
        del sys.modules[_id]
        raise

globals().update(
    {name: value for name, value in vars(sys.modules[_id]).items() if name == "__all__" or name[:2] != "__"}
)
