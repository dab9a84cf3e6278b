"""What tokens send across nodes, from the definition, token by token; and tokens that use experts in groups."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import numpy.typing as npt

from eplb_core import ExpertLayout

Ids = npt.NDArray[np.int64]


def nodes_of(layout: ExpertLayout, layer: int = 0) -> list[set[int]]:
    """Nodes that hold each expert."""
    node = layout.topology.rank_to_node
    slots = [layout.slots(layer, expert) for expert in range(layout.num_experts)]
    return [{int(node[slot // layout.slots_per_rank]) for slot in held} for held in slots]


def fewest_sends(held: list[set[int]], token: list[int], source: int, nodes: int) -> int:
    """Nodes besides its own that a token must reach: the smallest set that, with its own, holds all its experts."""
    left = [expert for expert in token if source not in held[expert]]
    others = [node for node in range(nodes) if node != source]
    return next(
        size
        for size in range(nodes)
        for chosen in combinations(others, size)
        if all(held[expert] & set(chosen) for expert in left)
    )


def sends_per_token(layout: ExpertLayout, tokens: Ids, layer: int = 0) -> float:
    """Mean of `fewest_sends` over tokens `[tokens, K]` and all nodes as sources."""
    held, nodes = nodes_of(layout, layer), layout.topology.num_nodes
    sends = [fewest_sends(held, row, source, nodes) for row in tokens.tolist() for source in range(nodes)]
    return float(np.mean(sends))


def clustered_tokens(tokens: int, groups: int, size: int, k: int, *, loyalty: float, seed: int = 0) -> Ids:
    """Ids `[tokens, k]` of `groups * size` experts: a token takes each expert from its own group with `loyalty`.

    Experts of a group are `size` numbers apart by `groups`, so that consecutive experts are no group.
    """
    rng = np.random.default_rng(seed)
    experts = groups * size
    own = rng.integers(0, groups, tokens)
    at_home = np.arange(experts)[None] % groups == own[:, None]
    weight = (1 - loyalty) / experts + loyalty / size * at_home
    order: Ids = np.argsort(-(np.log(weight) + rng.gumbel(size=weight.shape)), axis=1, kind="stable")
    return order[:, :k].astype(np.int64)
