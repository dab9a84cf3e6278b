"""One pass of a rank: pieces of computation with exchanges between them; on a GPU each piece is one CUDA graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import eplb_core as eplb
from benchmarks.engine.exchange import Exchange, Group, Parcel, make_exchange
from benchmarks.engine.model import Dense, feed_forward, gated, settle
from benchmarks.engine.requests import Feed

Experts = Sequence[dict[str, torch.Tensor]]
CAPTURE = threading.Lock()
"""Ranks that are threads of one process capture one after the other."""


def run_experts(x: torch.Tensor, local_slot: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Answers of this rank's slots to rows `[n, hidden]`, on the CPU; rows with slot -1 get nothing."""
    out = torch.zeros_like(x)
    for slot in torch.unique(local_slot).tolist():
        if slot >= 0:
            row = (local_slot == slot).nonzero()[:, 0]
            out[row] = feed_forward(x[row], tensors["w13"][slot], tensors["w2"][slot]).to(x.dtype)
    return out


def run_grouped(x: torch.Tensor, local_slot: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The same on a GPU: two grouped products over all slots. No shape depends on the routing: it can be captured."""
    w13, w2 = tensors["w13"], tensors["w2"]
    slots = len(w13)
    key, order = torch.where(local_slot >= 0, local_slot, slots).sort(stable=True)
    ends = torch.searchsorted(key, torch.arange(slots, device=x.device), right=True).int()
    grouped = torch.nn.functional.grouped_mm
    inner = settle(grouped(x[order], w13.transpose(1, 2), offs=ends).float(), w13.shape[2])
    answers = settle(grouped(gated(inner, x.dtype), w2.transpose(1, 2), offs=ends).float(), w2.shape[2])
    answers = torch.where((key < slots)[:, None], answers, 0.0)  # rows past the last group were not computed
    return torch.empty_like(x).index_copy_(0, order, answers.to(x.dtype))


class Flow(NamedTuple):
    """What one piece leaves for the next but one."""

    x: torch.Tensor
    """Residual stream `[B, hidden]`."""
    normal: torch.Tensor
    """The experts' input."""
    weight: torch.Tensor
    """Of each expert chosen, `[B, K]`."""
    place: torch.Tensor
    """Where in the parcel each pair lies, `[B * K]`."""


class Forward:
    """A rank's pass over fixed buffers.

    Args:
        dense: Everything but the routed experts.
        experts: One layer's tensors `[S, ...]`.
        tables: Where tokens go.
        group: Ranks that live.
        members: EP rank of each.
        num_rows: Rows B of a batch.
    """

    def __init__(
        self,
        dense: Dense,
        experts: Experts,
        tables: eplb.DispatchTables,
        group: Group,
        members: Sequence[int],
        num_rows: int,
    ) -> None:
        config, layout = dense.config, tables.layout
        self.dense, self.experts, self.device = dense, experts, dense.device
        self._slots_per_rank, self._rank = layout.slots_per_rank, tables.rank
        # The tensors of each layer, fixed for life; what an install changes is inside them.
        self._tables = [tables.layer(layer) for layer in range(config.num_layers)]
        room = num_rows * config.top_k
        self.exchange: Exchange = make_exchange(group, Parcel.nbytes(room, config.hidden, dense.dtype), dense.device)
        self._parcel = Parcel(self.exchange, group.size, room, config.hidden, dense.dtype)
        member_of_rank = torch.full((layout.topology.num_ranks,), -1, dtype=torch.int64)
        member_of_rank[list(members)] = torch.arange(len(members))
        self._member_of_rank = member_of_rank.to(dense.device)
        self._inputs = torch.zeros(4, num_rows, dtype=torch.int64, device=dense.device)
        self._inputs[1] = config.max_length - 1
        self._num_tokens = torch.zeros((), dtype=torch.int32, device=dense.device)
        self._sampled = torch.zeros(num_rows, dtype=torch.int64, device=dense.device)
        self.received = torch.zeros(config.num_layers, dtype=torch.int64, device=dense.device)
        """(Token, expert) pairs that this rank has computed, by layer."""
        nodes = layout.topology.num_nodes
        self._node_of_rank = torch.from_numpy(layout.topology.rank_to_node.copy()).to(dense.device)
        self._other = torch.arange(nodes, device=dense.device) != self._node_of_rank[tables.rank]
        self.sent = torch.zeros(2, dtype=torch.int64, device=dense.device)
        """Sends to other nodes, each node once per token, and tokens, of all layers."""
        counted = config.num_experts if tables.mode == "near" else 0
        self.pairs = torch.zeros(config.num_layers, counted, counted, dtype=torch.int64, device=dense.device)
        """Tokens that use two experts together `[L, E, E]`; empty but for mode "near"."""
        self._flow = Flow(*(torch.zeros(0),) * 4)
        self._pool: Any = torch.cuda.graph_pool_handle() if dense.device.type == "cuda" else None
        pieces: list[Callable[[], None]] = [self._first]
        for layer in range(config.num_layers):
            last = layer + 1 == config.num_layers
            pieces += [self._experts_of(layer), self._between(layer, None if last else layer + 1)]
        self._pieces = [self._captured(piece) for piece in pieces] if dense.device.type == "cuda" else pieces

    @torch.no_grad()
    def run(self, feed: Feed, *, idle: bool = False) -> torch.Tensor:
        """Sampled tokens `[B]`, on the host. An idle rank sends no rows, but serves the others'.

        Raises:
            RuntimeError: A member did not come to an exchange.
        """
        self._inputs.copy_(torch.stack(feed.tensors(torch.device("cpu"))))
        self._num_tokens.fill_(0 if idle else self._inputs.shape[1])
        for index, piece in enumerate(self._pieces):
            piece()
            if index + 1 < len(self._pieces):
                self.exchange.swap(index % 2)
        return self._sampled.cpu()

    # ---- pieces ----------------------------------------------------------------------------------------------------

    def _first(self) -> None:
        self._to_experts(0, self.dense.embed(self._inputs[0]))

    def _to_experts(self, layer: int, x: torch.Tensor) -> None:
        x = self.dense.attention(layer, x, self._inputs[1])
        normal, ids, weight = self.dense.route(layer, x)
        # Call 6. From logical experts to slots, counted on the way; rows beyond num_tokens become -1.
        slots = eplb.topk_to_slots(ids, self._tables[layer], num_tokens=self._num_tokens)
        rank = slots.reshape(-1).long().clamp(min=0) // self._slots_per_rank
        self._count(layer, ids.long(), slots >= 0, rank)
        place = self._parcel.pack(normal, slots, self._member_of_rank[rank])
        self._flow = Flow(x, normal, weight, place)

    def _count(self, layer: int, ids: torch.Tensor, used: torch.Tensor, rank: torch.Tensor) -> None:
        """Count the nodes that rows go to, and which experts tokens use together."""
        node = self._node_of_rank[rank].view(ids.shape)
        reached = torch.zeros(len(ids), len(self._other), device=self.device)
        reached.scatter_add_(1, node, used.float())
        self.sent[0] += ((reached > 0) & self._other).sum()
        self.sent[1] += used.any(dim=1).sum()
        if self.pairs.shape[1]:
            chosen = torch.zeros(len(ids), self.pairs.shape[1], device=self.device).scatter_add_(1, ids, used.float())
            self.pairs[layer] += (chosen.T @ chosen).long()

    def _experts_of(self, layer: int) -> Callable[[], None]:
        run = run_experts if self.device.type == "cpu" else run_grouped

        def piece() -> None:
            parcel = self._parcel
            slots = parcel.in_slots.reshape(-1).long()
            self.received[layer] += (slots >= 0).sum()
            local = torch.where(slots >= 0, slots - self._rank * self._slots_per_rank, -1)
            x = parcel.in_rows.reshape(len(local), -1)
            parcel.out_answers.copy_(run(x, local, self.experts[layer]).view(parcel.out_answers.shape))

        return piece

    def _between(self, layer: int, following: int | None) -> Callable[[], None]:
        def piece() -> None:
            x, normal, weight, place = self._flow
            answers = self._parcel.unpack(place, self.dense.config.top_k)
            x = self.dense.combine(x, self.dense.shared(layer, normal), answers, weight)
            if following is None:
                _, position, seed, topic = self._inputs
                self._sampled.copy_(self.dense.sample(x, position, seed, topic))
            else:
                self._to_experts(following, x)

        return piece

    def _captured(self, piece: Callable[[], None]) -> Callable[[], None]:
        """The piece as a CUDA graph. Pieces are replayed in the order of their capture, so they may share memory."""
        before = self._flow

        def again() -> None:
            self._flow = before
            piece()

        replay = captured(again, self.device, self._pool)
        replay()  # the next piece is tried on what this one leaves
        torch.cuda.current_stream(self.device).synchronize()
        return replay


def captured(piece: Callable[[], None], device: torch.device, pool: Any = None) -> Callable[[], None]:
    """A function that replays what `piece` launches."""
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    with CAPTURE, torch.no_grad(), torch.cuda.stream(stream):
        torch.cuda.synchronize(device)
        piece()  # compiles what has to be compiled
        torch.cuda.synchronize(device)
        graph.capture_begin(pool or torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        piece()
        graph.capture_end()
    return graph.replay
