"""Decoding with transformers models: a static cache that compiles once, and a loop that stays on the device.

Data flows one way: `loop` (host) drives `programs` (compiled steps, made by `compilation`), which run the model over
a `cache` and pick tokens by `sampling`.
"""
