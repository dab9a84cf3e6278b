"""Count which experts tokens use together, and check such counts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_core._arrays import (
    ArrayLike,
    BoolArray,
    FloatArray,
    IntArray,
    check_int,
    check_made,
    read_only,
    to_ids,
    to_reals,
)
from eplb_core._numba import kernel
from eplb_core.load import count_topk

# Mean square by which pairs differ from chance above which they say something; real layers have 0.5 to 1.7.
_SOME_AFFINITY = 0.05
# Iterations by which chance is found.
_FIT = 30
# Mean number of experts of a token that counts as whole: some tokens may name an expert twice.
_WHOLE = 0.01
# Larger counts are scaled down to this power of two: they say no more, and sums and squares of them stay finite.
_LARGEST = 60
# Pairs of one layer are scaled to integers below 2^30: their sum over 2^32 pairs fits 64 bits.
_BITS = 30


def pair_counts(topk_ids: ArrayLike, num_experts: int) -> IntArray:
    """Which experts do tokens use together, and how often?

    Some thousand tokens of each layer are enough for `place(pairs=)`. Counts of several batches, ranks or windows add
    up.

    Args:
        topk_ids: Logical ids, signed ints `[tokens, K]` of one layer or `[tokens, L, K]` (what engines dump, and
            `TokenTrace.topk_ids`); -1 = none. An expert that a row names twice counts once.
        num_experts: Logical experts E.

    Returns:
        int64 `[E, E]`, or `[L, E, E]` for three dimensions: tokens that use both experts, and in the diagonal those
        that use the expert. Symmetric.

    Raises:
        IndexError: An id is below -1 or not below E.
        TypeError: The dtype is unsigned, or too narrow for both -1 and E - 1.
        ValueError: Wrong number of dimensions.

    Cost:
        O(tokens * L * K^2), and the E^2 counts of each layer; any thread.

    Example:
        >>> pair_counts([[0, 2], [2, 1], [0, 2], [-1, 1]], num_experts=3).tolist()
        [[2, 0, 2], [0, 2, 1], [2, 1, 3]]
    """
    experts = check_int(num_experts, "num_experts", 1)
    count_topk(topk_ids, experts)  # checks every id
    ids = to_ids(topk_ids, "topk_ids")
    by_layer = ids[:, None, :] if ids.ndim == 2 else ids
    check_made(num_layers=by_layer.shape[1], num_experts=experts, others=experts)
    counts = np.zeros((by_layer.shape[1], experts, experts), dtype=np.int64)
    _count(by_layer, counts)
    return counts[0] if ids.ndim == 2 else counts


@kernel
def _count(ids: IntArray, counts: IntArray) -> None:
    tokens, layers, width = ids.shape
    for token in range(tokens):
        for layer in range(layers):
            for i in range(width):
                e = ids[token, layer, i]
                twice = e < 0
                for j in range(i):
                    twice = twice or ids[token, layer, j] == e
                if twice:
                    continue
                counts[layer, e, e] += 1
                for j in range(i):
                    f = ids[token, layer, j]
                    again = f < 0
                    for k in range(j):
                        again = again or ids[token, layer, k] == f
                    if not again:
                        counts[layer, e, f] += 1
                        counts[layer, f, e] += 1


class Pairs(NamedTuple):
    """Checked counts."""

    use: IntArray
    """Pairs `[L, E, E]`, each layer's largest scaled to 30 bits; the diagonal is 0."""
    unit: FloatArray
    """Tokens that 1 in `use` stands for `[L]`."""
    tokens: FloatArray
    """Tokens that use each expert: the diagonal as given `[L, E]`."""

    def take(self, layers: BoolArray) -> Pairs:
        """Pairs of some layers."""
        return self if layers.all() else Pairs(self.use[layers], self.unit[layers], self.tokens[layers])

    def width(self, layer: int) -> int:
        """Experts of each token; 0 where the diagonal does not say it, and where tokens have not equally many."""
        tokens, pairs = self.tokens[layer], self.use[layer] * self.unit[layer]
        if not tokens.any() or (pairs.max(axis=1, initial=0.0) > tokens).any():
            return 0
        mean = 1.0 + float(pairs.sum() / tokens.sum())
        return round(mean) if abs(mean - round(mean)) < _WHOLE else 0

    def speak(self) -> BoolArray:
        """Which layers have pairs that chance does not explain `[L]`."""
        affinity = np.zeros(len(self.use))
        _find_affinity(self.use, self.unit, np.zeros((3, self.use.shape[1])), affinity)
        return affinity > _SOME_AFFINITY


def check_pairs(pairs: ArrayLike, layers: int, experts: int) -> Pairs:
    """Check counts `[L, E, E]`, of tokens or in any other unit."""
    given: FloatArray = to_reals(pairs, "pairs")
    if given.shape != (layers, experts, experts):
        raise ValueError(
            f"`pairs` (shape {list(given.shape)}) must be [{layers}, {experts}, {experts}], as `pair_counts` gives"
        )
    if given.size and not (given.min() >= 0.0 and given.max() < np.inf):
        layer, e, f = (int(i) for i in np.argwhere(~((given >= 0.0) & (given < np.inf)))[0])
        raise ValueError(
            f"`pairs` (={given[layer, e, f]}) must be finite and not negative at layer {layer}, experts {e} and {f}"
        )
    if not np.array_equal(given, given.transpose(0, 2, 1)):
        layer, e, f = (int(i) for i in np.argwhere(given != given.transpose(0, 2, 1))[0])
        raise ValueError(
            f"`pairs` (={given[layer, e, f]}) must be symmetric at layer {layer}, experts {e} and {f}: {f} and {e} "
            f"have {given[layer, f, e]}; use `pair_counts`"
        )
    given = np.ldexp(given, np.minimum(_LARGEST - np.frexp(given.max(axis=(1, 2), initial=0.0))[1], 0)[:, None, None])
    off = given * (1.0 - np.eye(experts))
    exponent = np.frexp(off.max(axis=(1, 2), initial=0.0))[1]
    return Pairs(
        read_only(np.ldexp(off, _BITS - exponent[:, None, None]).astype(np.int64)),
        np.ldexp(1.0, exponent - _BITS),
        read_only(given.diagonal(axis1=1, axis2=2).copy()),
    )


@kernel
def _find_affinity(pairs: IntArray, unit: FloatArray, part: FloatArray, affinity: FloatArray) -> None:
    """Mean square by which pairs differ from what chance would make of their experts, less what counting alone does.

    Chance: tokens choose experts independently, so that a pair is used as often as the product of two numbers, which
    are found by iteration. Counting adds 1 to the sum of squares for each degree of freedom.
    """
    layers, experts, _ = pairs.shape
    for layer in range(layers):
        total = 0.0
        for e in range(experts):
            part[0, e] = 0.0
            for f in range(experts):
                part[0, e] += pairs[layer, e, f]
            total += part[0, e]
        affinity[layer] = 0.0
        if total == 0.0:
            continue
        for e in range(experts):
            part[1, e] = part[0, e] / np.sqrt(total)
        for _ in range(_FIT):
            whole = 0.0
            for e in range(experts):
                whole += part[1, e]
            for e in range(experts):
                others = whole - part[1, e]
                part[2, e] = part[0, e] / others if others > 0.0 else 0.0
            for e in range(experts):
                part[1, e] = 0.5 * (part[1, e] + part[2, e])
        square = 0.0
        for e in range(experts):
            for f in range(e):
                chance = part[1, e] * part[1, f]
                if chance > 0.0:
                    square += (pairs[layer, e, f] - chance) ** 2 / chance
        affinity[layer] = 2.0 * square / total - experts * (experts - 3.0) / (total * unit[layer])
