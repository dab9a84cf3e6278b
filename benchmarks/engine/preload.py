"""What a rank's process needs, imported once by the process that all ranks are forked from."""

import torch

import benchmarks.engine.engine  # noqa: F401
import eplb_core

torch.set_num_threads(1)  # no threads before a fork
eplb_core.warm_up()
