from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eplb_core.adapters.vllm.communicator import TransportCommunicator, create
from eplb_core.errors import TransportError
from eplb_core.loading.agreement import LocalAgreement
from eplb_core.loading.transport import Transport
from eplb_core.loading.transports import DeferredCopy, LocalCopy
from tests.adapters.fakes import group_of_one, on_ranks
from tests.loading.worlds import on_threads

RANKS, SLOTS, LAYERS = 3, 2, 2
OLD = np.array([0, 1, 2, 3, 4, 0])


def expected(layer: int, expert: int) -> torch.Tensor:
    return torch.arange(4, dtype=torch.float32) + 10 * expert + 100 * layer


class Rank:
    """Weights that say which expert they are; two tensors a layer, of different size and dtype."""

    def __init__(self, rank: int) -> None:
        mine = OLD[rank * SLOTS : (rank + 1) * SLOTS].tolist()
        self.weights = [
            [
                torch.stack([expected(layer, expert) for expert in mine]),
                torch.tensor([[expert, layer, 7] for expert in mine], dtype=torch.uint8),
            ]
            for layer in range(LAYERS)
        ]
        self.buffer = [torch.zeros_like(tensor) for tensor in self.weights[0]]
        self.rank = rank


def connect(
    ranks: Sequence[Rank], transports: Sequence[Transport], deadline: float = 60.0
) -> list[TransportCommunicator | BaseException]:
    """Each rank's communicator, or what its constructor raised."""
    members = LocalAgreement.group(RANKS)

    def make(rank: int) -> TransportCommunicator:
        def gather(own: Any) -> list[Any]:
            return [pickle.loads(blob) for blob in members[rank].gather(pickle.dumps(own))]

        return TransportCommunicator(
            transports[rank],
            ranks[rank].weights,
            ranks[rank].buffer,
            rank=rank,
            gather=gather,
            barrier=lambda fine: all(gather(fine)),
            deadline=deadline,
        )

    return on_threads([partial(make, rank) for rank in range(RANKS)])


class Late(DeferredCopy):
    """Is done the second time it is asked."""

    def poll(self, ticket: Any) -> Any:
        status = super().poll(ticket)
        self.complete()
        return status


def connected(kind: type[Any], deadline: float = 60.0) -> tuple[list[Rank], list[Any], list[Any]]:
    ranks, transports = [Rank(rank) for rank in range(RANKS)], [kind() for _ in range(RANKS)]
    return ranks, transports, connect(ranks, transports, deadline)


def test_experts_land_in_the_rows_that_were_asked_for() -> None:
    ranks, _, made = connected(LocalCopy)
    # Of layer 1: rank 0 wants expert 4 in row 1, rank 1 expert 1 in row 0 and expert 0 of rank 2 in row 1, rank 2 none.
    asked = {0: [(4, 2, 1)], 1: [(1, 0, 0), (0, 2, 1)], 2: []}

    def move(rank: int) -> None:
        made[rank].set_stream(None)
        made[rank].set_transfer_context(OLD, 1)
        made[rank].add_send(ranks[rank].weights[1], 0, 0)
        for expert, source, row in asked[rank]:
            made[rank].add_recv([tensor[row] for tensor in ranks[rank].buffer], source, expert)
        made[rank].execute()

    on_ranks(move, RANKS)
    for rank, wants in asked.items():
        for expert, _, row in wants:
            assert torch.equal(ranks[rank].buffer[0][row], expected(1, expert))
            assert ranks[rank].buffer[1][row].tolist() == [expert, 1, 7]
    assert not ranks[0].buffer[0][0].any()
    assert not ranks[2].buffer[0].any()
    on_ranks(move, RANKS)  # and again: nothing of the last time is left


def test_a_read_that_takes_its_time_is_waited_for() -> None:
    ranks, _, made = connected(Late)

    def move(rank: int) -> None:
        made[rank].set_transfer_context(OLD, 0)
        if rank != 1:
            made[rank].add_recv([tensor[0] for tensor in ranks[rank].buffer], 1, 3)
        made[rank].execute()

    on_ranks(move, RANKS)
    assert torch.equal(ranks[0].buffer[0][0], expected(0, 3))


def test_a_read_that_does_not_end_is_given_up_on_by_name() -> None:
    ranks, _, made = connected(DeferredCopy, deadline=0.0)
    assert fails_on_rank_0(ranks, made)[0] == "a read from rank 1 took more than 0 s"


def fails_on_rank_0(ranks: Sequence[Rank], made: Sequence[TransportCommunicator]) -> list[str]:
    """What ranks say when one of them reads from rank 1 and cannot; nobody goes on to install the layer."""
    made[0].set_transfer_context(OLD, 0)
    made[0].add_recv([tensor[0] for tensor in ranks[0].buffer], 1, 3)

    def execute(rank: int) -> str:
        with pytest.raises(TransportError) as raised:
            made[rank].execute()
        return str(raised.value)

    said = on_ranks(execute, RANKS)
    assert all("failed on another rank" in each for each in said[1:])
    return said


def test_nothing_is_read_while_a_read_that_was_given_up_on_may_still_write_to_the_buffer() -> None:
    """Those from other ranks than the one that failed are given up on too."""
    ranks, transports, made = connected(DeferredCopy, deadline=0.0)
    made[0].set_transfer_context(OLD, 0)
    made[0].add_recv([tensor[1] for tensor in ranks[0].buffer], 2, 4)
    assert fails_on_rank_0(ranks, made)[0] == "a read from rank 1 took more than 0 s"
    assert transports[0].waiting == 2
    reason = "an abandoned read from rank 1 may still write to this rank's buffer"
    assert fails_on_rank_0(ranks, made)[0] == reason
    assert transports[0].waiting == 2
    assert transports[0].complete(1) == 1
    assert fails_on_rank_0(ranks, made)[0] == reason.replace("1", "2")
    assert transports[0].complete() == 1
    assert fails_on_rank_0(ranks, made)[0] == "a read from rank 1 took more than 0 s"


def test_a_peer_that_is_gone_is_named() -> None:
    ranks, transports, made = connected(LocalCopy)
    transports[1].close()
    assert "rank 1" in fails_on_rank_0(ranks, made)[0]


def test_a_rank_that_cannot_be_registered_is_named_on_the_others_which_do_not_wait_for_it() -> None:
    ranks = [Rank(rank) for rank in range(RANKS)]
    ranks[1].weights[0][0] = ranks[1].weights[0][0].t()
    answers = connect(ranks, [LocalCopy() for _ in range(RANKS)])
    reason = "tensor 0 (shape [4, 2]) must be contiguous, slots first"
    assert [type(answer).__name__ for answer in answers] == ["_PeerError", "ValueError", "_PeerError"]
    assert [str(answer) for answer in answers] == [f"rank 1: {reason}", reason, f"rank 1: {reason}"]


def test_tensors_that_do_not_fit_raise() -> None:
    rank = Rank(0)
    strided = [[tensor.t() for tensor in layer] for layer in rank.weights]
    alone: dict[str, Any] = {"rank": 0, "gather": lambda own: [own], "barrier": bool}
    with pytest.raises(ValueError, match=r"tensor 0 \(shape \[4, 2\]\) must be contiguous"):
        TransportCommunicator(LocalCopy(), strided, rank.buffer, **alone)
    alone["gather"] = lambda own: [own, (b"", 5, own[2], "")]
    with pytest.raises(ValueError, match=r"rank 1 \(=5 slots\) must have tensors as this rank \(=2 slots\)"):
        TransportCommunicator(LocalCopy(), rank.weights, rank.buffer, **alone)


def test_it_is_made_by_name_for_the_ranks_of_a_group(tmp_path: Path) -> None:
    rank = Rank(0)
    with group_of_one(tmp_path) as alone:
        made = create("shared_memory", alone, rank.weights, rank.buffer)
        made.set_transfer_context(OLD[:SLOTS], 0)
        made.execute()
    assert made.needs_profile_buffer_reservation is False


def test_what_one_rank_cannot_do_is_said_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(0)
    strided = [[tensor.t() for tensor in layer] for layer in rank.weights]
    for module in ("nixl", "nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, module, None)
    with group_of_one(tmp_path) as alone:
        with pytest.raises(TransportError, match="rank 0: TransportError: NIXL cannot be imported"):
            create("nixl", alone, rank.weights, rank.buffer)
        with pytest.raises(TransportError, match=r"rank 0: ValueError: tensor 0 \(shape \[4, 2\]\) must be contiguous"):
            create("shared_memory", alone, strided, rank.buffer)


def test_a_read_of_what_no_map_names_is_refused_with_words() -> None:
    """FD7: it was a bare IndexError, or a KeyError."""
    _, _, made = connected(LocalCopy)
    with pytest.raises(TransportError, match=r"`expert_id` \(=1\) must be on rank 0 by the map .* \(of 0 ranks\)"):
        made[1].add_recv([], 0, 1)
    made[1].set_transfer_context(OLD, 1)
    for source, expert in ((0, 2), (3, 0), (-1, 4)):
        with pytest.raises(
            TransportError, match=r"must be on rank .* \(of 3 ranks\); call it before `add_recv`"
        ) as error:
            made[1].add_recv([], source, expert)
        assert error.value.rank == source
