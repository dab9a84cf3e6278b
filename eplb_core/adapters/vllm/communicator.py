"""vLLM's expert transfers over this library's transports: one-sided reads from peers' live weights into its buffer.

The sender does nothing; all ranks wait for one another when a layer's reads are over, before anyone installs what it
read, since the weights that peers read from are written then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch

from eplb_core._arrays import ArrayLike, to_ids
from eplb_core.adapters.hooking import gather_objects, on_all_or_none
from eplb_core.errors import TransportError
from eplb_core.exposition import Sample, watch
from eplb_core.loading.transport import ReadBatch, ReadState, Region, Transport

TRANSPORTS = {"shared_memory": "SharedMemory", "cuda_ipc": "CudaIpc", "nixl": "Nixl"}
"""Classes of `eplb_core.transports` by the option's name."""


class TransportCommunicator:
    """What vLLM's `EplbCommunicator` must do, over a `Transport`.

    Args:
        transport: Reads; it must reach the weights' kind of memory.
        weights: Tensors `[slots, ...]` of each layer, contiguous; equally many and equally shaped on all ranks.
        buffer: Where a layer's experts land, one tensor for each of a layer's.
        rank: This rank.
        gather: Every rank's object, by rank; collective.
        barrier: Returns when all ranks have come to it: whether all of them said True.
        deadline: Seconds after which a read that has not ended is an error.

    Raises:
        TransportError: The memory cannot be registered, here or on another rank, or a peer is not reached.
        ValueError: A tensor is not contiguous, or ranks have different tensors.
    """

    needs_profile_buffer_reservation = False

    def __init__(
        self,
        transport: Transport,
        weights: Sequence[Sequence[torch.Tensor]],
        buffer: Sequence[torch.Tensor],
        *,
        rank: int,
        gather: Callable[[Any], Sequence[Any]],
        barrier: Callable[[bool], bool],
        deadline: float = 300.0,
    ) -> None:
        tensors = [tensor for layer in weights for tensor in layer]
        self._transport, self._rank, self._barrier, self._deadline = transport, rank, barrier, deadline
        self._buffer = list(buffer)
        self._each = len(self._buffer)
        self._first = len(tensors)
        self._slots = int(tensors[0].shape[0])
        self._stride = [tensor.nbytes // self._slots for tensor in tensors]
        self._stream: Any = None
        self._cuda = tensors[0].is_cuda
        blob, error = b"", None
        try:
            blob = _export(transport, [*tensors, *self._buffer])
        except Exception as failure:
            error = failure  # raised when the others, who wait for this rank's word, have it
        said = gather((blob, self._slots, self._stride, "" if error is None else str(error)))
        if error is not None:
            raise error
        for peer, (_, slots, stride, trouble) in enumerate(said):
            if trouble:
                raise _PeerError(f"rank {peer}: {trouble}", rank=peer)
            if (slots, stride) != (self._slots, self._stride):
                raise ValueError(f"rank {peer} (={slots} slots) must have tensors as this rank (={self._slots} slots)")
        for peer, (blob, _, _, _) in enumerate(said):
            if peer != rank:
                transport.connect(peer, blob)
        self._counts = _Counts(rank)
        watch(self, counters=self._counts.counters)
        self._layer = -1
        self._row_of: list[dict[int, int]] = []
        self._asked: dict[int, list[tuple[int, int, int, int, int]]] = {}
        self._given_up: list[tuple[int, Any]] = []
        """Peer and ticket of each abandoned read; the buffer is not safe before they have ended."""

    def set_stream(self, stream: Any) -> None:
        """The stream on which what was read is used."""
        self._stream = stream

    def set_transfer_context(self, old_indices: ArrayLike, layer_idx: int) -> None:
        """Which expert each slot of layer `layer_idx` holds before the move, `[P]`; -1 = none."""
        if self._cuda:  # pragma: no cover  needs a GPU
            # Copies out of the buffer may only be queued; the read would overtake them.
            torch.cuda.current_stream().synchronize()
            if self._stream is not None:
                self._stream.synchronize()
        self._given_up = [each for each in self._given_up if not self._transport.poll(each[1]).state.is_end]
        rows = to_ids(old_indices, "old_indices").reshape(-1, self._slots)
        self._layer = layer_idx
        self._row_of = [{expert: row for row, expert in enumerate(rank) if expert >= 0} for rank in rows.tolist()]

    def add_send(self, tensors: Sequence[torch.Tensor], dst_rank: int, expert_id: int) -> None:
        """Nothing: the receiver reads."""

    def add_recv(self, tensors: Sequence[torch.Tensor], src_rank: int, expert_id: int) -> None:
        """Note down a read of an expert into rows of the buffer; `execute` does it.

        Raises:
            TransportError: `set_transfer_context` was not called, or by its map `src_rank` does not hold the expert.
        """
        held = self._row_of[src_rank] if 0 <= src_rank < len(self._row_of) else {}
        row = held.get(int(expert_id))
        if row is None:
            raise TransportError(
                f"`expert_id` (={int(expert_id)}) must be on rank {src_rank} by the map of `set_transfer_context` (of "
                f"{len(self._row_of)} ranks); call it before `add_recv`, for each layer",
                rank=src_rank,
            )
        for number, tensor in enumerate(tensors):
            source = self._layer * self._each + number
            nbytes = self._stride[source]
            offset = tensor.data_ptr() - self._buffer[number].data_ptr()
            self._asked.setdefault(src_rank, []).append((self._first + number, offset, source, row * nbytes, nbytes))

    def execute(self) -> None:
        """Read all that was noted down; returns when every rank's reads are over.

        Raises:
            TransportError: A read failed or took too long, here or on another rank: on every rank, so that nobody
                installs a layer that another could not read.
        """
        try:
            self._read()
        except Exception:
            self._barrier(False)
            raise
        if not self._barrier(True):
            raise TransportError(f"reads of layer {self._layer} failed on another rank; its log says why")

    def _read(self) -> None:
        asked, self._asked = self._asked, {}
        began = time.monotonic()
        if self._given_up:
            peer = self._given_up[0][0]
            raise TransportError(f"an abandoned read from rank {peer} may still write to this rank's buffer", rank=peer)
        tickets: list[tuple[int, Any]] = []
        most = self._transport.caps.max_batch
        try:
            for peer in sorted(asked):
                for start in range(0, len(asked[peer]), most):
                    columns = np.array(asked[peer][start : start + most], dtype=np.int64).T
                    tickets.append((peer, self._transport.read(peer, ReadBatch(*map(np.ascontiguousarray, columns)))))
            end = time.monotonic() + self._deadline
            for peer, ticket in tickets:
                self._wait(peer, ticket, end)
            self._counts.read_bytes += sum(nbytes for reads in asked.values() for *_, nbytes in reads)
        except BaseException:
            self._given_up = tickets
            for _, ticket in tickets:
                self._transport.abandon(ticket)
            raise
        finally:
            self._counts.read_s += time.monotonic() - began if asked else 0.0

    def _wait(self, peer: int, ticket: Any, end: float) -> None:
        while True:
            status = self._transport.poll(ticket)
            if status.state is ReadState.DONE:
                return
            if status.state is not ReadState.PENDING:
                raise TransportError(
                    f"a read from rank {peer} ended as {status.state.name}: {status.reason}", rank=peer
                )
            if time.monotonic() > end:
                raise TransportError(f"a read from rank {peer} took more than {self._deadline:g} s", rank=peer)
            time.sleep(0.0002)


class _Counts:
    """What this rank read, for operators."""

    def __init__(self, rank: int) -> None:
        self.rank, self.read_bytes, self.read_s = rank, 0, 0.0

    def counters(self) -> list[Sample]:
        """For `exposition.watch`."""
        return [
            Sample("eplb_read_bytes_total", self.read_bytes, self.rank),
            Sample("eplb_read_seconds_total", self.read_s, self.rank),
        ]


class _PeerError(TransportError):
    """Another rank failed, and says so itself."""


def _export(transport: Transport, tensors: Sequence[torch.Tensor]) -> bytes:
    for number, tensor in enumerate(tensors):
        if not tensor.is_contiguous():
            raise ValueError(f"tensor {number} (shape {list(tensor.shape)}) must be contiguous, slots first")
    return transport.export([Region(tensor.data_ptr(), tensor.nbytes, str(tensor.device)) for tensor in tensors])


def create(
    name: str, cpu_group: Any, weights: Sequence[Sequence[torch.Tensor]], buffer: Sequence[torch.Tensor]
) -> TransportCommunicator:
    """Make the communicator over the transport `name` for the ranks of a torch group; collective.

    Raises:
        TransportError: Some rank cannot make it; raised on every rank, so that all continue in the same way.
    """
    import torch.distributed as dist

    from eplb_core.loading import transports

    def barrier(fine: bool) -> bool:
        flag = torch.tensor([fine], dtype=torch.int32, device="cpu")
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=cpu_group)
        return bool(flag[0])

    rank, gather = cpu_group.rank(), gather_objects(cpu_group)
    transport: Transport = on_all_or_none(
        gather, lambda: getattr(transports, TRANSPORTS[name])(), TransportError, close=lambda made: made.close()
    )

    def make() -> TransportCommunicator | None:
        try:
            return TransportCommunicator(transport, weights, buffer, rank=rank, gather=gather, barrier=barrier)
        except _PeerError:
            return None

    try:
        return cast(TransportCommunicator, on_all_or_none(gather, make, TransportError))
    except TransportError:  # this rank could perhaps, and keeps nothing registered for that
        transport.close()
        raise
