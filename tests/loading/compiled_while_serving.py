"""Prints the kernels that moves compile after the constructors. Run by test_migrator.py in a process of its own."""

from __future__ import annotations

import sys

import numpy as np
from numba.core.dispatcher import Dispatcher

from eplb_core import Target, Topology
from tests.loading.fleets import SLOT, fleet
from tests.loading.worlds import random_layout

MODES = ("static", "even", "random", "row", "weighted")


def kernels() -> dict[str, int]:
    """How many kinds of arguments each kernel of the package is compiled for, in this process."""
    modules = [module for name, module in sys.modules.items() if name.startswith("eplb_core.")]
    found = [each for module in modules for each in vars(module).values() if isinstance(each, Dispatcher)]
    return {f"{each.py_func.__module__}.{each.py_func.__name__}": len(each.signatures) for each in found}


def main() -> None:
    rng, topology = np.random.default_rng(0), Topology(2)
    for mode in MODES:
        with fleet(random_layout(rng, 2, 4, 8, topology), mode=mode, staging=SLOT) as ranks:
            before = kernels()
            for migration in range(4):
                target = random_layout(rng, 2, 4, 8, topology)
                p2l = target.physical_to_logical_map
                equal = 1.0 / target.replica_count[np.arange(2)[:, None], p2l]
                with_shares = mode == "weighted" and migration % 2
                ranks.start(Target(target, np.where(p2l >= 0, equal, 0.0) if with_shares else None))
                ranks.until_idle()
            print(*(f"{mode}: {name}" for name, count in kernels().items() if count != before.get(name, 0)), sep="\n")


if __name__ == "__main__":
    main()
