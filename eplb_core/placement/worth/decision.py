"""One decision for every page: does a placement pay, on which windows was that weighed, and with which numbers?

`gain_report`, `eplb plan`, `eplb demo` and replays take their verdicts and the words about them from here, so that no
two of them say different things of one trace and one cost.
"""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import FloatArray, IntArray
from eplb_core.placement.worth.costs import CostModel

WORTH = 0.02
"""Less than this share of the layers' time is within what deployments differ by anyway."""


def pays(saved: float) -> bool:
    """Whether that share of the layers' time is worth a placement."""
    return saved >= WORTH


def hold_out(load: IntArray | FloatArray) -> int:
    """How many of the first windows to place on, so that the others judge; 0 where nothing can be held out.

    Half of them; of one window, or where a half has no token, none.
    """
    half = len(load) // 2
    return half if half and load[:half].any() and load[half:].any() else 0


# ---- in words --------------------------------------------------------------------------------------------------------


def windows_words(first: int, end: int) -> str:
    """`window 3` or `windows 3-5`, for windows before `end`."""
    return f"window {first}" if end - first == 1 else f"windows {first}-{end - 1}"


def cost_words(
    model: CostModel | None, passes: float, load_a_window: float, hardware: str = "", *, all_to_all: bool = False
) -> str:
    """What time is counted in, and which numbers were assumed for it.

    Args:
        model: Seconds and bytes; None = none were given.
        passes: Passes of a window.
        load_a_window: Tokens of an expert that a layer computes in a window, all experts together, in the mean.
        hardware: What the numbers are of, where that is known.
        all_to_all: Say that the time of the all-to-all is in it, too.
    """
    if model is None:
        return "Time is counted in tokens of the fullest rank; moves are free."
    parts = [f"{model.token_s * 1e6:.3g} us a token", f"{model.expert_s * 1e6:.3g} us an active expert"]
    parts += [f"{model.expert_bytes / 1e6:.3g} MB an expert"] if model.expert_bytes else []
    whose = "that of experts and of their all-to-all, without attention, " if all_to_all else "counted "
    text = f"Time is {whose}by {f'{hardware}: ' if hardware else 'the cost given: '}{', '.join(parts)}; "
    text += f"a window is {passes:g} pass{'es' * (passes != 1.0)} of {load_a_window / passes:,.0f} token-expert pairs"
    return text + " a layer" + (" (`window_passes`)." if passes == 1.0 else ".")


def tokens_a_window(load: IntArray | FloatArray) -> float:
    """Mean over windows and layers of the tokens of all experts `[T, L, E]`."""
    return float(load.sum(axis=2, dtype=np.float64).mean()) if load.size else 0.0
