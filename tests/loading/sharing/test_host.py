"""Weights that outlive engines: mapped without a copy, under the layout that they are in, or not at all."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import re
import resource
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from eplb_core import (
    ExpertLayout,
    ExpertStore,
    HostAbsent,
    HostBusy,
    HostRefused,
    LayoutAgreementError,
    LayoutClient,
    LayoutRecord,
    LayoutServer,
    SlotResolver,
    SocketInUseError,
    WeightHost,
    agree_on_layout,
    attach_weights,
    fingerprints,
    verify_weights,
)
from eplb_core.loading.modules import NamedTensor, module_tensors
from eplb_core.loading.sharing.host import weight_config
from eplb_core.loading.sharing.memory import SharedMemory, map_tensors
from tests.loading.descriptors import no_descriptor_left
from tests.loading.engine_process import Engine, container, until
from tests.loading.record.keeper_process import LAYOUT, RANKS, ROW, keeper
from tests.loading.record.test_agree import on_all_ranks
from tests.loading.record.test_keeper import Weights
from tests.loading.worlds import on_threads

CONFIG: dict[str, Any] = {"model": "toy", "dtype": "float32", "seed": 7}
HIDDEN = 8


def expert_weight(layer: int, expert: int) -> torch.Tensor:
    return torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(100 * layer + expert))


def load(layout: ExpertLayout | None, rank: int) -> dict[str, torch.Tensor]:
    """What an engine's loader does: every slot of the rank gets its expert."""
    assert layout is not None
    resolver = SlotResolver(layout, rank)
    weights = {}
    for layer in range(layout.num_layers):
        weights[f"{layer}.w"] = torch.zeros(layout.slots_per_rank, HIDDEN, HIDDEN)
        for expert in range(layout.num_experts):
            for row in resolver.local_slots(layer, expert):
                weights[f"{layer}.w"][row] = expert_weight(layer, expert)
    return weights


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "host0")


def host(stack: ExitStack, path: str, rank: int = 0, **more: Any) -> WeightHost:
    arguments = {"config": CONFIG, "layout": LAYOUT, "rank": rank, **more}
    return stack.enter_context(WeightHost(path, arguments.pop("load", load), **arguments))


@pytest.fixture
def client(stack: ExitStack, path: str) -> LayoutClient:
    """Of a plain host."""
    host(stack, path)
    return stack.enter_context(LayoutClient(path, "a"))


def attach(client: LayoutClient | None, target: Any, **more: Any) -> Any:
    return attach_weights(client, target, **{"config": CONFIG, "layout": LAYOUT, **more})


def mapped(stack: ExitStack, client: LayoutClient, **more: Any) -> dict[str, torch.Tensor]:
    """What a host has, by name."""
    tensors: dict[str, torch.Tensor] = {}
    stack.callback(attach(client, tensors, **more).close)
    return tensors


def refused(client: LayoutClient, said: str, target: Any = None, **more: Any) -> str | None:
    """The field for which the host refuses."""
    with pytest.raises(HostRefused, match=said) as caught:
        attach(client, {} if target is None else target, **more)
    return caught.value.field


# ---- one engine of two ranks -----------------------------------------------------------------------------------------


class Serving:
    """An engine of both ranks in this process: agrees, maps, computes by its layout, and moves experts."""

    def __init__(self, stack: ExitStack, paths: list[str], name: str) -> None:
        self.clients = [stack.enter_context(LayoutClient(path, name)) for path in paths]
        agreed = on_all_ranks(lambda rank, agreement: self._start(rank, agreement))
        for each in agreed:
            if isinstance(each, Exception):
                raise each
        self.layout, self.version = agreed[0]
        self.ranks: list[dict[str, torch.Tensor]] = [{}, {}]
        for client, tensors in zip(self.clients, self.ranks, strict=True):
            stack.callback(attach(client, tensors, layout=self.layout).close)

    def _start(self, rank: int, agreement: Any) -> tuple[ExpertLayout, int]:
        return agree_on_layout(self.clients[rank], own=LAYOUT, agreement=agreement)

    def tokens(self) -> list[int]:
        """Greedy steps: each picks an expert, goes to its last replica, and the result picks the next."""
        state, picked = torch.linspace(-1, 1, HIDDEN), []
        for step in range(24):
            for layer in range(LAYOUT.num_layers):
                expert = int(state.argmax()) % LAYOUT.num_experts
                rank, row = divmod(self.layout.slots(layer, expert)[-1], LAYOUT.slots_per_rank)
                state = torch.tanh(self.ranks[rank][f"{layer}.w"][row] @ state + step)
            picked.append(int(state.argmin()))
        return picked

    def move(self, layer: int, row: list[int], *, writes: int = 6) -> list[Any]:
        """A whole move, or its first `writes` slots and no commit."""
        replies = [client.begin([layer], self.version) for client in self.clients]
        if any(reply.status != "ok" for reply in replies):
            for client, reply in zip(self.clients, replies, strict=True):
                if reply.status == "ok":
                    client.abort([layer])
            return replies
        for slot, expert in list(enumerate(row))[:writes]:
            self.ranks[slot // 3][f"{layer}.w"][slot % 3] = expert_weight(layer, expert)
        if writes < len(row):
            return replies
        p2l = self.layout.physical_to_logical_map.copy()
        p2l[layer] = row
        self.layout = ExpertLayout(p2l, 4, topology=RANKS)
        replies = [client.commit([layer], [row]) for client in self.clients]
        assert {reply.digest for reply in replies} == {self.layout.digest}
        self.version += 1
        return replies

    def leave(self) -> None:
        for client in self.clients:
            client.close()

    def verified(self) -> bool:
        stores = [[ExpertStore({"w": rank[f"{layer}.w"]}) for layer in range(2)] for rank in self.ranks]
        reference = verify_weights([fingerprints(loaded) for loaded in self.as_loaded()], LAYOUT).by_expert
        return verify_weights([fingerprints(rank) for rank in stores], self.layout, reference=reference).ok

    def as_loaded(self) -> list[list[ExpertStore]]:
        return [[ExpertStore({"w": tensor}) for tensor in load(LAYOUT, rank).values()] for rank in (0, 1)]


@pytest.fixture
def paths(stack: ExitStack, tmp_path: Path) -> list[str]:
    """Two hosts, one for each rank."""
    found = [str(tmp_path / f"host{rank}") for rank in (0, 1)]
    for rank, path in enumerate(found):
        host(stack, path, rank)
    return found


@pytest.mark.slow
def test_an_engine_that_starts_on_moved_weights_answers_as_the_one_before(stack: ExitStack, paths: list[str]) -> None:
    """I1: token for token, and the slots hold what the record says."""
    first = Serving(stack, paths, "first")
    answers = first.tokens()
    assert first.verified()
    first.move(0, ROW)
    first.move(1, [2, 2, 1, 0, 3, 0])
    assert first.tokens() == answers
    first.leave()
    second = Serving(stack, paths, "second")
    assert second.version == 2
    assert second.layout == first.layout != LAYOUT
    assert second.tokens() == answers
    assert second.verified()
    second.layout = LAYOUT  # what an engine does that knows no record
    assert second.tokens() != answers


@pytest.mark.slow
def test_a_standby_maps_the_same_bytes_pauses_moves_and_takes_over(stack: ExitStack, paths: list[str]) -> None:
    active = Serving(stack, paths, "active")
    active.move(0, ROW)
    standby = Serving(stack, paths, "standby")
    assert standby.tokens() == active.tokens()
    assert [reply.status for reply in active.move(1, ROW)] == ["busy", "busy"]
    active.ranks[1]["1.w"][2].fill_(5.0)
    assert standby.ranks[1]["1.w"][2].eq(5.0).all()
    active.ranks[1]["1.w"][2] = expert_weight(1, 2)
    active.leave()
    answers = standby.tokens()
    until(lambda: standby.move(1, ROW)[0].status == "ok")
    assert standby.tokens() == answers
    assert standby.verified()


@pytest.mark.slow
@pytest.mark.parametrize("writes", [0, 3, 5])
def test_an_engine_that_dies_in_a_move_leaves_weights_that_nobody_maps(
    stack: ExitStack, paths: list[str], writes: int
) -> None:
    """I2: also if it had written nothing."""
    first = Serving(stack, paths, "first")
    first.move(0, ROW)
    first.move(1, ROW, writes=writes)
    first.leave()
    with pytest.raises(
        LayoutAgreementError, match=r"nobody knows.*the move of layer 1 by engine 'first' from version 1"
    ):
        Serving(stack, paths, "second")
    with LayoutClient(paths[0], "stubborn") as client:
        assert refused(client, "nobody knows") == "layout"


# ---- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_engines_in_processes_share_one_copy_and_one_load(stack: ExitStack, path: str) -> None:
    """R64: A restart reads no byte from disk: the loader runs once, whatever dies."""
    loads = []

    def counted(layout: ExpertLayout | None, rank: int) -> dict[str, torch.Tensor]:
        loads.append(rank)
        return load(layout, rank)

    kept = host(stack, path, load=counted)
    with Engine(path, "a") as a:
        assert torch.tensor(a.ask("map", CONFIG)["0.w"]).equal(load(LAYOUT, 0)["0.w"])
        assert a.ask("begin", [0], 0)[0] == "ok"
        a.ask("write", "0.w", 0, 5.0)
        a.ask("commit", [0], [ROW])
        a.kill()
    until(lambda: kept.state is not None and kept.state.engines == ())
    with LayoutClient(path, "b") as client:
        assert client.found is not None
        assert mapped(stack, client, layout=client.found.layout)["0.w"][0].eq(5.0).all()
        refused(client, r"routes by layout .* \(version 0\), the weights hold .* \(version 1\)")
    assert loads == [0]


@pytest.mark.slow
def test_an_engine_in_another_container_maps_the_same_memory(stack: ExitStack, path: str, client: LayoutClient) -> None:
    tensors = mapped(stack, client)
    with Engine(path, "there", inside=container()) as engine:
        engine.ask("map", CONFIG)
        tensors["1.w"][2].fill_(3.0)
        assert torch.tensor(engine.ask("read", "1.w"))[2].eq(3.0).all()


@pytest.mark.slow
def test_an_engine_outlives_its_host_and_a_new_host_says_who_keeps_the_memory(
    stack: ExitStack, path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = str(tmp_path / "state")
    with keeper(path, file, "--host") as process, LayoutClient(path, "survivor") as client:
        tensors: dict[str, torch.Tensor] = {}
        attached = attach(client, tensors, config={"model": "toy"}, rank=1)
        process.kill()
        process.wait()
        tensors["w"][0, 0] = 7.0
        assert tensors["w"].tolist() == [[7.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        assert client.begin([0], 0).status == "refused"
        with pytest.raises(HostAbsent, match="closed the connection"):
            attach(client, {}, config={"model": "toy"})
        with caplog.at_level(logging.WARNING, "eplb_core"):
            anew = host(stack, path, 1, load=lambda *_: {"w": torch.zeros(1)}, config={}, state_file=file)
        assert "engines 'survivor' were attached to the former host" in caplog.text
        assert anew.state is not None
        assert (anew.state.version, anew.state.engines, anew.state.num_non_followers) == (0, (), 0)
        attached.close()


# ---- modules ---------------------------------------------------------------------------------------------------------


class Scaled(NamedTuple):
    """What a quantization keeps."""

    scale: torch.Tensor
    zero: int


class Block(torch.nn.Module):
    """What engines do to modules: views, tied and plain tensors, buffers outside of the state dict."""

    def __init__(self, device: str, *, processed: bool) -> None:
        super().__init__()
        with torch.device(device):
            self.w = torch.nn.Parameter(torch.randn(3, 4, 4), requires_grad=False)
            self.w.weight_loader = "kept"  # type: ignore[attr-defined]
            self.inner = torch.nn.Linear(4, 2)
            self.tied = self.inner.weight
            self.register_buffer("table", torch.arange(6))
            self.register_buffer("scratch", torch.ones(2), persistent=False)
            self.scales = [torch.randn(2), torch.randn(2)]
            self.by_name = {"a": torch.randn(1)}
            self.pair = torch.randn(2), {"deep": [torch.randn(1), Scaled(torch.randn(3), 4)]}
            self.first_rows = self.w.data[:2]
            self.setting = 3
        if processed:
            self.w = torch.nn.Parameter(self.w.data.transpose(1, 2).contiguous().to(torch.bfloat16), False)
            self.first_rows = self.w.data[:2]
            self.w_scale = torch.nn.Parameter(torch.rand(3), requires_grad=False)
            self.alphas = torch.rand(3)
            self.inner.register_buffer("packed", torch.arange(4, dtype=torch.uint8))


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block("cpu", processed=True)


def test_a_module_on_the_meta_device_is_filled_with_all_that_the_host_computes_with(
    stack: ExitStack, path: str, block: Block
) -> None:
    expected = {each.name: (each.kind, each.tensor.clone()) for each in module_tensors(block)}
    host(stack, path, load=lambda layout, rank: block)
    client = stack.enter_context(LayoutClient(path, "a"))
    engine = Block("meta", processed=False)
    stack.callback(attach(client, engine).close)
    found = {each.name: (each.kind, each.tensor) for each in module_tensors(engine)}
    assert (
        found.keys()
        == expected.keys()
        >= {"w_scale", "alphas", "inner.packed", "scales.1", "by_name.a", "scratch", "pair.0"}
    )
    assert found.keys() >= {"pair.1.deep.0", "pair.1.deep.1.scale"}
    scaled = engine.pair[1]["deep"][1]
    assert isinstance(scaled, Scaled)
    assert scaled.zero == 4
    for name, (kind, tensor) in expected.items():
        assert (found[name][0], found[name][1].dtype) == (kind, tensor.dtype)
        assert found[name][1].equal(tensor), name
    assert vars(engine.w) == {"weight_loader": "kept"}
    assert engine.tied is engine.inner.weight
    assert engine.first_rows.data_ptr() == engine.w.data_ptr()
    assert engine.state_dict().keys() == block.state_dict().keys()
    assert not any(parameter.requires_grad for parameter in engine.parameters())
    engine.w.data[0].fill_(1.0)
    assert engine.first_rows[0].eq(1.0).all()


def test_a_second_engine_sees_the_first_ones_writes(stack: ExitStack, path: str, block: Block) -> None:
    host(stack, path, load=lambda layout, rank: block)
    engines = [Block("meta", processed=False), Block("cpu", processed=True)]
    for number, engine in enumerate(engines):
        stack.callback(attach(stack.enter_context(LayoutClient(path, f"e{number}")), engine).close)
    engines[0].w.data.fill_(2.0)
    assert engines[1].first_rows.eq(2.0).all()


def test_a_module_that_does_not_fit_stays_as_it_was(stack: ExitStack, path: str, block: Block) -> None:
    host(stack, path, load=lambda layout, rank: block)
    client = stack.enter_context(LayoutClient(path, "a"))
    engine = Block("meta", processed=False)
    engine.extra = torch.nn.Parameter(torch.empty(2, device="meta"))
    before = dict(engine.named_parameters())
    assert refused(client, "tensor 'extra' is on the meta device and the host has none for it", engine) == "extra"
    assert all(engine.get_parameter(name) is parameter for name, parameter in before.items())
    del engine.extra, engine.inner
    refused(client, r"tensor 'inner.weight' of the host has no place in this module", engine)


def test_an_engine_without_a_descriptor_left_is_told_so_and_may_ask_again(client: LayoutClient) -> None:
    """The kernel hands out those that there is room for, and no error."""
    with no_descriptor_left(), pytest.raises(HostAbsent, match=r"0 of 1 descriptors came; .* \(ulimit -n\)"):
        attach(client, {})
    attach(client, {}).close()


def test_a_dict_receives_what_it_names(stack: ExitStack, client: LayoutClient) -> None:
    some: dict[str, Any] = {"1.w": torch.empty(3, HIDDEN, HIDDEN, device="meta")}
    stack.callback(attach(client, some).close)
    assert list(some) == ["1.w"]
    assert some["1.w"].equal(load(LAYOUT, 0)["1.w"])
    unfit: list[tuple[dict[str, Any], str]] = [
        ({"2.w": None}, "the host has no tensor '2.w'; it has 0.w, 1.w"),
        ({"1.w": torch.empty(3)}, r"is torch.float32 \[3, 8, 8\] at the host and torch.float32 \[3\] here"),
        ({"1.w": torch.empty(3, HIDDEN, HIDDEN, dtype=torch.float16)}, "and torch.float16"),
    ]
    for bad, said in unfit:
        assert refused(client, said, dict(bad)) == next(iter(bad))
    with pytest.raises(TypeError, match=r"`module_or_dict` \(=list\) must be a module or a dict"):
        attach(client, [])


def test_handles_say_where_peers_find_the_bytes(client: LayoutClient) -> None:
    tensors: dict[str, torch.Tensor] = {}
    attached = attach(client, tensors)
    assert attached.names == ("0.w", "1.w")
    assert attached.num_bytes == 2 * 3 * HIDDEN * HIDDEN * 4
    handle = attached.handles["1.w"]
    raw = os.pread(handle.fd, handle.nbytes, handle.offset)
    assert np.array_equal(np.frombuffer(raw, np.float32), tensors["1.w"].numpy().reshape(-1))
    attached.close()
    attached.close()
    assert tensors["1.w"].equal(load(LAYOUT, 0)["1.w"])


# ---- refusals --------------------------------------------------------------------------------------------------------


def full_config(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        **{"model": "m", "dtype": "bf16", "quantization": None, "tp_size": 1, "tp_rank": 0, "dp_size": 1},
        **{"ep_size": 2, "ep_rank": 0, "node_rank": 0, "num_redundant_experts": 2, "initial_layout": "trivial"},
        **{"algorithm": None, "seed": 1, "kernel": ["deep_gemm", 3]},
    }
    return weight_config(**{**values, **changes})


@pytest.mark.parametrize("name", sorted(full_config()))
def test_a_difference_in_any_field_is_refused_and_named(stack: ExitStack, path: str, name: str) -> None:
    """R63: what shapes the layout too. `ep_size` and others that the layout says are checked on the engine's side."""
    config = full_config()
    kept = host(stack, path, config=config)
    client = stack.enter_context(LayoutClient(path, "a"))
    mapped(stack, client, config=config, rank=0)
    other = {**config, name: "another"}
    if name in ("ep_size", "ep_rank", "num_redundant_experts"):
        with pytest.raises(ValueError, match=rf"`config\['{name}'\]` \(='another'\) must be [02], as layout and rank"):
            attach(client, {}, config=other, rank=0)
        return
    assert refused(client, rf"`{name}` differs: the host says .*, the engine \"another\"", config=other) == name
    del other[name]
    assert refused(client, rf"`{name}` differs: the host says .*, the engine nothing", config=other) == name
    assert kept.state is not None
    assert kept.state.num_non_followers == 0


def test_the_host_of_another_rank_is_refused(stack: ExitStack, path: str) -> None:
    """I5: a wrong socket. The rank is that of the agreement."""
    host(stack, path, rank=1)
    client = stack.enter_context(LayoutClient(path, "a"))
    client.rank = 0
    assert refused(client, "`ep_rank` differs: the host has 1, the engine 0") == "ep_rank"
    wider = ExpertLayout.trivial(2, 4, num_slots=8, topology=RANKS)
    refused(client, "`num_slots` differs: the host has 6, the engine 8", layout=wider, rank=1)


def test_values_that_look_alike_are_not_the_same(stack: ExitStack, path: str) -> None:
    host(stack, path, config={"flag": 1})
    client = stack.enter_context(LayoutClient(path, "a"))
    for value in (True, 1.0, "1", [1]):
        assert refused(client, "differs", config={"flag": value}) == "flag"


def test_no_host_is_absent(path: str, stack: ExitStack) -> None:
    """R24."""
    with pytest.raises(HostAbsent, match="there is no client"):
        attach(None, {})
    with pytest.raises(HostAbsent, match=f"nobody listens at {path}"):
        attach(LayoutClient(path, "a"), {})
    stack.enter_context(LayoutServer(path, LayoutRecord(LAYOUT)))
    with pytest.raises(HostAbsent, match="keeps a record and no weights"):
        attach(stack.enter_context(LayoutClient(path, "a")), {})


def test_during_a_move_the_host_is_busy(stack: ExitStack, path: str) -> None:
    """R12."""
    host(stack, path)
    mover = stack.enter_context(LayoutClient(path, "mover"))
    mover.begin([1], 0)
    with pytest.raises(HostBusy, match="the move of layer 1 by engine 'mover' from version 0 is pending"):
        attach(stack.enter_context(LayoutClient(path, "late")), {})


def test_a_host_without_balancing_keeps_no_record_and_serves(stack: ExitStack, path: str) -> None:
    """R2, R17."""
    kept = host(stack, path, layout=None, load=lambda layout, rank: {"w": torch.ones(2)})
    client = stack.enter_context(LayoutClient(path, "a"))
    assert kept.state is None
    assert client.found is None
    assert mapped(stack, client, layout=None)["w"].eq(1.0).all()
    assert client.begin([0], 0).status == "refused"


def test_host_and_engine_start_in_one_layout_by_one_function(stack: ExitStack, path: str) -> None:
    """R62, R63: each makes it by itself; one that was given another is refused."""

    def first(rank: int, slots: int = 6) -> tuple[ExpertLayout, dict[str, Any]]:
        layout = ExpertLayout.trivial(2, 4, num_slots=slots, topology=RANKS)
        return layout, {"initial_layout": layout.digest, "ep_rank": rank, "ep_size": 2}

    layout, config = first(1)
    host(stack, path, 1, layout=layout, config=config)
    client = stack.enter_context(LayoutClient(path, "a"))
    layout, config = first(1)
    tensors = mapped(stack, client, layout=layout, config=config, rank=1)
    assert tensors["0.w"].equal(load(layout, 1)["0.w"])
    layout, config = first(1, slots=8)
    assert refused(client, "`initial_layout` differs", layout=layout, config=config, rank=1) == "initial_layout"


def test_a_second_host_fails_before_it_loads(stack: ExitStack, path: str) -> None:
    host(stack, path)
    with pytest.raises(SocketInUseError, match="is served by another process"):
        host(stack, path, load=lambda *_: pytest.fail("it loaded"))


def test_a_load_that_fails_leaves_the_path_free(stack: ExitStack, path: str) -> None:
    for loaded, error, said in [
        (torch.ones(1), TypeError, "`load` gave Tensor; it must give a module, or tensors by name"),
        ({"w": 3}, TypeError, "`load` gave dict"),
        ({"w": torch.ones(2, device="meta")}, ValueError, "tensor 'w' is on meta; load onto the CPU"),
        ({"w": torch.ones(2, 2).to_sparse()}, ValueError, r"tensor 'w' \(torch.sparse_coo\) must be strided"),
    ]:
        with pytest.raises(error, match=said):
            host(stack, path, load=lambda *_, loaded=loaded: loaded)
    host(stack, path)


def test_a_host_that_cannot_keep_its_state_file_leaves_the_path_free(stack: ExitStack, path: str) -> None:
    with pytest.raises(FileNotFoundError, match="No such folder"):
        host(stack, path, state_file="/no/such/folder/state")
    host(stack, path)


def test_a_state_file_that_cannot_be_read_is_said_and_replaced(
    stack: ExitStack, path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "state"
    file.write_text('{"format": "eplb-record-1", "mem')
    host(stack, path, state_file=file)
    assert f"{file} does not say which engines keep a former host's memory" in caplog.text
    assert file.read_text().endswith("}")


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"rank": 2}, ValueError, r"`rank` \(=2\) must be below the layout's 2 ranks"),
        ({"config": {"ep_rank": 1}}, ValueError, r"`config\['ep_rank'\]` \(=1\) must be 0"),
        (
            {"config": {"x": torch.float32}},
            TypeError,
            r"`config\['x'\]` \(=dtype\) must be text, a number, None or a list",
        ),
        ({"config": {"x": float("nan")}}, TypeError, r"`config\['x'\]` \(=float\)"),
        ({"config": {3: 4}}, TypeError, "`config` has the name 3; names must be text"),
        ({"config": [1]}, TypeError, r"`config` \(=list\) must be a mapping"),
    ],
)
def test_arguments_of_a_host_that_cannot_be(
    stack: ExitStack, path: str, arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        host(stack, path, **arguments)


# ---- the memory ------------------------------------------------------------------------------------------------------


def test_views_of_one_storage_share_one_span_and_odd_kinds_come_back() -> None:
    whole = torch.arange(100, dtype=torch.float32)
    tensors = {
        "view": whole[10:30].view(4, 5).t(),
        "over": whole[5:20],
        "bf16": torch.ones(3, dtype=torch.bfloat16),
        "fp8": torch.rand(5).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
        "one": torch.tensor(3.0),
        "wide": torch.ones(4).expand(2, 4),
        "bool": torch.tensor([True, False]),
        "complex": torch.ones(2, dtype=torch.complex64),
    }
    memory = SharedMemory([NamedTensor(name, "tensor", tensor) for name, tensor in tensors.items()])
    mapped = {name: each.tensor for name, each in map_tensors(memory.description, memory.fds).items()}
    again = map_tensors(memory.description, memory.fds)
    memory.close()
    memory.close()
    for name, tensor in tensors.items():
        assert (mapped[name].dtype, mapped[name].stride()) == (tensor.dtype, tensor.stride())
        assert mapped[name].tolist() == tensor.tolist()
    mapped["over"][6] = -1.0
    assert mapped["view"][1, 0] == -1.0
    assert again["over"].tensor[6] == -1.0
    assert whole[11] == 11.0
    # 104 bytes of the shared storage from byte 16 on, not all 400.
    assert mapped["over"].untyped_storage().nbytes() == 104
    assert all(tensor.data_ptr() % 64 == 0 for name, tensor in mapped.items() if name not in ("view", "over", "empty"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spans": [[0, 0, 1 << 40]]}, "a span of 1099511627776 bytes from 0"),
        ({"spans": [[0, -8, 8]]}, "a span of 8 bytes from -8"),
        ({"segments": [["memfd", 1 << 30]]}, r"a segment of \d+ bytes must have 1073741824"),
        ({"tensors": [["w", "tensor", "torch.load", [1], [1], 0, 0]]}, "no dtype 'torch.load'"),
        ({"tensors": [["w", "tensor", "torch.int64", [1000], [1], 0, 0]]}, "resize|out of bounds"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(change: dict[str, Any], said: str) -> None:
    memory = SharedMemory([NamedTensor("w", "tensor", torch.ones(8))])
    with pytest.raises((ValueError, RuntimeError), match=said):
        map_tensors({**memory.description, **change}, memory.fds)
    memory.close()


def test_a_host_whose_memory_cannot_be_understood_is_as_good_as_none(stack: ExitStack, path: str) -> None:
    stack.enter_context(LayoutServer(path, None, exports=Weights(parts=[])))  # as of another version
    client = stack.enter_context(LayoutClient(path, "a"))
    target = {"w": torch.zeros(2)}
    with pytest.raises(HostAbsent, match="the host's description of its memory cannot be used: 'segments'"):
        attach_weights(client, target, config={}, layout=None)
    assert target["w"].tolist() == [0, 0]


def test_memory_that_the_system_does_not_give_costs_no_descriptor() -> None:
    before, limits = set(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            SharedMemory([NamedTensor("w", "tensor", torch.ones(8))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOMEM, errno.EPERM])
@pytest.mark.parametrize(
    ("module", "call"), [(os, "memfd_create"), (os, "ftruncate"), (fcntl, "fcntl"), (mmap, "mmap"), (os, "fstat")]
)
def test_a_call_that_fails_while_memory_is_made_or_mapped_costs_no_descriptor_and_no_tensor(
    stack: ExitStack, path: str, monkeypatch: pytest.MonkeyPatch, module: Any, call: str, error: int
) -> None:
    def fails(*arguments: Any, **options: Any) -> Any:
        raise OSError(error, os.strerror(error))

    def make() -> None:
        memory = SharedMemory([NamedTensor("w", "tensor", torch.ones(8))])
        try:
            map_tensors(memory.description, memory.fds)
        finally:
            memory.close()

    before = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(module, call, fails)
        with pytest.raises(OSError, match=re.escape(os.strerror(error))):
            make()
    assert set(os.listdir("/proc/self/fd")) <= before
    host(stack, path)
    client, target = stack.enter_context(LayoutClient(path, "a")), {"0.w": torch.zeros(3, HIDDEN, HIDDEN)}
    if call in ("mmap", "fstat"):
        before = set(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patched:
            patched.setattr(mmap, "mmap", fails)
            with pytest.raises(HostAbsent, match=re.escape(os.strerror(error))):
                attach(client, target)
        assert set(os.listdir("/proc/self/fd")) <= before
        assert not target["0.w"].any()
    stack.callback(attach(client, target).close)
    assert target["0.w"].equal(load(LAYOUT, 0)["0.w"])


def test_a_host_that_cannot_write_its_record_gives_its_memory_back(stack: ExitStack, path: str, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(IsADirectoryError):
        host(stack, path, state_file=tmp_path / "state")
    assert set(os.listdir("/proc/self/fd")) <= before


def test_parts_of_a_module_that_are_no_tensors_are_passed_over() -> None:
    module = torch.nn.Linear(2, 1, bias=False)
    module.register_buffer("scale", None)
    module.kept = [torch.ones(1), "text"]  # type: ignore[assignment]
    assert [each.name for each in module_tensors(module)] == ["weight", "kept.0"]


def test_a_list_that_lies_in_itself_is_looked_into_once_and_two_tensors_of_one_name_are_refused() -> None:
    module = torch.nn.Module()
    module.kept = around = [torch.ones(1)]  # type: ignore[assignment]
    around.append([around, torch.ones(2)])  # type: ignore[arg-type]
    assert [each.name for each in module_tensors(module)] == ["kept.0", "kept.1.1"]
    module.by_key = {1: torch.ones(1), "1": torch.zeros(1)}  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"the module has 2 tensors of the name 'by_key.1'"):
        module_tensors(module)


def test_no_engine_can_cut_the_memory_of_the_others() -> None:
    memory = SharedMemory([NamedTensor("w", "tensor", torch.ones(8))])
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fds[0], 0)
    memory.close()


def test_threads_of_engines_attach_at_once(stack: ExitStack, path: str) -> None:
    host(stack, path)

    def run(number: int) -> bool:
        with LayoutClient(path, f"e{number}") as client:
            tensors: dict[str, torch.Tensor] = {}
            attach(client, tensors).close()
            return tensors["0.w"].equal(load(LAYOUT, 0)["0.w"])

    assert on_threads([partial(run, number) for number in range(8)]) == [True] * 8
