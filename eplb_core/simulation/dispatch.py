"""How replays spread tokens over replicas: the words of `simulate(dispatch=...)` and what they compute."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np

from eplb_core._arrays import ArrayLike, FloatArray, IntArray, check_word
from eplb_core._extras import needed
from eplb_core.layout import ExpertLayout
from eplb_core.metrics import check_shares, even_shares
from eplb_core.simulation.load.sources import Block, rank_starts

if TYPE_CHECKING:
    from eplb_core.dispatch.tables import DispatchTables

DispatchName: TypeAlias = Literal["even", "weighted", "previous", "static_table", "even_table", "near"]
"""Which share of its expert's tokens a slot takes; beside each word its `dispatch` of `place` and `mode` of tables.

even: equal shares. `place`: "even"; `DispatchTables`: "random" or "row".
weighted: shares solved for each window as it comes. `place`: "weighted"; `DispatchTables`: "quota", solved per batch.
previous: shares solved for the windows that the policy saw. `place`: "even"; `DispatchTables`: "weighted", with
    `replica_shares` of those windows.
static_table: one replica per rank, from `static_dispatch_table`. `place`: "even"; `DispatchTables`: "static".
even_table: one replica per rank, from `even_dispatch_table`. `place`: "even"; `DispatchTables`: "even".
near: token by token to few nodes, with `replica_shares` and `near_orders` of the windows that the policy saw.
    `place`: "even", with the pairs of those windows; `DispatchTables`: "near". Needs torch and a `TokenTrace`.
"""
Dispatch: TypeAlias = Callable[[ExpertLayout, FloatArray], ArrayLike]
"""From the live layout and one window `[L, E]` to the share of its expert's tokens that each slot takes, `[L, P]`."""

DISPATCHES: tuple[DispatchName, ...] = get_args(DispatchName)
# Tokens by which orders are solved: more are hardly better.
_MOST_TOKENS = 2048
_RENAMED = {"solved": "weighted", "static": "static_table", "local": "even_table"}  # words of 0.1


def check_dispatch(dispatch: object) -> None:
    """Raise ValueError for a word that is none of `DISPATCHES`; words of 0.1 get the new one named."""
    if isinstance(dispatch, str) and dispatch in _RENAMED:
        raise ValueError(f"`dispatch` (={dispatch!r}) is called {_RENAMED[dispatch]!r} since 0.2; use that word")
    if not callable(dispatch):
        check_word(dispatch, "dispatch", DISPATCHES, ", or a function")


class Dispatcher:
    """Tokens of each slot, for the layout that is live. `renew` before the first block and after each rebalance."""

    def __init__(self, dispatch: DispatchName | Dispatch) -> None:
        check_dispatch(dispatch)
        self.dispatch = dispatch
        self.shares: FloatArray | None = None
        self.table: IntArray | None = None
        self.near: list[DispatchTables] = []

    def renew(self, layout: ExpertLayout, seen: IntArray | FloatArray | None, tokens: IntArray | None = None) -> None:
        """A layout goes live; `seen` are the windows `[T', L, E]` known by then, `tokens` their ids `[n, L, K]`."""
        self.layout = layout
        self.shares = self.table = None
        if self.dispatch == "near":
            needed("torch", "torch", 'dispatch "near"')
            from eplb_core.dispatch.tables import DispatchTables

            shares = None if seen is None else _solved(layout, seen)
            orders = None
            if tokens is not None:
                from eplb_core.dispatch.orders import near_orders

                orders = near_orders(layout, tokens[:: max(1, len(tokens) // _MOST_TOKENS)], seen, shares=shares)
            ranks = range(layout.topology.num_ranks)
            self.near = [DispatchTables(layout, rank=rank, mode="near", shares=shares, orders=orders) for rank in ranks]
        elif self.dispatch == "previous" and seen is not None:
            self.shares = _solved(layout, seen)
        elif self.dispatch == "static_table":
            from eplb_core.dispatch.static import static_dispatch_table

            self.table = static_dispatch_table(layout)
        elif self.dispatch == "even_table":
            from eplb_core.dispatch.even import even_dispatch_table

            self.table = even_dispatch_table(layout)

    def spread(self, block: Block) -> tuple[FloatArray, FloatArray]:
        """Tokens of each slot, float64 `[t, L, P]`, and the nodes that a token reaches and sends to, `[2, t, L]`.

        The latter are NaN where tokens are not known.
        """
        layout, reached = self.layout, np.full((2, *block.load.shape[:2]), np.nan)
        if self.near and block.ids is None:
            raise ValueError('`dispatch` (="near") needs the tokens of `trace`: give a TokenTrace')
        slots = self._slot_load(block) if not self.near else np.zeros((*block.load.shape[:2], layout.num_slots))
        if block.ids is None:
            return slots, reached
        if self.near or self.table is not None:
            for window, ids in enumerate(block.ids):
                self._follow(ids, slots[window] if self.near else None, reached[:, window])
        elif layout.topology.num_nodes == 1:
            reached[0], reached[1] = 1.0, 0.0
        else:
            from eplb_core.placement.affinity.sends import count_sends  # compiles: only where it is used

            shares = self._shares(np.asarray(block.load, dtype=np.float64))
            for window, ids in enumerate(block.ids):
                sent = count_sends(layout, ids, shares=shares if shares.ndim == 2 else shares[window])
                reached[:, window] = sent.nodes, sent.sends
        return slots, reached

    def _follow(self, ids: IntArray, slots: FloatArray | None, reached: FloatArray) -> None:
        """Each token of a window from its rank to its slots: what these get, and the nodes on the way."""
        layout, topology = self.layout, self.layout.topology
        nodes = np.arange(topology.num_nodes)
        reached[:] = 0.0
        for rank, (first, end) in enumerate(itertools.pairwise(rank_starts(len(ids), topology.num_ranks))):
            own = nodes == topology.rank_to_node[rank]
            for layer in range(layout.num_layers):
                part = np.array(ids[first:end, layer], dtype=np.int64)
                if self.table is not None:
                    to = np.where(part >= 0, self.table[rank, layer][np.maximum(part, 0)], -1)
                else:
                    to = self._near_slots(rank, layer, part)
                if slots is not None:
                    slots[layer] += np.bincount(to[to >= 0], minlength=layout.num_slots)
                node = np.where(to >= 0, topology.rank_to_node[np.maximum(to, 0) // layout.slots_per_rank], -1)
                met = (node[:, :, None] == nodes).any(axis=1)
                reached[0, layer] += met.sum()
                reached[1, layer] += met[:, ~own].sum()
        some = (ids >= 0).any(axis=2).sum(axis=0)
        np.divide(reached, some, out=reached, where=some > 0)
        reached[:, some == 0] = np.nan

    def _near_slots(self, rank: int, layer: int, ids: IntArray) -> IntArray:
        import torch

        return np.asarray(self.near[rank].map(layer, torch.from_numpy(ids)).numpy())

    def _slot_load(self, block: Block) -> FloatArray:
        """Tokens of each slot, float64 `[t, L, P]`."""
        if self.table is not None and block.by_source is not None:
            return self._by_table(block.by_source(self.layout.topology.num_ranks), self.table)
        load = np.asarray(block.load, dtype=np.float64)
        shares = self._shares(load)
        p2l = self.layout.physical_to_logical_map
        index = np.broadcast_to(np.maximum(p2l, 0), (len(load), *p2l.shape))
        tokens: FloatArray = np.take_along_axis(load, index, axis=2)
        tokens *= np.where(p2l >= 0, shares, 0.0)
        return tokens

    def _shares(self, load: FloatArray) -> FloatArray:
        if callable(self.dispatch):
            return np.stack([check_shares(self.dispatch(self.layout, window), self.layout) for window in load])
        if self.dispatch == "weighted":
            return np.stack([_solved(self.layout, window) for window in load])
        if self.table is not None:  # every rank sends equally many tokens of each expert
            ones = np.ones((1, len(self.table), *self.table.shape[1:])) / len(self.table)
            return self._by_table(ones, self.table)
        if self.shares is not None:
            return self.shares
        return even_shares(self.layout)

    def _by_table(self, sent: FloatArray, table: IntArray) -> FloatArray:
        """What each rank sends, `[t, R, L, E]`, to the slot that its table names: `[t, L, P]`."""
        slots = self.layout.num_slots
        tokens = np.empty((len(sent), self.layout.num_layers, slots))
        for window in range(len(sent)):
            for layer in range(self.layout.num_layers):
                to, what = table[:, layer].ravel(), sent[window, :, layer].ravel()
                tokens[window, layer] = np.bincount(to, weights=what, minlength=slots)
        return tokens


def _solved(layout: ExpertLayout, load: IntArray | FloatArray) -> FloatArray:
    from eplb_core.dispatch.shares import replica_shares  # compiles: only where it is used

    return replica_shares(layout, load)
