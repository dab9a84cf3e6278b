"""Keep one rank's weights in memory, so that engines restart without reading them again.

The host loads by the engine's own function, post-processing included, shares every tensor without a copy, and serves
the layout record of the slots. Engines map the same bytes (`attach_weights`). The memory lives as long as the host or
any engine maps it.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TypeAlias

import torch

from eplb_core._arrays import check_int
from eplb_core._text import plain
from eplb_core.layout import ExpertLayout
from eplb_core.loading.modules import NamedTensor, module_tensors
from eplb_core.loading.record.file import load_record
from eplb_core.loading.record.record import LayoutRecord
from eplb_core.loading.record.server import LayoutServer
from eplb_core.loading.record.socket_path import SocketPlace
from eplb_core.loading.record.state import RecordState
from eplb_core.loading.record.wire import Message
from eplb_core.loading.sharing.memory import SharedMemory, total_bytes

log = logging.getLogger("eplb_core")

Loader: TypeAlias = Callable[[ExpertLayout | None, int], "Mapping[str, torch.Tensor] | torch.nn.Module"]


class WeightHost(AbstractContextManager["WeightHost"]):
    """Load a rank's weights once and share them until `close`, with the record of their layout.

    The constructor claims the path before it loads anything, so a second host fails at once. Engines can connect only
    after the weights are complete (`LayoutClient(wait=)` waits for that).

    Args:
        path: Where to listen; one path for each rank.
        load: `load(layout, rank)` gives the tensors by name, as the engine computes with them after its own
            post-processing, or the module that has them.
        config: Settings that determine the weights' bytes, as plain values (text, numbers, None, lists). An engine must
            pass an equal dict, or it is refused with the name of the field that differs. See `weight_config`.
        layout: What the slots hold after loading; None where experts never move: then there is no record.
        rank: EP rank that is loaded.
        state_file: File that always holds the record; after a restart of the host the log says which engines still
            keep the former memory.

    Raises:
        SocketInUseError: Another host is there. Raised before `load` is called.
        ValueError: A tensor that cannot be shared, `config` contradicts `layout` or `rank`, or `rank` is out of range.
        TypeError: `config` holds what JSON does not, or `load` gives neither tensors nor a module.

    Cost:
        What `load` takes, then one copy of all weights into shared memory; at its peak little more than the weights if
        `load` keeps none. After that the memory once, however many engines map it.

    Threads:
        One answers engines; the constructor returns when it does.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        load: Loader,
        *,
        config: Mapping[str, object],
        layout: ExpertLayout | None,
        rank: int,
        state_file: str | os.PathLike[str] | None = None,
    ) -> None:
        frame = frame_of(layout, rank)
        exports = _Exports(check_config(config, frame), frame)
        with ExitStack() as undo:
            place = SocketPlace(path, state_file)
            undo.callback(place.release)
            former = _former_engines(state_file)
            if former:
                log.warning(
                    "engines %s were attached to the former host of %s: its memory stays taken until they end",
                    ", ".join(map(repr, former)),
                    place.path,
                )
            self._memory = exports.memory = SharedMemory(_tensors_of(load(layout, rank)))
            undo.callback(self._memory.close)
            record = None if layout is None else LayoutRecord(layout)
            memory = secrets.token_hex(16)  # loaded anew, whatever a file says
            self._server = LayoutServer(
                path, record, exports=exports, state_file=state_file, memory=memory, place=place
            )
            undo.pop_all()
        log.info("%d tensors of rank %d, %d bytes, are ready at %s", self.num_tensors, rank, self.num_bytes, self.path)

    @property
    def path(self) -> str:
        """Where it listens."""
        return self._server.path

    @property
    def state(self) -> RecordState | None:
        """What the record knows now; None without one."""
        return self._server.state

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, shared storages once."""
        return total_bytes(self._memory.description)

    @property
    def num_tensors(self) -> int:
        """Tensors that it shares."""
        return len(self._memory.description["tensors"])

    def close(self) -> None:
        """Stop; engines keep what they have mapped. Idempotent."""
        self._server.close()
        self._memory.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def weight_config(
    *,
    model: str,
    dtype: str,
    quantization: str | None,
    tp_size: int,
    tp_rank: int,
    dp_size: int,
    ep_size: int,
    ep_rank: int,
    node_rank: int,
    num_redundant_experts: int,
    initial_layout: str,
    algorithm: str | None,
    seed: int,
    **more: object,
) -> dict[str, object]:
    """Collect everything that is known to shape weights and layout; nothing has a default that could be forgotten.

    Args:
        model: Path or name, with the revision.
        dtype: Of the activations and of unquantized weights.
        quantization: Method and a digest of its settings, or None.
        tp_size: Tensor parallel size.
        tp_rank: Rank in it.
        dp_size: Data parallel size.
        ep_size: Expert parallel size R.
        ep_rank: Rank in it.
        node_rank: Number of the node.
        num_redundant_experts: P - E.
        initial_layout: How the first layout is made: its name or digest.
        algorithm: Placement algorithm, if the first layout depends on it.
        seed: Of everything random in loading.
        more: What else this engine's weights depend on, such as the kernels whose order of bytes they have.
    """
    given = dict(locals())
    return {**given.pop("more"), **given}


def frame_of(layout: ExpertLayout | None, rank: int | None) -> dict[str, int]:
    """Fields of a configuration that follow from the layout and the rank."""
    frame = {}
    if layout is not None:
        frame = {
            "ep_size": layout.topology.num_ranks,
            "num_layers": layout.num_layers,
            "num_slots": layout.num_slots,
            "num_experts": layout.num_experts,
            "num_redundant_experts": layout.num_slots - layout.num_experts,
        }
    if rank is not None:
        frame["ep_rank"] = check_int(rank, "rank", 0)
        if layout is not None and rank >= layout.topology.num_ranks:
            raise ValueError(f"`rank` (={rank}) must be below the layout's {layout.topology.num_ranks} ranks")
    return frame


def check_config(config: Mapping[str, object], frame: Mapping[str, int]) -> dict[str, object]:
    """Convert the configuration to plain JSON values.

    Raises:
        TypeError: A value that JSON does not have, or a name that is no text.
        ValueError: It says something else than the layout or the rank.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"`config` (={type(config).__name__}) must be a mapping of names to plain values")
    checked: dict[str, object] = {}
    for name, value in config.items():
        if not isinstance(name, str):
            raise TypeError(f"`config` has the name {name!r}; names must be text")
        try:
            checked[name] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(
                f"`config[{name!r}]` (={type(value).__name__}) must be text, a number, None or a list"
            ) from error
        if name in frame and checked[name] is not None and checked[name] != frame[name]:
            raise ValueError(f"`config[{name!r}]` (={value!r}) must be {frame[name]}, as layout and rank have it")
    return checked


class _Exports:
    """What a host's server answers to `fetch`."""

    memory: SharedMemory

    def __init__(self, config: dict[str, object], frame: dict[str, int]) -> None:
        self._config, self._frame = config, frame

    def difference(self, config: Mapping[str, object], frame: Mapping[str, object]) -> tuple[str, str] | None:
        for name in sorted({*self._config, *config}):
            mine, theirs = (
                json.dumps(each[name], sort_keys=True) if name in each else "nothing" for each in (self._config, config)
            )
            if mine != theirs:
                return name, f"`{name}` differs: the host says {mine[:80]}, the engine {theirs[:80]}; load from disk"
        for name, value in self._frame.items():
            other = frame.get(name, value)
            if other != value:
                return name, f"`{name}` differs: the host has {value}, the engine {plain(other, 20)}; load from disk"
        return None

    def about(self) -> Message:
        description = self.memory.description
        tensors, nbytes = len(description["tensors"]), total_bytes(description)
        return {"tensors": tensors, "bytes": nbytes, "config": self._config, "frame": self._frame}

    def export(self) -> tuple[Message, Sequence[int]]:
        return self.memory.description, self.memory.fds


def _tensors_of(loaded: object) -> list[NamedTensor]:
    if isinstance(loaded, torch.nn.Module):
        return module_tensors(loaded)
    if not isinstance(loaded, Mapping) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise TypeError(f"`load` gave {type(loaded).__name__}; it must give a module, or tensors by name")
    return [NamedTensor(str(name), "tensor", tensor.detach()) for name, tensor in loaded.items()]


def _former_engines(state_file: str | os.PathLike[str] | None) -> tuple[str, ...]:
    if state_file is None or not os.path.exists(state_file):
        return ()
    try:
        return load_record(state_file)[0].engines
    except (OSError, ValueError) as error:
        log.warning("%s does not say which engines keep a former host's memory: %s", os.fspath(state_file), error)
        return ()
