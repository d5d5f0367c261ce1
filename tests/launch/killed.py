"""Run by each rank: one is killed while the others wait for it."""

import os
import signal

import torch.distributed

torch.distributed.init_process_group("gloo")
torch.distributed.barrier()
if torch.distributed.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
torch.distributed.barrier()
