"""Decode throughput: experts implementations side by side, on a TPU, the emulated device or a CPU.

``tpu-kernels bench decode`` on the command line, `decode.run` from Python.
"""
