from ...tpu_ops import *
from ...tpu_ops import tables
