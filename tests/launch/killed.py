"""Run by each rank: one is killed while the others wait for it. NOTE: takes the time of that."""

import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed

torch.distributed.init_process_group("gloo")
torch.distributed.barrier()
if torch.distributed.get_rank() == 1:
    Path(sys.argv[1]).write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
torch.distributed.barrier()
