"""SGLang's rebalance by a `Migrator`: experts move while it serves, and its maps change with them, layer by layer.

Nothing of SGLang is imported here. Its metadata has a row for every layer of the model, dense ones too; a Migrator
moves those that have experts. All ranks run the same passes, so all are in the same migration.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from eplb_core._arrays import ArrayLike, IntArray
from eplb_core.adapters import hooking
from eplb_core.adapters.sglang.maps import Picks, layout_of, static_table
from eplb_core.adapters.vllm.maps import fold_window
from eplb_core.dispatch.even import even_dispatch_table
from eplb_core.errors import EplbError, MigrationError
from eplb_core.exposition import Sample, watch
from eplb_core.layout import ExpertLayout, layer_rows
from eplb_core.loading.agreement import Agreement, GroupAgreement
from eplb_core.loading.moves.migrator import Migrator
from eplb_core.loading.moves.recorder import MoveRecord
from eplb_core.loading.store import ExpertStore
from eplb_core.loading.transport import Transport

TRANSPORTS = {
    "torch_distributed": "TorchDistributed",
    "shared_memory": "SharedMemory",
    "cuda_ipc": "CudaIpc",
    "nixl": "Nixl",
    "mooncake": "Mooncake",
}
# Causes of a migration's end after which the engine's own rebalance takes over: ours would fail the same way again.
FOR_THE_ENGINE = ("failed", "plan", "backup", "agreement")
# Causes after which it takes over at the third time in a row. Others, such as a pause of all passes, never count.
IN_A_ROW, TRIES = ("read", "peer"), 3


def make_transport(name: str, group: Any, device: torch.device) -> Transport:
    """A transport by its option's name; `group` is a gloo group of its own, for the one that needs one.

    Raises:
        TransportError: It cannot work here; the text names what to install.
    """
    from eplb_core.loading import transports

    if name == "torch_distributed":
        index = None if device.type == "cpu" else torch.cuda.current_device()
        return transports.TorchDistributed(group, device=index)
    made: Transport = getattr(transports, TRANSPORTS[name])()
    return made


def stores_of(weights: Mapping[int, Sequence[torch.Tensor]]) -> tuple[list[int], list[ExpertStore]]:
    """The layers that have experts, ascending, and what each of them keeps by slot.

    Raises:
        ValueError: No layer has any, or their tensors cannot be moved by slot.
    """
    layers = sorted(weights.keys())  # the engine's own object has no iterator
    if not layers:
        raise ValueError("the model has no `routed_experts_weights_of_layer`")
    return layers, [ExpertStore({str(i): tensor for i, tensor in enumerate(weights[layer])}) for layer in layers]


class LiveRows:
    """SGLang's maps as the tables of a Migrator: `install` writes layers' rows in place, on the current stream.

    Args:
        metadata: The metadata in use, whose maps keep their addresses.
        layers: Its row for each row of the Migrator's layout.
        picks: How this rank's static table is made; used where the metadata has one.
        window: The recorder's counts by slot, `[passes, L, P]`, or None: booked under the new map when a layer moves.
    """

    def __init__(
        self,
        metadata: Any,
        layers: Sequence[int],
        picks: Picks,
        window: Callable[[], torch.Tensor | None] = lambda: None,
    ) -> None:
        self._metadata, self._layers, self._picks, self._window = metadata, list(layers), picks, window
        self._aimed: tuple[IntArray, IntArray] | None = None

    def aim(self, target: ExpertLayout) -> None:
        """Draw the static table of the whole target, as SGLang does: its random picks continue from layer to layer.

        Called on a worker, before a migration installs anything.
        """
        if self._metadata.logical_to_rank_dispatch_physical_map is None:
            return
        p2l = self._metadata.physical_to_logical_map_cpu.long().numpy().copy()
        p2l[self._layers] = target.physical_to_logical_map
        table = static_table(ExpertLayout(p2l, target.num_experts, topology=target.topology), self._picks)
        self._aimed = target.physical_to_logical_map, table.numpy()[self._layers]

    def install(
        self, layout: ExpertLayout, *, layers: ArrayLike | None = None, shares: ArrayLike | None = None
    ) -> None:
        """Write the rows of these layers of the Migrator's layout; SGLang has no use for shares."""
        for row in layer_rows(range(layout.num_layers) if layers is None else layers, layout.num_layers).tolist():
            self._write(layout, row)

    def _write(self, layout: ExpertLayout, row: int) -> None:
        live, layer = self._metadata, self._layers[row]
        alone = ExpertLayout(layout.physical_to_logical_map[[row]], layout.num_experts, topology=layout.topology)
        before = live.physical_to_logical_map[layer].clone()
        for p2l in (live.physical_to_logical_map_cpu, live.physical_to_logical_map):
            _write(p2l[layer], alone.physical_to_logical_map[0])
        lists = alone.logical_to_physical_map[0]
        for l2p in (live.logical_to_all_physical_map_cpu[layer], live.logical_to_all_physical_map[layer]):
            l2p[:, lists.shape[1] :] = -1
            _write(l2p[:, : lists.shape[1]], lists)
        _write(live.logical_to_all_physical_map_num_valid[layer], alone.replica_count[0])
        static = live.logical_to_rank_dispatch_physical_map
        if static is not None:
            _write(static[layer], self._picks_of(alone, row))
        window = self._window()
        if window is not None:
            fold_window(window[:, layer], before, live.physical_to_logical_map[layer])

    def _picks_of(self, alone: ExpertLayout, row: int) -> IntArray:
        """This rank's slot of each expert, `[E]`; a row on the way to the target has even picks."""
        if self._aimed is not None and np.array_equal(self._aimed[0][row], alone.physical_to_logical_map[0]):
            return np.array(self._aimed[1][row])
        return np.array(even_dispatch_table(alone)[self._picks.rank, 0])


def _write(target: torch.Tensor, values: IntArray) -> None:
    """Copy into `target`; to a GPU from pinned memory, so that the host does not wait."""
    tensor = torch.from_numpy(np.array(values))
    if target.device.type == "cuda":
        tensor = tensor.pin_memory()
    target.copy_(tensor, non_blocking=True)


class Moves:
    """The moves of one model: a Migrator over its experts, SGLang's maps in step with it.

    The constructor is collective. `rebalance` is a generator of passes, as SGLang's own is.

    Args:
        metadata: The metadata in use.
        weights: The experts' tensors `[slots, ...]` of each layer, as the model gives them at any time.
        picks: How this rank's static table is made; its `rank` is this rank.
        num_nodes: Nodes of the ranks.
        transport: How ranks read each other's experts.
        agreement: Of all ranks; nobody else uses it.
        record: Keeper of the layout of shared weights, or None.
        window: As `LiveRows`.
        in_use: The tensors that the model computes with at any time: some models give `weights` that keep their first
            tensors for good.
        deadline: Seconds without progress after which a migration is given up.

    Raises:
        EplbError: Ranks do not fit each other; on every rank.
        ValueError: This rank's weights cannot be moved by slot.
    """

    def __init__(
        self,
        metadata: Any,
        weights: Callable[[], Mapping[int, Sequence[torch.Tensor]]],
        picks: Picks,
        *,
        num_nodes: int,
        transport: Transport,
        agreement: Agreement,
        record: Any = None,
        window: Callable[[], torch.Tensor | None] = lambda: None,
        in_use: Callable[[], Iterable[torch.Tensor]] = lambda: (),
        deadline: float = 60.0,
    ) -> None:
        self._weights, self._agreement, self._transport, self._in_use = weights, agreement, transport, in_use
        self.layers, self._stores = stores_of(weights())
        self._were_in_use = self._are_in_use()
        self.rows = LiveRows(metadata, self.layers, picks, window)
        whole = layout_of(metadata, num_nodes=num_nodes)
        kept = None if record is None else RowsRecord(record, whole, self.layers)
        self.migrator = Migrator(
            self._stores,
            layout_of(metadata, self.layers, num_nodes=num_nodes),
            rank=picks.rank,
            transport=transport,
            agreement=agreement,
            tables=self.rows,
            record=kept,
            deadline=deadline,
        )
        self.slot_bytes = self._stores[0].slot_bytes
        self.over = ""
        """Why the engine's own rebalance took over; empty before. Set on all ranks or on none; its words may differ."""
        self.disagreed = False
        """Whether ranks have ever computed different maps; the same on every rank."""
        self._target: ExpertLayout | None = None
        self._trouble = ""
        self._failures = 0
        watch(self, gauges=_gauges)

    @property
    def off(self) -> str:
        """Why nobody may move experts any more, the engine included; or empty."""
        return self.migrator.status.off

    def rebalance(self, place: Callable[[], ArrayLike | torch.Tensor]) -> Generator[None, None, str]:
        """A migration, one step of the generator a pass; every rank begins it in the same pass.

        Args:
            place: Gives the map to reach, `[L, P]`, a row for each layer of the metadata, the same on every rank. Runs
                on a worker thread.

        Returns:
            Why it ended early, or nothing.
        """
        yield from self._passes()  # of one that the engine forgot
        self._target, self._trouble = None, ""
        if self.over or not self.migrator.start(lambda live: self._aim(place, live)):
            return self.over or self.off
        yield from self._passes()
        return self._conclude()

    def _aim(self, place: Callable[[], ArrayLike | torch.Tensor], live: ExpertLayout) -> ExpertLayout:
        try:
            p2l = torch.as_tensor(place()).cpu()[self.layers]
            self._target = ExpertLayout(p2l, live.num_experts, topology=live.topology)
            self.rows.aim(self._target)
        except Exception as error:
            self._trouble = hooking.words(error)
            raise
        return self._target

    def _passes(self) -> Generator[None, None, None]:
        while not self.migrator.idle and self.migrator.status.phase in ("planning", "moving"):
            before = self.migrator.layout
            try:
                self.migrator.poll()
            except Exception as error:
                if isinstance(error, MigrationError) or self.migrator.layout is before:
                    raise  # others may have installed what this rank has not: a pass would send tokens to other experts
                hooking.log_once(f"moves: the maps are written again, since {hooking.words(error)}")
                self.rows.install(self.migrator.layout)
            if not self.migrator.idle:
                yield

    def _conclude(self) -> str:
        status = self.migrator.status
        if status.cause == "disagree":
            self.disagreed = True
            self._say_who_differs()
        elif status.cause in FOR_THE_ENGINE or self._failed_again(status.cause):
            self.close(f"{status.reason}{f' ({self._trouble})' if self._trouble else ''}")
            hooking.log_once(f"moves: SGLang's own rebalance goes on from the next interval, since {self.over}")
        elif status.cause:
            hooking.log_once(f"moves: a migration ended after {status.installed} steps: {status.reason}")
        return status.reason if status.cause else ""

    def _failed_again(self, cause: str) -> bool:
        self._failures = self._failures + 1 if cause in IN_A_ROW else 0
        return self._failures == TRIES

    def _say_who_differs(self) -> None:
        own = hooking.Said("" if self._target is None else self._target.digest, hooking.failure_of("placement"))
        told = hooking.gather_by(self._agreement)(own)
        hooking.log_once(hooking.who_differs("placement", told, "nothing moves, and SGLang's own algorithm places"))

    def before_weights(self) -> None:
        """Before the engine writes into experts; every rank, in the same pass."""
        if not self.over:
            self.migrator.pause()

    def after_weights(self) -> None:
        """After that: goes on, unless some rank's tensors are elsewhere now. Every rank."""
        if self.over:
            return
        try:
            addresses = [store.addresses.tolist() for store in stores_of(self._weights())[1]]
            moved = addresses != [store.addresses.tolist() for store in self._stores]
            moved = moved or (self._were_in_use and not self._are_in_use())
        except Exception:
            moved = True
        told = self._agreement.gather(b"moved" if moved else b"")
        if any(told):
            self.close(f"rank {[bool(each) for each in told].index(True)} has its experts in other tensors now")
            hooking.log_once(f"moves: SGLang's own rebalance goes on, since {self.over}")
        else:
            self.migrator.resume()

    def _are_in_use(self) -> bool:
        """Whether each tensor of the stores is one that the model computes with."""
        used = {tensor.data_ptr() for tensor in self._in_use()}
        return all(used.issuperset(store.addresses[0].tolist()) for store in self._stores)

    def close(self, reason: str, deadline: float = 5.0) -> bool:
        """End for good; every rank. False if a read may still write to staging."""
        self.over = self.over or reason
        return self.migrator.stop(deadline)


def _gauges(moves: Moves) -> list[Sample]:
    """For operators; the engine's own rebalance may go on without."""
    return [Sample("eplb_moves_off", 1, moves.migrator.rank)] if moves.over else []


class RowsRecord:
    """A record of all layers' rows, for a Migrator that has the layers with experts alone; see `MoveRecord`.

    Args:
        record: The keeper, as `LayoutClient` reaches it.
        layout: What all layers' slots hold now.
        layers: Rows of `layout` for each row of the Migrator's.
    """

    def __init__(self, record: MoveRecord, layout: ExpertLayout, layers: Sequence[int]) -> None:
        self._record, self._layout, self._layers = record, layout, list(layers)

    @property
    def adopted(self) -> int:
        """Version that the weights are in."""
        return self._record.adopted

    def begin(self, layers: Any, version: int) -> Any:
        """Ask to move."""
        return self._record.begin(self._of(layers), version)

    def commit(self, layers: Any, rows: ArrayLike) -> Any:
        """Say that it is done; the reply's digest is that of the Migrator's rows if the record has what they are."""
        where = self._of(layers)
        p2l = np.array(self._layout.physical_to_logical_map)
        p2l[where] = np.asarray(rows)
        self._layout = ExpertLayout(p2l, self._layout.num_experts, topology=self._layout.topology)
        reply = self._record.commit(where, rows)
        if reply.status == "ok" and reply.digest == self._layout.digest:
            part = ExpertLayout(p2l[self._layers], self._layout.num_experts, topology=self._layout.topology)
            return reply._replace(digest=part.digest)
        return reply

    def abort(self, layers: Any) -> Any:
        """Nothing was changed."""
        return self._record.abort(self._of(layers))

    def refuse_moves(self, reason: str) -> None:
        """No more moves."""
        self._record.refuse_moves(reason)

    def _of(self, layers: Any) -> list[int]:
        return [self._layers[row] for row in layers]


def open_moves(
    metadata: Any,
    weights: Callable[[], Mapping[int, Sequence[torch.Tensor]]],
    picks: Picks,
    *,
    transport: str,
    facts: Mapping[str, Any],
    num_nodes: int,
    trouble: Exception | None = None,
    patience: float = 600.0,
    **more: Any,
) -> Moves:
    """Make the moves over all processes of torch's default group, which are the EP ranks; collective.

    Args:
        metadata: As `Moves`.
        weights: As `Moves`.
        picks: As `Moves`.
        transport: Its name among `TRANSPORTS`.
        facts: What must be equal on all ranks, by name.
        num_nodes: As `Moves`.
        trouble: Error for which this rank cannot make them; the other ranks are told.
        patience: Seconds to wait for a rank, which may still be compiling.
        more: Passed on to `Moves`: `record`, `window`, `in_use`.

    Raises:
        EplbError: Some rank cannot, or differs; on every rank.
    """
    import torch.distributed as dist

    # Named by their members: a process that makes no such groups does not shift the numbers of the engine's own.
    groups = [
        dist.new_group(backend="gloo", timeout=timedelta(seconds=patience), use_local_synchronization=True)
        for _ in range(3)
    ]
    gather = hooking.gather_objects(groups[0])

    def open_transport() -> Transport:
        if trouble is not None:
            raise trouble
        device = stores_of(weights())[1][0].device
        layout_of(metadata, num_nodes=num_nodes)
        return make_transport(transport, groups[2], device)

    def make() -> Moves:
        agreement = GroupAgreement(groups[1], patience)
        return Moves(metadata, weights, picks, num_nodes=num_nodes, transport=reader, agreement=agreement, **more)

    try:
        check_equal(gather(dict(facts)))
        reader = hooking.on_all_or_none(gather, open_transport, close=lambda reader: reader.close())
        try:
            return hooking.on_all_or_none(gather, make, close=lambda moves: moves.migrator.stop(5.0, alone=True))
        except EplbError:
            reader.close()
            raise
    except EplbError:  # on every rank
        for group in groups:
            dist.destroy_process_group(group)
        raise


def check_equal(facts: Sequence[Mapping[str, Any]]) -> None:
    """Raise EplbError naming the first fact in which a rank differs from rank 0, by rank."""
    for rank, each in enumerate(facts):
        for name in {**facts[0], **each}:
            if each.get(name) != facts[0].get(name):
                raise EplbError(
                    f"{name} of rank {rank} (={each.get(name)}) must be as on rank 0 (={facts[0].get(name)}); "
                    f"{hooking.SAME}"
                )
