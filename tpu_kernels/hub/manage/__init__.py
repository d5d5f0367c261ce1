"""What people do with kernels beside loading them: list, describe, download, check, mirror and prune.

This stands on top of the hub: nothing that loads a kernel imports it.
"""
