"""Writes down what torchrun would be started with on one host of a TPU slice; nothing is started. RESULT"""

import json
import os
import sys
from pathlib import Path

from tpu_kernels import device, launch


def note(options, count, program, module):
    addresses = os.environ["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")
    Path(program[0]).write_text(json.dumps([options, count, addresses]))


device.attached_chips = lambda: 4
launch._run = note
launch.launch(sys.argv[1:])
