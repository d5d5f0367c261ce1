"""``python -m tpu_kernels``: the command line."""

from .cli import main

main()
