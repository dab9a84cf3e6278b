"""Spend one budget over all layers where it gains most."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_core._arrays import ArrayLike, FloatArray, IntArray, check_int, to_ids, to_reals
from eplb_core._numba import kernel

_MOST_CANDIDATES = 127
# Layers times what they may cost together: a byte each.
_MOST_CELLS = 1 << 32


def spend_budget(gains: ArrayLike, prices: ArrayLike, budget: int) -> IntArray:
    """Which candidate should each layer take, so that all together gain most and cost no more than `budget`?

    The answer is the best there is, so more budget never gains less. Of answers with equal gain the cheapest is taken,
    then the one that gives to the first layers.

    Args:
        gains: What each candidate gains on each layer, `[C, L]`, or `[L]` for one candidate; finite, or infinite for
            what must be had if the budget allows. 0 or less is never taken.
        prices: What it costs, ints of the same shape, 0 or more: transfers, slots, bytes in a coarse unit.
        budget: Most that all layers may cost together, 0 or more.

    Returns:
        int64 `[L]`: the candidate of each layer, -1 = none.

    Raises:
        ValueError: Shapes differ; a gain is NaN; a price or the budget is negative; more than 127 candidates; L * B
            (see Cost) above 2**32.

    Cost:
        O(C * L * B) time and L * B bytes, where B is the smaller of `budget` and what the dearest candidates cost
        together: 6 ms for 58 layers and a budget of 10,000. Any thread, no interpreter lock.

    Example:
        >>> spend_budget([5.0, 9.0, 6.0], [2, 3, 2], 4).tolist()
        [0, -1, 0]
        >>> spend_budget([[1.0, 3.0], [4.0, 5.0]], [[1, 1], [3, 3]], 4).tolist()
        [1, 0]
    """
    gain, price = _check_candidates(gains, prices)
    most = check_int(budget, "budget", 0)
    candidates, layers = gain.shape
    chosen = np.full(layers, -1, dtype=np.int64)
    if not candidates or not layers:
        return chosen
    # What must be had is worth more than all else together.
    finite = gain[np.isfinite(gain) & (gain > 0.0)].tolist()
    all_else = 1.0
    for value in finite:
        all_else += 2.0 * value
    if not all_else * layers < np.inf:
        raise ValueError(f"`gains` (up to {max(finite):g}) are too large to be added up in float64; scale them down")
    gain[gain == np.inf] = all_else
    reach = min(most, sum(price.max(axis=0).tolist()))  # Python's integers, which do not wrap
    if reach * layers > _MOST_CELLS:
        raise ValueError(
            f"`budget` (={most}) and `prices` (dearest of {layers} layers {int(price.max())}) are too fine: a table of "
            f"{layers} times {reach} must have {_MOST_CELLS} cells at most; count in a coarser unit"
        )
    choice = np.full((layers, reach + 1), -1, dtype=np.int8)
    worth, spent = np.zeros((2, reach + 1)), np.zeros((2, reach + 1), dtype=np.int64)
    _spend(gain, price, choice, worth, spent, chosen)
    return chosen


def _check_candidates(gains: ArrayLike, prices: ArrayLike) -> tuple[FloatArray, IntArray]:
    """Both as `[C, L]`."""
    gain = np.array(to_reals(gains, "gains"), order="C")
    price = to_ids(prices, "prices")
    if gain.shape != price.shape or gain.ndim not in (1, 2):
        raise ValueError(
            f"`gains` (shape {list(gain.shape)}) and `prices` (shape {list(price.shape)}) must both be [C, L] or [L]"
        )
    gain, price = np.atleast_2d(gain), np.atleast_2d(price)
    if len(gain) > _MOST_CANDIDATES:
        raise ValueError(f"`gains` ({len(gain)} candidates) must have {_MOST_CANDIDATES} or fewer")
    for name, bad in (("gains", np.isnan(gain)), ("prices", price < 0)):
        if bad.any():
            candidate, layer = (int(i) for i in np.argwhere(bad)[0])
            value = gain[candidate, layer] if name == "gains" else price[candidate, layer]
            rule = "be a number" if name == "gains" else "be 0 or more"
            raise ValueError(f"`{name}` (={value}) must {rule} at candidate {candidate}, layer {layer}")
    return gain, price


@kernel
def _spend(
    gain: FloatArray,
    price: IntArray,
    choice: npt.NDArray[np.int8],
    worth: FloatArray,
    spent: IntArray,
    chosen: IntArray,
) -> None:
    """Dynamic programming from the last layer to the first over what is left of the budget.

    `worth[b]` and `spent[b]` say what the layers from here on gain and cost with `b` left; two rows take turns.
    """
    candidates, layers = gain.shape
    for layer in range(layers - 1, -1, -1):
        now, after = layer % 2, (layer + 1) % 2
        for left in range(choice.shape[1]):
            best, cost, take = worth[after, left], spent[after, left], -1
            for c in range(candidates):
                p = price[c, layer]
                if p > left or not gain[c, layer] > 0.0:
                    continue
                value, whole = gain[c, layer] + worth[after, left - p], p + spent[after, left - p]
                # Of equal ones: cheaper, then taken rather than left to a later layer, then the first candidate.
                if value > best or (value == best and (whole < cost or (whole == cost and take < 0))):
                    best, cost, take = value, whole, c
            worth[now, left], spent[now, left], choice[layer, left] = best, cost, take
    left = choice.shape[1] - 1
    for layer in range(layers):
        take = choice[layer, left]
        chosen[layer] = take
        if take >= 0:
            left -= price[take, layer]
