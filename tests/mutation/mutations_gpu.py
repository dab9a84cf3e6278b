"""Changes to installs on a GPU, each with a test that must fail; those to the kernel where Triton is there."""

from __future__ import annotations

import importlib.util

KERNEL = "eplb_core/loading/install/gpu.py"
SAME = "tests/loading/install/test_gpu.py::test_the_kernel_makes_the_same_copies_in_triton_s_interpreter"
COPIES = "eplb_core/loading/install/copies.py"
GROUPS = "tests/loading/install/test_installer.py::test_copies_of_a_circle_are_one_group_and_independent_ones_are_not"
ORDER = "tests/loading/install/test_installer.py::test_groups_of_copies_may_be_made_in_any_order"

MUTATIONS: list[tuple[str, ...]] = [
    (COPIES, "written = copies[j, 1] >= 0 and (", "written = (", GROUPS),
    (COPIES, "                    if group[i] == high:\n", "                    if i == k:\n", ORDER),
]
if importlib.util.find_spec("triton") is not None:
    MUTATIONS += [
        (KERNEL, "if start + TILE <= words:", "if start <= words:", SAME),
        (KERNEL, "odd_kept = odd_data", "odd_kept = odd_kept", SAME),
        (COPIES, "addresses[place, tensor] if place >= 0 else 0", "addresses[place, tensor]", SAME),
        (KERNEL, "table[aligned : aligned + odd] = self._tiles[1, :odd]", "table[:odd] = self._tiles[1, :odd]", SAME),
    ]
