from ...tpu_ops import *
