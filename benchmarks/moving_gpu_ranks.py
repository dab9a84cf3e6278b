"""The processes of `benchmarks.moving_gpu`: ranks that decode while experts move, a weight host and its engines.

A rank's pass is a CUDA graph of 58 MoE layers: router, dispatch by the library's tables, the rank's own slots on all
tokens, one number for each token and choice. Ranks sum these once a pass over gloo, where each entry has one rank that
computed it, and the next tokens depend on every bit of the sum. So a slot that holds another expert, a token that goes
to another slot or another order of a sum shows in the tokens. Four processes on one GPU cannot run collectives of the
device, so what a rank computes on a layer does not depend on other ranks' results of the layer before.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
import traceback
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import measure
from eplb_core import DispatchTables, ExpertLayout, ExpertStore, Topology, fingerprints, topk_to_slots, verify_weights
from eplb_core.loading.agreement import GroupAgreement, LocalAgreement
from eplb_core.loading.moves.migrator import Migrator
from eplb_core.loading.moves.mover import move_experts
from eplb_core.loading.moves.steps import plan_steps
from eplb_core.loading.pull_plan import PullKind
from eplb_core.loading.transport import ReadBatch
from eplb_core.loading.transports import CudaIpc, SharedMemory

TOP_K = 2
VOCABULARY = 4096


class Shape:
    """Sizes of the model."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.layers, self.per_rank, self.experts = options["layers"], options["per_rank"], options["experts"]
        self.hidden, self.inner, self.tokens = options["hidden"], options["inner"], options["tokens"]
        self.device = torch.device(options["device"])


def expert_weights(shape: Shape, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """w13, its scales and w2: a function of layer and expert alone."""
    draw = torch.Generator(device=shape.device).manual_seed(layer * 100_003 + expert)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=shape.device, dtype=torch.float32, generator=draw)

    w13 = (normal(2 * shape.inner, shape.hidden) * shape.hidden**-0.5).bfloat16()
    w2 = (normal(shape.hidden, shape.inner) * shape.inner**-0.5).bfloat16()
    return w13, normal(2 * shape.inner).abs() + 0.5, w2


def allocate(shape: Shape, layers: int | None = None) -> list[dict[str, torch.Tensor]]:
    slots, hidden, inner, device = shape.per_rank, shape.hidden, shape.inner, shape.device
    return [
        {
            "w13": torch.empty(slots, 2 * inner, hidden, dtype=torch.bfloat16, device=device),
            "w13_scale": torch.empty(slots, 2 * inner, dtype=torch.float32, device=device),
            "w2": torch.empty(slots, hidden, inner, dtype=torch.bfloat16, device=device),
        }
        for _ in range(shape.layers if layers is None else layers)
    ]


def fill(shape: Shape, weights: list[dict[str, torch.Tensor]], layout: ExpertLayout, rank: int) -> None:
    for layer, tensors in enumerate(weights):
        own = layout.physical_to_logical_map[layer][rank * shape.per_rank :][: shape.per_rank]
        for slot, expert in enumerate(own.tolist()):
            tensors["w13"][slot], tensors["w13_scale"][slot], tensors["w2"][slot] = expert_weights(shape, layer, expert)


def random_layout(shape: Shape, ranks: int, rng: np.random.Generator) -> ExpertLayout:
    """Every slot holds an expert, in random order: nearly all slots change."""
    slots = ranks * shape.per_rank
    spare = rng.integers(0, shape.experts, (shape.layers, slots - shape.experts))
    rows = np.concatenate([np.tile(np.arange(shape.experts), (shape.layers, 1)), spare], axis=1)
    return ExpertLayout(rng.permuted(rows, axis=1), shape.experts, topology=Topology(ranks))


class Decoder:
    """One rank's layers, as a graph on a GPU."""

    def __init__(self, shape: Shape, weights: list[dict[str, torch.Tensor]], tables: DispatchTables, rank: int) -> None:
        self.shape, self.weights, self.tables, self.rank = shape, weights, tables, rank
        draw = torch.Generator(device=shape.device).manual_seed(7)
        count, hidden, device = shape.tokens, shape.hidden, shape.device

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, device=device, dtype=torch.float32, generator=draw)

        self.embedding = normal(VOCABULARY, hidden).bfloat16()
        self.position = normal(shape.layers, hidden).bfloat16()
        self.router = (normal(shape.layers, shape.experts, hidden) * hidden**-0.5).bfloat16()
        self.probe = normal(hidden) * hidden**-0.5
        self.ids = torch.zeros(count, dtype=torch.int64, device=device)
        self.result = torch.zeros(shape.layers, count, TOP_K, device=device)
        self.on_host = torch.zeros(shape.layers, count, TOP_K, pin_memory=device.type == "cuda")
        self.ids_host = torch.zeros(count, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._graph: Any = None
        if device.type == "cuda":
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self._forward()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._forward()

    def _forward(self) -> None:
        shape = self.shape
        base = self.embedding[self.ids]
        for layer, tensors in enumerate(self.weights):
            x = base + self.position[layer]
            logits = (x @ self.router[layer].T).float()
            top, ids = torch.topk(logits, TOP_K, dim=-1)
            gates = torch.softmax(top, dim=-1)
            slots = topk_to_slots(ids.to(torch.int32), self.tables.layer(layer)).to(torch.int64)
            inner = torch.empty(
                shape.per_rank, shape.tokens, 2 * shape.inner, dtype=torch.bfloat16, device=shape.device
            )
            outer = torch.empty(shape.per_rank, shape.tokens, shape.hidden, dtype=torch.bfloat16, device=shape.device)
            for slot in range(shape.per_rank):  # one product a slot: the same kernel whatever slot it is
                torch.mm(x, tensors["w13"][slot].T, out=inner[slot])
            scaled = inner * tensors["w13_scale"].bfloat16()[:, None, :]
            half = torch.nn.functional.silu(scaled[..., : shape.inner]) * scaled[..., shape.inner :]
            for slot in range(shape.per_rank):
                torch.mm(half[slot], tensors["w2"][slot].T, out=outer[slot])
            numbers = (outer.float() * self.probe).sum(-1)  # [slots, tokens]
            local = slots - self.rank * shape.per_rank
            mine = (local >= 0) & (local < shape.per_rank)
            chosen = numbers.T.gather(1, local.clamp(0, shape.per_rank - 1))
            self.result[layer] = torch.where(mine, gates * chosen, torch.zeros_like(chosen))

    def run(self, ids: torch.Tensor, combine: Callable[[torch.Tensor], Any] | None = None) -> torch.Tensor:
        """This rank's part of a pass, on the host; or what `combine` makes of it on the device."""
        self.ids_host.copy_(ids)
        self.ids.copy_(self.ids_host, non_blocking=True)
        if self._graph is None:
            self._forward()
        else:
            self._graph.replay()
        if combine is not None:
            combine(self.result)
        self.on_host.copy_(self.result, non_blocking=True)
        if self.shape.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return self.on_host


class Rank:
    """One process of four."""

    def __init__(self, pipe: Any, options: dict[str, Any]) -> None:
        self.pipe, self.options, self.shape = pipe, options, Shape(options)
        self.rank, self.size = options["rank"], options["ranks"]
        self.on_gpu = self.shape.device.type == "cuda"
        torch.set_num_threads(1)
        if self.on_gpu:
            torch.cuda.set_device(self.shape.device.index or 0)
        self.say("start")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{options['folder']}/store",
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=120),
        )
        self.group = dist.new_group(backend="gloo")
        self.agreement = GroupAgreement(dist.new_group(backend="gloo"), deadline=60.0)
        self.rng = np.random.default_rng(11)
        self.layout = random_layout(self.shape, self.size, self.rng)
        self.weights = allocate(self.shape)
        fill(self.shape, self.weights, self.layout, self.rank)
        self.say("weights")
        self.stores = [ExpertStore(tensors) for tensors in self.weights]
        slot_bytes = self.stores[0].slot_bytes
        # Two layers': the next one is read while ranks agree on the one before.
        self.staging = torch.empty(2 * self.shape.per_rank * slot_bytes, dtype=torch.uint8, device=self.shape.device)
        self.tables = DispatchTables(self.layout, rank=self.rank, mode="row", device=self.shape.device)
        report = verify_weights(self.prints(), self.layout)
        if not report.ok:
            raise SystemExit(f"replicas differ at the start: {report}")
        self.reference = report.by_expert
        self.transports: dict[str, Any] = (
            {"batched, prefer overlap": CudaIpc(), "batched": CudaIpc(prefer_overlap=False)}
            if self.on_gpu
            else {"SharedMemory": SharedMemory()}
        )
        self.results: dict[str, Any] = {"slot_bytes": slot_bytes}
        self.decoder: Any = None

    def say(self, what: str) -> None:
        """One rank speaks for all."""
        if self.rank == 0:
            print(f"{time.strftime('%H:%M:%S')} rank 0: {what}", flush=True)

    def prints(self) -> list[np.ndarray[Any, Any]]:
        """Fingerprints of all ranks' slots."""
        own = fingerprints(self.stores).cpu().numpy()
        return [np.frombuffer(blob, dtype=np.int64).reshape(own.shape) for blob in self.agreement.gather(own.tobytes())]

    def check(self) -> str:
        """Whether every slot of all ranks holds its expert, by fingerprints."""
        report = verify_weights(self.prints(), self.layout, reference=self.reference)
        return "exact" if report.ok and not report.num_unchecked else str(report)

    def migrator(self, transport: Any) -> Migrator:
        """In the layout that the weights are in."""
        return Migrator(
            self.stores,
            self.layout,
            rank=self.rank,
            transport=transport,
            agreement=self.agreement,
            tables=self.tables,
            staging=self.staging,
            deadline=60.0,
        )

    def next_layout(self) -> ExpertLayout:
        """Another one, the same on every rank."""
        return random_layout(self.shape, self.size, self.rng)

    def run(self) -> None:
        """All parts, one after the other, to the end of the process; what was measured is told after each."""
        part = ""
        try:
            for part in self.options["parts"]:
                self.say(part)
                getattr(self, f"part_{part}")()
                self.pipe.send(self.results)
        except Exception:  # ranks are not in step any more
            self.results[f"{part}_error"] = traceback.format_exc()
            print(f"rank {self.rank}: {self.results[f'{part}_error']}", flush=True)
            self.pipe.send(self.results)
            os._exit(1)
        self.say("end")
        os._exit(0)

    # ---- moves and nothing else ------------------------------------------------------------------------------------

    def part_ipc(self) -> None:
        """Migrations of all layers with nothing beside them."""
        for name, transport in self.transports.items():
            mig = self.migrator(transport)
            entries = []
            for _ in range(self.options["migrations"]):
                before = mig.status
                start = time.perf_counter()
                mig.start(self.next_layout())
                while not mig.idle:
                    mig.poll()
                    time.sleep(0)
                if self.on_gpu:
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - start
                self.layout, now = mig.layout, mig.status
                moved, reading = now.read_bytes - before.read_bytes, now.read_s - before.read_s
                if now.cause:
                    raise RuntimeError(f"{now.cause}: {now.reason}")
                entries.append(
                    {
                        "bytes": moved,
                        "seconds": seconds,
                        "gb_s": moved / seconds / 1e9,
                        "reading_gb_s": moved / reading / 1e9 if reading else 0.0,
                        "check": self.check(),
                    }
                )
            mig.stop(30.0)
            self.results.setdefault("ipc", {})[name] = entries
            self.say(f"{name}: {json.dumps(measure.rounded(entries))}")
            self.pipe.send(self.results)

    # ---- decoding --------------------------------------------------------------------------------------------------

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """A pass of all ranks."""
        total: torch.Tensor = self.decoder.run(ids)
        dist.all_reduce(total, group=self.group)
        return total

    def decode(self, passes: int, hook: Callable[[int], bool | None]) -> dict[str, Any]:
        """Passes from the same first tokens; `hook` runs at the start of each and says whether a move is under way."""
        ids = torch.arange(self.shape.tokens) * 37 % VOCABULARY
        times, moving, hashes = [], [], []
        for number in range(passes):
            start = time.perf_counter()
            moving.append(bool(hook(number)))
            total = self.forward(ids)
            bits = total.numpy().view(np.uint32).transpose(1, 0, 2).reshape(self.shape.tokens, -1)
            odd = 2 * np.arange(bits.shape[1], dtype=np.uint64) + 1
            ids = torch.from_numpy(
                ((bits.astype(np.uint64) * odd).sum(1) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)).astype(
                    np.int64
                )
                % VOCABULARY
            )
            times.append(time.perf_counter() - start)
            hashes.append(zlib.crc32(ids.numpy().tobytes(), zlib.crc32(bits.tobytes())))
        return {"times": times, "moving": moving, "hashes": hashes}

    def part_decode(self) -> None:
        """Passes without moves, and with each way of moving."""
        passes = self.options["passes"]
        self.decoder = Decoder(self.shape, self.weights, self.tables, self.rank)
        self.say("graph")
        self.decode(5, lambda number: None)
        out: dict[str, Any] = {}
        self.results["decode"] = out
        reference = self.decode(passes, lambda number: None)

        def note(name: str, run: dict[str, Any], **more: Any) -> None:
            same = [a == b for a, b in zip(run["hashes"], reference["hashes"], strict=False)]
            out[name] = {
                **summary(run),
                "passes": len(run["times"]),
                "tokens_equal": all(same),
                **more,
            }
            self.say(f"{name}: {json.dumps(measure.rounded(out[name]))}")
            self.pipe.send(self.results)

        note("off", reference)
        for name, transport in self.transports.items():
            note_name = f"asynchronous, {name}"
            mig = self.migrator(transport)

            def look(number: int, mig: Migrator = mig) -> None:
                mig.poll()

            note(f"idle poll, {name}", self.decode(passes // 4, look))
            targets = [self.next_layout() for _ in range(self.options["migrations"])]

            def hook(number: int, mig: Migrator = mig, targets: list[ExpertLayout] = targets) -> bool:
                mig.poll()
                if mig.idle and targets and number >= 5:
                    mig.start(targets.pop(0))
                return not mig.idle

            run = self.decode(passes, hook)
            while not mig.idle:  # it did not end within the passes
                mig.poll()
            if self.on_gpu:
                torch.cuda.synchronize()
            self.layout = mig.layout
            note(
                note_name,
                run,
                check=self.check(),
                cause=mig.status.cause,
                reading_gb_s=mig.status.read_gb_s,
                stopped=mig.stop(30.0),
            )
        note("off, again", self.decode(passes // 2, lambda number: None))
        self.decode_otherwise(note)

    def decode_otherwise(self, note: Callable[..., None]) -> None:
        """The ways that keep the passes waiting."""
        passes = self.options["passes"]
        transport = next(iter(self.transports.values()))
        at = range(5, passes // 3, max(1, passes // 10))

        def synchronous(number: int) -> bool:
            if number in at:
                self.layout = move_experts(
                    self.stores,
                    self.layout,
                    self.next_layout(),
                    rank=self.rank,
                    transport=transport,
                    agreement=self.agreement,
                    tables=self.tables,
                    staging=self.staging,
                )
            return number in at

        run = self.decode(passes // 3, synchronous)
        note("synchronous", run, check=self.check())
        buffers = Buffered(self, transport)
        run = self.decode(passes // 3, lambda number: number in at and buffers.move(self.next_layout()))
        note("temporary buffers and device synchronize", run, check=self.check())


class Buffered:
    """How engines move experts on the forward thread: peers' rows into temporary buffers, synchronize, copy.

    The engines send and receive by NCCL, which does not run between processes on one GPU: peers' memory is read here.
    """

    def __init__(self, rank: Rank, transport: Any) -> None:
        from eplb_core.loading.install.staging import Staging
        from eplb_core.loading.moves.pull import Puller

        self.rank, self.transport = rank, transport
        space = Staging(rank.staging, rank.stores)
        self.puller = Puller(rank.stores, rank.layout, rank.rank, transport, rank.agreement, space)

    def row_of_peer(self, peer: int, layer: int, slot: int, tensor: int, nbytes: int) -> torch.Tensor:
        """A peer's bytes."""
        region, offset = self.puller.region_offsets[peer][layer, slot, tensor].tolist()
        if not self.rank.on_gpu:
            ticket = self.transport.read(peer, ReadBatch(*(np.array([x]) for x in (0, 0, region, offset, nbytes))))
            while not self.transport.poll(ticket).state.is_end:
                time.sleep(0)
            return self.puller.staging.memory[:nbytes]
        from eplb_core.loading.cuda.runtime import device_bytes

        owner = self.transport._owners[peer]
        address = int(self.transport._peers[peer].address[region] + owner.shift[region] + offset)
        return device_bytes(address, nbytes, str(self.rank.stores[0].device))

    def move(self, target: ExpertLayout) -> bool:
        """All layers, one after the other."""
        rank, slots = self.rank, self.rank.shape.per_rank
        for step in plan_steps(rank.layout, target, rank=rank.rank, capacity=slots):
            store = rank.stores[step.layer]
            held: dict[int, list[torch.Tensor]] = {}
            for slot in np.flatnonzero((step.kind == PullKind.READ) | (step.kind == PullKind.COPY_OLD)).tolist():
                peer, source = divmod(int(step.source_slot[slot]), slots)
                held[slot] = []
                for tensor, name in enumerate(store.names):
                    nbytes = int(store.row_bytes[tensor])
                    buffer = torch.empty(nbytes, dtype=torch.uint8, device=store.device)
                    if step.kind[slot] == PullKind.READ:
                        buffer.copy_(self.row_of_peer(peer, step.layer, source, tensor, nbytes))
                    else:
                        buffer.copy_(store.row(name, source))
                    held[slot].append(buffer)
            self.synchronize()
            dist.barrier(group=rank.group)
            for slot, buffers in held.items():
                for name, buffer in zip(store.names, buffers, strict=True):
                    store.row(name, slot).copy_(buffer)
            for slot in np.flatnonzero(step.kind == PullKind.COPY_NEW).tolist():
                for name in store.names:
                    store.row(name, slot).copy_(store.row(name, int(step.source_slot[slot]) % slots))
            self.synchronize()
        rank.layout = target
        rank.tables.install(target)
        self.synchronize()
        dist.barrier(group=rank.group)
        return True

    def synchronize(self) -> None:
        """The whole device."""
        if self.rank.on_gpu:
            torch.cuda.synchronize()


def summary(run: dict[str, Any]) -> dict[str, Any]:
    """Percentiles of the passes, of those with a move and those without; milliseconds."""
    times, moving = np.array(run["times"]) * 1e3, np.array(run["moving"])
    return {"all": percentiles(times), **({"moving": percentiles(times[moving])} if moving.any() else {})}


def percentiles(times: np.ndarray[Any, Any]) -> dict[str, float]:
    return {
        "p50": float(np.percentile(times, 50)),
        "p99": float(np.percentile(times, 99)),
        "worst": float(times.max()),
    }


def be_rank(pipe: Any, options: dict[str, Any]) -> None:
    """The process of a rank."""
    Rank(pipe, options).run()


# ---- a weight host and its engines -----------------------------------------------------------------------------------


def host_layout(shape: Shape) -> ExpertLayout:
    return ExpertLayout(
        np.tile(np.arange(shape.per_rank), (shape.layers, 1)), shape.per_rank, topology=Topology(num_ranks=1)
    )


def be_host(pipe: Any, options: dict[str, Any]) -> None:
    """Share weights until the pipe ends."""
    from eplb_core.loading.sharing.host import WeightHost

    shape = Shape(options)
    seconds: dict[str, float] = {}

    def load(layout: ExpertLayout | None, rank: int) -> dict[str, torch.Tensor]:
        start = time.perf_counter()
        weights = allocate(shape)
        fill(shape, weights, host_layout(shape), rank)
        seconds["load"] = time.perf_counter() - start
        return {f"{layer}.{name}": tensor for layer, own in enumerate(weights) for name, tensor in own.items()}

    start = time.perf_counter()
    host = WeightHost(options["path"], load, config={"model": "random"}, layout=host_layout(shape), rank=0)
    if shape.device.type == "cuda":
        torch.cuda.empty_cache()
    ready = time.perf_counter() - start
    pipe.send({"ready_s": ready, "load_s": seconds["load"], "bytes": host.num_bytes, "pid": os.getpid()})
    pipe.poll(None)
    host.close()


def be_engine(pipe: Any, options: dict[str, Any]) -> None:
    """Attach, then answer: `pass`, `move`, `state`."""
    shape = Shape(options)
    if shape.device.type == "cuda":
        torch.zeros(1, device=shape.device)
        torch.mm(*(torch.zeros(64, 64, device=shape.device, dtype=torch.bfloat16) for _ in range(2)))
        torch.cuda.synchronize()
    from eplb_core.loading.record.client import LayoutClient
    from eplb_core.loading.sharing.attach import attach_weights

    gc.collect()  # its turn takes 0.1 s once torch is there, and is no part of what is timed
    imported = time.perf_counter()
    client = LayoutClient(options["path"], options["name"])
    state: Any = client.query()
    tensors: dict[str, Any] = {}
    attached = attach_weights(client, tensors, config={"model": "random"}, layout=state.layout, rank=0)
    done = time.perf_counter()
    weights = [
        {name: tensors[f"{layer}.{name}"] for name in ("w13", "w13_scale", "w2")} for layer in range(shape.layers)
    ]
    layout = state.layout
    stores = [ExpertStore(own) for own in weights]
    tables = DispatchTables(layout, rank=0, mode="row", device=shape.device)
    wrong = []
    for layer in (0, shape.layers - 1):
        for slot, expert in enumerate(layout.physical_to_logical_map[layer].tolist()):
            for name, expected in zip(("w13", "w13_scale", "w2"), expert_weights(shape, layer, expert), strict=True):
                if not torch.equal(weights[layer][name][slot], expected):
                    wrong.append([layer, slot, name])
    pipe.send(
        {
            "attach_s": done - imported,
            "bytes": attached.num_bytes,
            "version": state.version,
            "wrong": wrong,
        }
    )
    decoder: Any = None
    first = torch.arange(shape.tokens) % VOCABULARY

    def one_pass() -> dict[str, Any]:
        nonlocal decoder
        start = time.perf_counter()
        decoder = decoder or Decoder(shape, weights, tables, 0)
        made = time.perf_counter()
        crc = zlib.crc32(decoder.run(first).numpy().tobytes())
        return {"crc": crc, "graph_s": made - start, "pass_s": time.perf_counter() - made}

    def say_state() -> dict[str, Any]:
        found = client.query()
        return {"state": None if found is None else [found.version, list(found.engines), str(found.dirty)]}

    def move() -> dict[str, Any]:
        nonlocal layout
        start = time.perf_counter()
        rows = np.random.default_rng(3).permuted(layout.physical_to_logical_map, axis=1)
        layout = move_experts(
            stores,
            layout,
            ExpertLayout(rows, shape.per_rank, topology=Topology(1)),
            rank=0,
            transport=CudaIpc() if shape.device.type == "cuda" else SharedMemory(),
            agreement=LocalAgreement.group(1)[0],
            tables=tables,
            record=client,
        )
        return {"move_s": time.perf_counter() - start, "version": client.adopted}

    calls = {"pass": one_pass, "state": say_state, "move": move}
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(calls[pipe.recv()]())
