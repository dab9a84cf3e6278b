"""Static dispatch tables with the answers of SGLang's: one slot for each source rank, layer and expert."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from eplb_core._arrays import IntArray, check_flag, check_int, check_kind, check_word
from eplb_core._numba import inline_kernel, kernel
from eplb_core.dispatch.rows import group_slots
from eplb_core.layout import ExpertLayout


def static_dispatch_table(
    layout: ExpertLayout,
    seed: int = 42,
    *,
    prefer_same_node: bool = True,
    candidates: Literal["all", "narrowed"] = "all",
) -> IntArray:
    """Choose the slot that each rank sends each expert's tokens to by SGLang's rules, bit for bit.

    The only slot, else the first on the source's own rank, else the first on its node where the node holds some but
    not all of the expert's slots; ranks that are left share the expert's slots fairly in a random order. The draws are
    those of `random.Random(seed)`, one stream over all layers, so a layer's row depends on the layers before it.

    Args:
        layout: Where the experts are.
        seed: Seed of the draws, 0 or more.
        prefer_same_node: Whether a slot on the own node goes before the fair draw. False = as on one node.
        candidates: "all": each rank draws from all slots of an expert, as SGLang does after a rebalance. "narrowed": as
            it does at start-up, where each rank cuts the lists to its nearest slots first and so leaves out draws that
            other ranks make; the ranks' picks then no longer complement one another.

    Returns:
        int64 `[R, L, E]`, global slots.

    Raises:
        ValueError: `candidates` is neither, or `seed` is negative.

    Cost:
        About 1.5 ms at 58 x 256 -> 288 on 32 ranks, 6 to 10 ms with "narrowed". Any thread; no global random state.

    Example:
        >>> from eplb_core import Topology
        >>> layout = ExpertLayout([[0, 1, 2, 3, 3, 0]], num_experts=4, topology=Topology(num_ranks=2))
        >>> static_dispatch_table(layout)[:, 0].tolist()
        [[0, 1, 2, 3], [5, 1, 2, 3]]

    Source:
        SGLang 0.5.23, `compute_logical_to_rank_dispatch_physical_map`. `even_dispatch_table` is the better table.
    """
    check_kind(layout, "layout", ExpertLayout)
    check_word(candidates, "candidates", ("all", "narrowed"))
    prefer_same_node = check_flag(prefer_same_node, "prefer_same_node")
    seed = check_int(seed, "seed", 0)
    table = np.empty((layout.topology.num_ranks, layout.num_layers, layout.num_experts), dtype=np.int64)
    if layout.num_layers:
        fill = _Filler(layout, seed, layout.num_layers, prefer_same_node)
        fill(layout.physical_to_logical_map, table, narrowed=candidates == "narrowed")
    return table


def rank_filler(layout: ExpertLayout, seed: int, rank: int) -> Callable[[int, IntArray], IntArray]:
    """Return a function from a layer's number and row to a rank's `[E]` slots by the rule, for that layer alone.

    All it needs is allocated here; every layer draws from one sequence of words, from another place on.
    """
    fill = _Filler(layout, seed, 1, True)
    table = np.empty((1, 1, layout.num_experts), dtype=np.int64)
    slots: IntArray = table[0, 0]

    def fill_rank(layer: int, row: IntArray) -> IntArray:
        fill(row[None], table, narrowed=False, start=layer * 61 % 1024, first_rank=rank)
        return slots

    return fill_rank


class _Filler:
    """Scratch and random words for layouts of one frame."""

    def __init__(self, layout: ExpertLayout, seed: int, num_layers: int, prefer_same_node: bool) -> None:
        ranks, experts, slots = layout.topology.num_ranks, layout.num_experts, layout.num_slots
        self.owner = np.arange(slots) // layout.slots_per_rank
        self.node = layout.topology.rank_to_node if prefer_same_node else np.zeros(ranks, dtype=np.int64)
        # random.Random seeds itself from any integer; its words from there on are ours.
        self.state = np.array(random.Random(seed).getstate()[1], dtype=np.uint64).astype(np.uint32)
        # A shuffle of R and a sample are R + n draws at most, of about 1.4 words each; should they run out, draw more.
        redundant = num_layers * (slots - experts)
        self.words = self._draw_words(6 + int(redundant * (ranks + 1) * 1.45) // 624)
        self.starts = np.empty(experts + 1, dtype=np.int64)
        self.by_expert = np.empty(slots, dtype=np.int64)
        self.scratch = np.empty((7, ranks + slots + 1), dtype=np.int64)
        self.picks = np.empty((max(1, slots - experts), ranks), dtype=np.int64)
        self.position = np.empty(ranks, dtype=np.int64)

    def _draw_words(self, blocks: int) -> IntArray:
        words = np.empty(624 * blocks, dtype=np.int64)
        _mersenne(self.state.copy(), words)
        return words

    def __call__(self, p2l: IntArray, table: IntArray, *, narrowed: bool, start: int = 0, first_rank: int = 0) -> None:
        while True:
            self.position[:] = start
            fixed = (self.owner, self.node, self.words, self.position, self.starts, self.by_expert, self.scratch)
            if _fill(p2l, *fixed, self.picks, table, narrowed, first_rank):
                return
            self.words = self._draw_words(len(self.words) // 312)


@kernel
def _mersenne(state: npt.NDArray[np.uint32], words: IntArray) -> None:
    """The words that MT19937 gives from `state` (624 words and the index 624); `words` is a multiple of 624 long."""
    upper, lower = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)
    for block in range(words.size // 624):
        for i in range(624):
            y = (state[i] & upper) | (state[(i + 1) % 624] & lower)
            twist = np.uint32(0x9908B0DF) if y & np.uint32(1) else np.uint32(0)
            state[i] = state[(i + 397) % 624] ^ (y >> np.uint32(1)) ^ twist
        for i in range(624):
            y = state[i]
            y ^= y >> np.uint32(11)
            y ^= (y << np.uint32(7)) & np.uint32(0x9D2C5680)
            y ^= (y << np.uint32(15)) & np.uint32(0xEFC60000)
            y ^= y >> np.uint32(18)
            words[block * 624 + i] = y


@kernel
def _fill(
    p2l: IntArray,
    owner: IntArray,
    node: IntArray,
    words: IntArray,
    position: IntArray,
    starts: IntArray,
    by_expert: IntArray,
    scratch: IntArray,
    picks_of: IntArray,
    table: IntArray,
    narrowed: bool,
    first_rank: int,
) -> bool:
    """Fill `table`, of ranks from `first_rank` on; False when the words ran out.

    `position[r]` is where rank r is in its stream of words.
    """
    _, num_layers, num_experts = table.shape
    num_ranks = position.size
    remaining, sample, swaps, picked, home, shared, on_node = scratch
    for layer in range(num_layers):
        group_slots(p2l[layer], starts, by_expert)
        num_shared = 0  # experts with several slots
        for expert in range(num_experts):
            first, count = starts[expert], starts[expert + 1] - starts[expert]
            home[expert] = by_expert[first]
            if count == 1:
                continue
            picks = picks_of[num_shared]
            shared[num_shared] = expert
            num_shared += 1
            _nearest(by_expert[first : first + count], owner, node, on_node, picks)
            left = 0
            for rank in range(num_ranks):
                if picks[rank] < 0:
                    remaining[left] = rank
                    left += 1
            if left == 0:
                continue
            if narrowed:
                # Each rank has drawn by itself so far, so each is elsewhere in the one sequence of words.
                for i in range(left):
                    rank = remaining[i]
                    position[rank] = _fair_choice(words, position[rank], count, left, i, sample, swaps, picked)
                    if position[rank] < 0:
                        return False
                    picks[rank] = by_expert[first + picked[0]]
            else:
                position[0] = _fair_choices(words, position[0], count, left, sample, swaps, picked)
                if position[0] < 0:
                    return False
                for i in range(left):
                    picks[remaining[i]] = by_expert[first + picked[i]]
        for rank in range(table.shape[0]):  # row by row: a rank's rows are far apart in memory
            row = table[rank, layer]
            for expert in range(num_experts):
                row[expert] = home[expert]
            for i in range(num_shared):
                row[shared[i]] = picks_of[i, first_rank + rank]
    return True


@inline_kernel
def _nearest(slots: IntArray, owner: IntArray, node: IntArray, on_node: IntArray, picks: IntArray) -> None:
    """Put into `picks[r]` the first slot on the own rank, else on the own node if that leaves some out, else -1."""
    on_node[: picks.size] = 0
    for slot in slots:
        on_node[node[owner[slot]]] += 1
    for rank in range(picks.size):
        picks[rank] = -1
        if 0 < on_node[node[rank]] < slots.size:
            for slot in slots[::-1]:
                if node[owner[slot]] == node[rank]:
                    picks[rank] = slot
    for slot in slots[::-1]:
        picks[owner[slot]] = slot


@inline_kernel
def _draw(words: IntArray, position: int, below: int) -> tuple[int, int]:
    """A uniform integer under `below` and where the stream then is; -1 when the words ran out."""
    bits = 1
    while below >> bits:
        bits += 1
    shift = 32 - bits
    while position < words.size:
        value = words[position] >> shift
        position += 1
        if value < below:
            return value, position
    return 0, -1


@inline_kernel
def _draw_shuffle(words: IntArray, position: int, take: int, swaps: IntArray) -> int:
    """Draw `swaps[i]`, uniform in [0, i], for i from `take - 1` down to 1; -1 when the words ran out."""
    below, bits = take, 1
    while below >> bits:
        bits += 1
    while below >= 2:
        shift = 32 - bits
        stop = max(2, 1 << (bits - 1))
        while below >= stop:
            if position >= words.size:
                return -1
            value = words[position] >> shift
            position += 1
            swaps[below - 1] = value  # a value that is too high is overwritten: no branch to mispredict
            below -= value < below
        bits -= 1
    return position


@inline_kernel
def _draw_sample(words: IntArray, position: int, count: int, rest: int, pool: IntArray, sample: IntArray) -> int:
    """Draw `rest` distinct ones of `count` in the way of `random.sample`; -1 when the words ran out."""
    # It draws from a shrinking pool, or from all and rejects what it has, whichever needs less memory.
    limit, power = 21, 1
    if rest > 5:
        while power < 3 * rest:
            power *= 4
        limit += power
    for i in range(count):
        pool[i] = i
    for i in range(rest):
        if count <= limit:
            j, position = _draw(words, position, count - i)
            sample[i] = pool[j]
            pool[j] = pool[count - i - 1]
        else:
            j, position = _draw(words, position, count)
            while position >= 0 and pool[j] < 0:
                j, position = _draw(words, position, count)
            sample[i] = j
            pool[j] = -1
        if position < 0:
            return -1
    return position


@inline_kernel
def _draw_fair(words: IntArray, position: int, count: int, take: int, sample: IntArray, swaps: IntArray) -> int:
    """Draw the random rest into `sample` and a shuffle of all picks into `swaps`; -1 when the words ran out."""
    position = _draw_sample(words, position, count, take % count, swaps, sample)
    return _draw_shuffle(words, position, take, swaps) if position >= 0 else -1


@inline_kernel
def _fair_choices(
    words: IntArray, position: int, count: int, take: int, sample: IntArray, swaps: IntArray, picked: IntArray
) -> int:
    """`take` picks among `count`: each as often as the others but for a random rest, then shuffled."""
    rest = take % count
    position = _draw_fair(words, position, count, take, sample, swaps)
    if position < 0:
        return -1
    pick = 0
    for i in range(take - rest):
        picked[i] = pick
        pick = pick + 1 if pick + 1 < count else 0
    for i in range(rest):
        picked[take - rest + i] = sample[i]
    for i in range(take - 1, 0, -1):
        j = swaps[i]
        picked[i], picked[j] = picked[j], picked[i]
    return position


@inline_kernel
def _fair_choice(
    words: IntArray,
    position: int,
    count: int,
    take: int,
    place: int,
    sample: IntArray,
    swaps: IntArray,
    picked: IntArray,
) -> int:
    """As `_fair_choices`, but leaves only what ends in `place`, in `picked[0]`: the other exchanges are not made."""
    rest = take % count
    position = _draw_fair(words, position, count, take, sample, swaps)
    if position < 0:
        return -1
    source = swaps[place] if place > 0 else 0
    for i in range(place + 1, take):
        if swaps[i] == source:
            source = i
    picked[0] = source % count if source < take - rest else sample[source - (take - rest)]
    return position
