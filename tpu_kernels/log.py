"""Logging: quiet by default (warnings only), `TPU_KERNELS_LOG=info` or `debug` for more."""

from __future__ import annotations

import functools
import logging
import os

LEVEL_VARIABLE = "TPU_KERNELS_LOG"


@functools.cache
def get_logger() -> logging.Logger:
    """The package's logger, with its level from `TPU_KERNELS_LOG` (debug, info, warning, error)."""
    logger = logging.getLogger("tpu_kernels")
    name = os.environ.get(LEVEL_VARIABLE, "").upper()
    if name:
        level = logging.getLevelNamesMapping().get(name)
        if level is None:
            logger.warning("%s=%s is no log level; use debug, info, warning or error", LEVEL_VARIABLE, name)
        else:
            logger.setLevel(level)
            if not logging.getLogger().handlers:
                logger.addHandler(logging.StreamHandler())
    return logger


@functools.cache
def warn_once(message: str) -> None:
    """Logs `message` as a warning, the first time it is given in this process."""
    get_logger().warning(message)
