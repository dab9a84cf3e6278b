"""One rank's reads: what peers must know of each other, batches for a step, who may write to which staging row."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from eplb_core._arrays import IntArray, check_int
from eplb_core.errors import EplbError, MigrationError, TransportError
from eplb_core.layout import ExpertLayout
from eplb_core.loading._steps import Step
from eplb_core.loading.agreement import Agreement
from eplb_core.loading.install import Staging
from eplb_core.loading.pull_plan import READ, RESTORE
from eplb_core.loading.store import ExpertStore, check_stores
from eplb_core.loading.transport import ReadBatch, ReadState, Region, Transport

_FORMAT = 1


class Backup(Protocol):
    """Where experts come from when no rank that lives holds them; see `HostBackup`."""

    def fetch(self, layer: int, expert: int, rows: Sequence[Any]) -> None:
        """Fill uint8 tensors, one a tensor of the store, with an expert's bytes; raise KeyError if it is not there."""
        ...


class Trouble(Exception):
    """Why a step cannot be staged; the cause is one word that ranks can tell each other."""

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(reason)
        self.cause, self.reason = cause, reason


class _Hello(NamedTuple):
    """What a rank says of itself when it joins."""

    rank: int
    facts: dict[str, Any]
    """What must be equal on all ranks."""
    capacity: int
    places: IntArray
    """(region, offset) of every row that peers may read, int64 `[L, S, tensors, 2]`."""
    blob: bytes
    """For the transport."""


class Pull:
    """The reads of one step, under way."""

    __slots__ = ("begun", "bytes", "place_of", "tickets")

    def __init__(self, place_of: IntArray) -> None:
        self.place_of = place_of
        """Staging row of each local slot that is read or restored, int64 `[S]`, else -1."""
        self.tickets: list[tuple[Any, int, IntArray]] = []
        """(ticket, peer, staging rows)."""
        self.bytes = 0
        self.begun = time.monotonic()


class Puller:
    """Reads slots of peers into staging.

    Args:
        stores: One a layer.
        layout: What they hold.
        rank: This rank.
        transport: Moves bytes.
        agreement: Carries what ranks must know of each other; of all ranks, or of those that live.
        staging: Memory for incoming slots.
        facts: More that must be equal on all ranks.

    Raises:
        MigrationError: A rank has other stores, another layout or a transport that fails: on every rank, with the same
            text, and before a byte moves.

    Threads:
        The constructor on that of the agreement; all else on one worker.
    """

    def __init__(
        self,
        stores: Sequence[ExpertStore],
        layout: ExpertLayout,
        rank: int,
        transport: Transport,
        agreement: Agreement,
        staging: Staging,
        facts: dict[str, Any],
    ) -> None:
        self.stores, self.rank, self.transport, self.staging = stores, rank, transport, staging
        self._quarantined: list[tuple[Any, IntArray]] = []
        self._taken = np.zeros(staging.capacity, dtype=np.bool_)
        regions, places = regions_of(stores, staging)
        facts = {**facts, **_facts(stores, layout)}
        failure, blob = "", b""
        finish_writes(stores[0].device)
        try:
            blob = transport.export(regions)
        except EplbError as error:
            failure = f"rank {rank}: {error}"
        own = _encode(_Hello(rank, facts, staging.capacity, places, blob), failure)
        hellos = _check([_decode(other) for other in agreement.gather(own)], layout.topology.num_ranks)
        self.capacity = min(hello.capacity for hello in hellos)
        """Slots of staging that every rank has."""
        live = {hello.rank for hello in hellos}
        self.avoid_ranks = tuple(other for other in range(layout.topology.num_ranks) if other not in live)
        """Ranks that are no members of the agreement: nobody reads from them."""
        self._places = {hello.rank: hello.places for hello in hellos}
        self._blobs = {hello.rank: hello.blob for hello in hellos}
        self._lost_peers: set[int] = set()
        failure = ""
        try:
            for hello in hellos:
                transport.connect(hello.rank, hello.blob)
        except EplbError as error:
            failure = f"rank {rank}: {error}"
        _raise_if_any([other.decode() for other in agreement.gather(failure.encode())])

    # ---- reads -----------------------------------------------------------------------------------------------------

    def begin(self, step: Step, deadline: float, is_over: Callable[[], bool] = lambda: False) -> Pull:
        """Begin all reads of a step; waits up to `deadline` seconds for staging that reads given up on still own.

        Raises:
            Trouble: There was none, or a read was refused, or `is_over` while it waited.
        """
        arrives = np.flatnonzero((step.kind == READ) | (step.kind == RESTORE))
        rows = self._free_rows(len(arrives), deadline, is_over)
        place_of = np.full(len(step.kind), -1, dtype=np.int64)
        place_of[arrives] = rows
        pull = Pull(place_of)
        local = np.flatnonzero(step.kind == READ)
        source = step.source_slot[local]
        slots = len(step.kind)
        try:
            for peer in np.unique(source // slots).tolist():
                here = source // slots == peer
                self._read(pull, peer, step.layer, place_of[local[here]], source[here] % slots)
        except BaseException as error:
            self.give_up(pull)
            if isinstance(error, TransportError):
                raise Trouble("read", str(error)) from error
            raise
        return pull

    def _read(self, pull: Pull, peer: int, layer: int, rows: IntArray, slots: IntArray) -> None:
        if peer in self._lost_peers:  # it may have been the connection alone
            self.transport.connect(peer, self._blobs[peer])
            self._lost_peers.discard(peer)
        time.sleep(0)  # others may have the interpreter
        places = self._places[peer][layer, slots].reshape(-1, 2)
        nbytes = np.tile(self.stores[layer].row_bytes, len(rows))
        target = self.staging.offsets[rows].reshape(-1)
        most = self.transport.caps.max_batch
        for start in range(0, len(nbytes), most):
            part = slice(start, start + most)
            batch = ReadBatch(
                np.zeros(len(nbytes[part]), dtype=np.int64),
                target[part],
                places[part, 0],
                places[part, 1],
                nbytes[part],
            )
            time.sleep(0)
            pull.tickets.append((self.transport.read(peer, batch), peer, rows))
            self._taken[rows] = True  # not before: a read that is refused writes nothing
        pull.bytes += int(nbytes.sum())

    def is_done(self, pull: Pull) -> bool:
        """Whether all bytes are there; a read that failed raises `Trouble` and gives the others up."""
        done = True
        for ticket, peer, _ in pull.tickets:
            state, reason = self.transport.poll(ticket)
            if state is ReadState.PENDING:
                done = False
            elif state is not ReadState.DONE:
                self.give_up(pull)
                cause = "read"
                if state is ReadState.LOST_PEER:
                    cause = "peer"
                    self._lost_peers.add(peer)
                raise Trouble(cause, f"reading from rank {peer} ended as {state.name}: {reason}")
        return done

    def give_up(self, pull: Pull) -> None:
        """Abandon what has not ended. Staging rows that may still be written stay out of use until it has."""
        tickets, pull.tickets = pull.tickets, []
        self._quarantined += [(ticket, rows) for ticket, _, rows in tickets]
        for ticket, _, _ in tickets:
            with contextlib.suppress(Exception):  # it stays in quarantine until the transport says otherwise
                self.transport.abandon(ticket)

    def release(self, pull: Pull) -> None:
        """The staged bytes are not needed any more."""
        for _, _, rows in pull.tickets:
            self._taken[rows] = False
        pull.tickets = []

    def num_quarantined(self) -> int:
        """Staging rows that reads given up on may still write."""
        still = [(ticket, rows) for ticket, rows in self._quarantined if self._may_write(ticket)]
        for _, rows in self._quarantined:
            self._taken[rows] = False
        for _, rows in still:  # several reads may have shared a row
            self._taken[rows] = True
        self._quarantined = still
        return len({row for _, rows in still for row in rows.tolist()})

    def _may_write(self, ticket: Any) -> bool:
        try:
            return not self.transport.poll(ticket).state.is_end
        except Exception:  # nothing is known of it
            return True

    def drain(self, until: float) -> bool:
        """Wait until nothing can write to staging any more, at most until that time; whether it is so."""
        while self.num_quarantined():
            if time.monotonic() > until:
                return False
            time.sleep(POLL_S)
        return True

    def _free_rows(self, count: int, deadline: float, is_over: Callable[[], bool]) -> IntArray:
        until = time.monotonic() + deadline
        while True:
            held = self.num_quarantined()
            free = np.flatnonzero(~self._taken)
            if len(free) >= count:
                return free[:count]
            if is_over() or time.monotonic() > until:
                raise Trouble(
                    "deadline", f"{held} of {len(self._taken)} slots of staging are still owned by reads given up on"
                )
            time.sleep(POLL_S)


def finish_writes(device: torch.device) -> None:
    """Peers may read this rank's slots from now on: what was enqueued before has been written."""
    if device.type == "cuda":  # pragma: no cover
        torch.cuda.synchronize(device)


_WRITTEN: list[Puller] = []


def keep_while_written(puller: Puller) -> None:
    """Hold on to staging that reads given up on may still write, after the call that made it has ended."""
    _WRITTEN[:] = [other for other in (*_WRITTEN, puller) if other.num_quarantined()]


POLL_S = 0.0005
"""How long a worker sleeps between two looks at its reads."""


# ---- joining ---------------------------------------------------------------------------------------------------------


def regions_of(stores: Sequence[ExpertStore], staging: Staging) -> tuple[list[Region], IntArray]:
    """Staging as region 0, then the tensors of all layers; and where in them each row is, int64 `[L, S, tensors, 2]`.

    Rows that follow each other in memory are one region.
    """
    memory = staging.memory
    regions = [Region(memory.data_ptr(), memory.numel(), str(memory.device))]
    first = stores[0]
    places = np.empty((len(stores), first.num_slots, len(first.names), 2), dtype=np.int64)
    for layer, store in enumerate(stores):
        for tensor, size in enumerate(store.row_bytes.tolist()):
            starts = store.addresses[:, tensor]
            order = np.argsort(starts, kind="stable")
            begins = np.diff(starts[order], prepend=starts[order[0]] - size - 1) != size
            region = np.cumsum(begins) - 1
            base = starts[order][begins]
            places[layer, order, tensor, 0] = len(regions) + region
            places[layer, order, tensor, 1] = starts[order] - base[region]
            lengths = np.bincount(region) * size
            regions += [Region(*span, str(store.device)) for span in zip(base.tolist(), lengths.tolist(), strict=True)]
    return regions, places


def _facts(stores: Sequence[ExpertStore], layout: ExpertLayout) -> dict[str, Any]:
    first = stores[0]
    return {
        "format": _FORMAT,
        "experts": layout.num_experts,
        "layers, slots": list(layout.physical_to_logical_map.shape),
        "nodes of the ranks": layout.topology.rank_to_node.tolist(),
        "tensors": list(first.names),
        "bytes of a slot": [store.row_bytes.tolist() for store in stores],
        "whole tensors": list(first.whole_names),
        "bytes of their rows": [store.whole_row_bytes.tolist() for store in stores],
        "layout": layout.digest,
    }


def _encode(hello: _Hello, failure: str) -> bytes:
    head = {
        "rank": hello.rank,
        "facts": hello.facts,
        "capacity": hello.capacity,
        "places": list(hello.places.shape),
        "failure": failure,
    }
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + hello.places.astype("<i8").tobytes() + hello.blob


def _decode(blob: bytes) -> tuple[_Hello, str]:
    end = 8 + int.from_bytes(blob[:8], "little")
    head = json.loads(blob[8:end])
    shape = head["places"]
    size = 8 * int(np.prod(shape))
    places = np.frombuffer(blob[end : end + size], dtype="<i8").astype(np.int64).reshape(shape)
    return _Hello(head["rank"], head["facts"], head["capacity"], places, blob[end + size :]), head["failure"]


def _check(joined: list[tuple[_Hello, str]], num_ranks: int) -> list[_Hello]:
    """Every rank's own, if they fit; all ranks compare with the first and so raise the same."""
    _raise_if_any([failure for _, failure in joined])
    hellos = [hello for hello, _ in joined]
    ranks = [hello.rank for hello in hellos]
    if len(set(ranks)) < len(ranks) or max(ranks) >= num_ranks:
        raise MigrationError(f"`rank` (={ranks} by member) must be another one of {num_ranks} on each", reason="join")
    first = hellos[0]
    for hello in hellos[1:]:
        for what, value in first.facts.items():
            if hello.facts.get(what) != value:
                raise MigrationError(
                    f"{what} of rank {hello.rank} (={_short(hello.facts.get(what))}) must be as on rank {first.rank} "
                    f"(={_short(value)}); no weight was moved",
                    reason="join",
                    rank=hello.rank,
                )
    return hellos


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _raise_if_any(failures: Sequence[str]) -> None:
    told = [failure for failure in failures if failure]
    if told:
        more = f" ({len(told) - 1} more ranks)" if len(told) > 1 else ""
        raise MigrationError(f"no weight was moved: {told[0]}{more}", reason="join")


def check_frame(stores: Sequence[ExpertStore], layout: ExpertLayout, rank: int) -> list[ExpertStore]:
    """Raise ValueError or TypeError unless stores, layout and rank fit each other; the stores as a list."""
    stores = list(stores)
    if not isinstance(layout, ExpertLayout):
        raise TypeError(f"`layout` (={type(layout).__name__}) must be an ExpertLayout")
    if len(stores) != layout.num_layers or not stores:
        raise ValueError(f"`stores` has {len(stores)} layers and the layout {layout.num_layers}; give one a layer")
    check_stores(stores)
    for store in stores:
        store.check_fits(layout)
    check_int(rank, "rank", 0)
    if rank >= layout.topology.num_ranks:
        raise ValueError(f"`rank` (={rank}) must be in [0, {layout.topology.num_ranks})")
    return stores
