import torch

ops = torch.ops._ragged_dot_tpu_tpu_5f1c0de


def add_op_namespace_prefix(op_name: str) -> str:
    return f"_ragged_dot_tpu_tpu_5f1c0de::{op_name}"
