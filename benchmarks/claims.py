"""One table of what the records claim, each beside its peer: on this machine's processor, and on GPUs.

    python -m benchmarks --table            # docs/claims.md and the table of README.md, from benchmarks/results
    python -m benchmarks --out FOLDER       # runs all, then FOLDER/claims.md from what it found

A function here reads a benchmark's record and gives its claims, so that no figure is typed by hand. Parts that a record
does not have (peers that are absent, a quick run) make no claim.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import measure

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
PAGE, README = ROOT / "docs" / "claims.md", ROOT / "README.md"
MADE_BY = {
    "engine_nodes": "engine --preset nodes --nodes 2 --passes 100",
    "engines": "engines_vllm",
    "engines_auto": "engines_vllm --auto --ranks 8",
    "real_vllm_one_gpu": "real_vllm --one-gpu",
    "regimes_speed": "regimes --speed",
    "soak_engine": "engine --soak 450 --ranks 4",
}
"""Commands of records that have another name than their benchmark."""
MARKS = "<!-- figures: python -m benchmarks --table -->\n", "<!-- end of figures -->"
Record = dict[str, Any]


class Claim(NamedTuple):
    """A figure, and what it is to be compared with."""

    said: str
    ours: float
    unit: str = ""
    peer: float | None = None
    whose: str = ""
    more_is_better: bool = False

    environment: Record | None = None
    """Of this part of the record, where it has one of its own."""
    headline: str = ""
    """How the README says it; empty: not there."""

    @property
    def row(self) -> list[str]:
        """Cells but the last one."""
        if self.peer is None:
            return [self.said, self._figure(self.ours), "", ""]
        better, worse = (self.ours, self.peer) if self.more_is_better else (self.peer, self.ours)
        ratio = f"{_three_digits(better / worse)} x" if worse else ""
        return [self.said, self._figure(self.ours), f"{self._figure(self.peer)} ({self.whose})", ratio]

    def _figure(self, value: float) -> str:
        if not self.unit:  # counts are whole, balances have four digits
            return f"{value:,.0f}" if value == int(value) else f"{value:.4f}" if value < 1 else _three_digits(value)
        return f"{_three_digits(value)} {self.unit}"


def _three_digits(value: float) -> str:
    """Three digits that mean something, and whole numbers from a hundred on."""
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.9995 else 3
    return f"{value:,.{digits}f}"


def page(records: Mapping[str, Record], *, where: str) -> str:
    """Two tables, as Markdown; `where` is the folder that the records are in, as seen from the page."""
    rows: dict[bool, list[list[str]]] = {False: [], True: []}
    machines: dict[bool, dict[str, None]] = {False: {}, True: {}}
    for name in (name for name in CLAIMS if name in records):
        on_gpu, machine = _machine(records[name])
        for claim in _made(name, records[name]):
            environment = claim.environment or records[name]["environment"]
            commit, changes, _ = environment["commit"].partition(" and changes")
            source = f"[{name}]({where}/{name}.json), {commit[:7]}{'+' if changes else ''}"
            rows[on_gpu].append([*claim.row, source])
            machines[on_gpu][machine] = None
    parts = [HEAD]
    for on_gpu, title in ((False, "On a processor"), (True, "On GPUs")):
        if rows[on_gpu]:
            head = ["claim", "ours", "beside", "times better", "record, commit"]
            on = textwrap.fill(f"{'; '.join(machines[on_gpu])}.", 120)
            parts.append(f"## {title}\n\n{on}\n\n{measure.table(head, rows[on_gpu])}\n")
    return "\n".join(parts)


def readme(text: str, records: Mapping[str, Record]) -> str:
    """The README with the headlines of the records between its marks.

    Raises:
        ValueError: The marks are not there.
    """
    rows = [
        [claim.headline, *claim.row[1:3], f"`python -m benchmarks.{MADE_BY.get(name, name)}`"]
        for name in CLAIMS
        if name in records
        for claim in _made(name, records[name])
        if claim.headline
    ]
    before, start, rest = text.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not start or not end:
        raise ValueError(f"README.md must have the marks {MARKS[0].strip()} and {MARKS[1]}")
    table = measure.table(["", "eplb_core", "beside it", "measured by"], rows)
    return f"{before}{start}{table}\n{end}{after}"


HEAD = """# Every claim beside its peer

Made from the records by `python -m benchmarks --table`; `python -m benchmarks --out FOLDER` makes the same table on
your machine. Beside ours stands another project's code, or the simplest thing that does the work, in the same run on
the same input. "Times better" is theirs over ours for times, bytes and transfers, ours over theirs for balance and
bandwidth: less than 1 is worse. A record names its machine, versions and commit (+: with changes);
`python -m benchmarks --only NAME` makes it.
"""


def found(folder: Path) -> dict[str, Record]:
    """The records in a folder, by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def _made(name: str, record: Record) -> Iterator[Claim]:
    with contextlib.suppress(LookupError):  # a quick run or an absent peer: what follows has nothing to stand beside
        yield from CLAIMS[name](record)


def _machine(record: Record) -> tuple[bool, str]:
    """Whether the record is of a GPU, and its name or the processor's."""
    gpu = str(
        record.get("device")
        or record.get("gpu")
        or record["environment"].get("gpu")
        or record.get("processes", {}).get("shape", {}).get("gpu")
    )
    if gpu not in {"None", "none", "the CPU", "cpu", ""}:
        return True, gpu.split(" x ")[-1]
    environment = record["environment"]
    return (
        False,
        f"{environment['cpu'].replace('(R)', '')}, {environment['cores']} cores, Python {environment['python']}",
    )


# ---- one function a record ------------------------------------------------------------------------------------------


def _placement(record: Record) -> Iterator[Claim]:
    rows = [row for row in record["rows"] if row["slots"] == 288]
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        slowest: dict[str, float] = {}
        lowest: dict[str, float] = {}
        for row in rows:
            if row["ranks"] == ranks:
                policy, ms = row["policy"], row["times"]["median"] * 1e3
                slowest[policy] = max(ms, slowest.get(policy, 0.0))
                lowest[policy] = min(row["total_balancedness"], lowest.get(policy, 1.0))
        for peer in (name for name in slowest if name.startswith("vLLM") or name == "DeepSeek EPLB"):
            if "old map" in peer:
                continue
            at = f"58 layers, 256 experts in 288 slots, {ranks} ranks"
            place, drop_in = "eplb_core place", "eplb_core rebalance_experts"
            first = peer.startswith("vLLM") and ranks == 32
            said = f"plan {at}" if first else "", "balancedness of that plan, worst load" if first else ""
            yield Claim(f"`place`, {at}, slowest load", slowest[place], "ms", slowest[peer], peer, headline=said[0])
            yield Claim(f"`place`, {at}, lowest balance", lowest[place], "", lowest[peer], peer, True, None, said[1])
            yield Claim(f"`rebalance_experts`, {at}: equal answers", slowest[drop_in], "ms", slowest[peer], peer)


def _over_time(record: Record) -> Iterator[Claim]:
    rows = {row["policy"]: row for row in record["rows"]}
    ours = rows["eplb_core place, transfer_price=0.00025"]
    frugal = rows["eplb_core place, transfer_price=0.001"]
    for peer in (name for name in rows if name.endswith(("DeepSeek EPLB", "given the old map")) or name == "FlashLB"):
        theirs = rows[peer]
        said = "on windows not yet seen, topics that drift"
        yield Claim(f"balance {said}", ours["balancedness"], "", theirs["balancedness"], peer, True)
        yield Claim("... transfers for it", ours["transfers"], "", theirs["transfers"], peer)
        if theirs["balancedness"] < frugal["balancedness"]:
            known = peer.startswith("vLLM")
            first = "balancedness on later windows, topics drift" if known else "", "transfers for it" if known else ""
            balance, moved = (theirs[key] for key in ("balancedness", "transfers"))
            yield Claim("... at a higher price", frugal["balancedness"], "", balance, peer, True, None, first[0])
            yield Claim("... transfers for that", frugal["transfers"], "", moved, peer, headline=first[1])


def _from_layout(record: Record) -> Iterator[Claim]:
    times = {(row["case"], row["policy"], row["windows"]): row for row in record.get("times", [])}
    for case in dict.fromkeys(case for case, _, _ in times):
        ours = times[case, "eplb_core place, even", 1]
        for (where, peer, windows), theirs in times.items():
            if where == case and windows == 1 and peer.endswith(("given the old map", "DeepSeek EPLB")):
                yield Claim(f"`place(current=)`, {case}", ours["median_ms"], "ms", theirs["median_ms"], peer)
                yield Claim("... transfers a layer", ours["transfers"], "", theirs["transfers"], peer)


def _forecast(record: Record) -> Iterator[Claim]:
    for trace, gains in record["gains"].items():
        if "4 x" in gains:
            yield Claim(f"placing for four intervals instead of one, {trace}: balance gained", gains["4 x"])


def _dispatch(record: Record) -> Iterator[Claim]:
    host, drift = record["host"], record["drift"]
    ours, theirs = host["static, all ranks"]["median"] * 1e3, host.get("SGLang static, one rank's row")
    if theirs:
        peer = theirs["median"] * 1e3
        yield Claim("static tables of all ranks: equal answers", ours, "ms", peer, "SGLang, one rank's")
    if "limit" in drift:
        yield Claim("quotas on recorded drift: balance", drift["quota"], "", drift["limit"], "linear program", True)
        yield Claim("... beside an even split", drift["quota"], "", drift["even split"], "even split", True)


def _loading(record: Record) -> Iterator[Claim]:
    us, modes = record["lookups"]["us"], record["checkpoint"]["modes"]
    if "narrowed list" in us:
        yield Claim("slots of an expert, a look-up", us["local_slots"], "us", us["narrowed list"], "SGLang")
    ours, plain = modes["load_checkpoint"], modes["plain copy"]
    yield Claim("`load_checkpoint`", ours["mb_s"], "MB/s", plain["mb_s"], "safetensors, copied", True)
    yield Claim("... memory with the file's pages", ours["peak_all_mb"], "MB", plain["peak_all_mb"], "the same")


def _moving(record: Record) -> Iterator[Claim]:
    install, gaps = record["install_gb_s"], record["gaps"]
    yield Claim("a rank's plan where every slot changes", record["plans"]["every slot changes"]["median_ms"], "ms")
    yield Claim("`poll` with nothing to do, least of many", record["poll_us"]["in process"][1], "us")
    plain = install["torch copy_"][0]
    yield Claim("installs on the host", install["from staging"][0], "GB/s", plain, "torch's copy", True)
    yield Claim("a worker holds the interpreter, 99th percentile", gaps["workers' stretches"]["p99_us"], "us")


def _transports(record: Record) -> Iterator[Claim]:
    each = {name: entry["gb_s"]["median"] for name, entry in record["transports"].items() if "gb_s" in entry}
    ours = each.get("SharedMemory, any tensors")
    for peer in (name for name in each if name.startswith(("Nixl", "Mooncake", "TorchDistributed"))):
        if ours:
            yield Claim("`SharedMemory` between processes", ours, "GB/s", each[peer], peer, True)


def _record(record: Record) -> Iterator[Claim]:
    yield Claim("adopting a layout, connection to dispatch table", record["adopt"]["median_ms"], "ms")
    yield Claim("`begin` and `commit` of a layer", record["move"]["median_ms"], "ms")
    host = record["host"]
    copies = sum(host["proportional_share_bytes"]) / host["bytes"]
    yield Claim(
        f"weights in memory, {host['engines']} engines on a host", copies, "x the weights", host["engines"], "own ones"
    )


def _contents(record: Record) -> Iterator[Claim]:
    yield Claim("arrays read, as they are and cut, cast, turned, joined, misnamed", record["arrays"])
    yield Claim("of these, no load but taken for one without a doubt", len(record["taken_for_a_load"]))
    yield Claim("of these, loads that were refused", len(record["refused_loads"]))


def _optimal(record: Record) -> Iterator[Claim]:
    for row in record["rows"]:
        if row["ranks"] == "unequal":
            what = f"{row['dispatch']} shares on unequal ranks, effort {row['effort']:g}, {row['problems']:,} problems"
            if row["against"] == "MILP":
                yield Claim(f"{what}: mean gap to a MILP", row["mean gap"])
            else:
                yield Claim(f"{what}: equal to the best of all layouts", row["equal"], more_is_better=True)


def _few_transfers(record: Record) -> Iterator[Claim]:
    rows = {(row["kind"], row["side"]): row for row in record["rows"]}
    for kind in dict.fromkeys(kind for kind, _ in rows):
        before = rows.get((kind, "before"), {}).get("mean_gap")
        said = f"mean gap to the best row within the budget, {kind}"
        gap = round(rows[kind, "now"]["mean_gap"], 9)  # what is left below that is rounding
        yield Claim(said, gap, peer=before, whose="0.1.0")


def _affinity(record: Record) -> Iterator[Claim]:
    rows = {(row["tokens"], row["nodes"], row["layout"]): row for row in record["rows"]}
    for (tokens, nodes, layout), row in rows.items():
        if layout == "pairs":
            said = f"cross-node sends per token, {tokens}, {nodes} nodes, mode near"
            shown = (tokens, nodes) == ("dsv2lite_esft_law", 4)
            first = "sends to other nodes per token, DeepSeek-V2-Lite, 4 nodes" if shown else ""
            alone = rows[tokens, nodes, "place"]["sends near"]
            yield Claim(said, row["sends near"], peer=alone, whose="place alone", headline=first)


def _schedules(record: Record) -> Iterator[Claim]:
    yield Claim("schedules of engines and crashes, none served a wrong layout", record["schedules"])


def _record_faults(record: Record) -> Iterator[Claim]:
    yield Claim("schedules of failing system calls, no living engine was taken for gone", record["schedules"])


def _fuzz_record(record: Record) -> Iterator[Claim]:
    yield Claim("hostile messages to a record's server, none changed it", record["messages"])


def _soak_moves(record: Record) -> Iterator[Claim]:
    runs = record["runs"]
    losses = sum(run["scenario"] in {"killed", "stopped"} for run in runs)
    yield Claim("migrations of real processes over four transports", sum(run["migrations"] for run in runs))
    yield Claim("... with a rank killed or stopped in the middle", losses)
    yield Claim("... looks through dispatch, none at a slot without its expert", sum(run["looks"] for run in runs))


def _simulation(record: Record) -> Iterator[Claim]:
    for part in record["rows"].values():
        shape = ", ".join(f"{number:,}" for number in part["trace"])
        many = "one policy" if len(part["rows"]) == 1 else f"{len(part['rows'])} policies"
        yield Claim(f"replay of [{shape}] windows, layers, experts; {many}", part["cpu_s"], "s")


def _startup(record: Record) -> Iterator[Claim]:
    yield Claim("`import eplb_core`", record["import"]["import_s"] * 1e3, "ms")
    yield Claim("first `place` of a process", record["place"]["cached"]["first_s"], "s")


def _engines(record: Record) -> Iterator[Claim]:
    rows, at = {row["run"]: row for row in record["rows"]}, "50 rebalances by vLLM's own code, our policy"
    for way in ("synchronous", "asynchronous"):
        ours, theirs = rows.get(f"{way}, eplb_core"), rows.get(f"{way}, vLLM's default")
        if ours and theirs:
            yield Claim(f"{at}, {way}: transfers", ours["transfers"], "", theirs["transfers"], "its default")
            yield Claim("... balance", ours["balance"], "", theirs["balance"], "its default", True)
    for plan in record["plans"]:
        said = f"a plan inside the adapter, {plan['input']}"
        yield Claim(said, plan["adapter_s"] * 1e3, "ms", plan["library_s"] * 1e3, "the library's own call")


def _engines_auto(record: Record) -> Iterator[Claim]:
    default, *rows = record["rows"]
    for row in rows:
        often = row["run"] == "auto, every 2 windows"
        said = f"vLLM's own code, {record['ranks']} processes, mode {row['run']}: balance of the windows that follow"
        first = "balancedness in vLLM's own EPLB code, Balancer every 2 windows" if often else ""
        whose, (reached, moved) = "its default, every 10", (default["balance"], default["transfers"])
        yield Claim(said, row["balance"], "", reached, whose, more_is_better=True, headline=first)
        first = "transfers for it" if often else ""
        yield Claim("... transfers for that", row["transfers"], "", moved, whose, headline=first)


def _regimes_speed(record: Record) -> Iterator[Claim]:
    layers, experts, *_ = record["shape"]
    for what, each in record["speed"].items():
        yield Claim(f"Balancer, {layers} x {experts}, 128 windows: {what}, median", each["median_ms"], "ms")
    yield Claim("... propose, after a change, at most", record["speed"]["propose, after a change"]["max_ms"], "ms")
    yield Claim("... first placement of all layers", record["first_s"], "s")


def _engines_sglang(record: Record) -> Iterator[Claim]:
    rows = {row["run"]: row for row in record["rows"]}
    for way in ("static", "dynamic"):
        theirs, said = (
            rows[f"{way}, SGLang"],
            f"{rows[f'{way}, SGLang']['rebalances']} rebalances by SGLang, our policy",
        )
        for name, row in rows.items():
            if name.startswith(f"{way}, eplb_core"):
                yield Claim(f"{said}, {name}: transfers", row["transfers"], "", theirs["transfers"], "SGLang's own")
                yield Claim("... balance", row["balance"], "", theirs["balance"], "SGLang's own", True)
                break


def _real(record: Record) -> Iterator[Claim]:
    where = "" if record["times_count"] else ", two ranks on one GPU"
    rows = {row["run"]: row for row in record["rows"] if row.get("checks")}
    for run, row in rows.items():
        slots, wrong = (sum(check[name] for check in row["checks"]) for name in ("slots", "wrong_slots"))
        said = f"real {record['engine']}{where}, {run}: wrong of {slots:,} slots"
        first = "" if run.startswith("own") else f"wrong of {slots:,} slots, real {record['engine']} server{where}"
        yield Claim(said, wrong, headline=first)
        own = rows.get(run.split("_cuda")[0].replace("plugin", "own"), row)
        if own is not row:
            whose = f"{record['engine']}'s own, asynchronous" if own["run"] == "own_async" else own["run"]
            first = "... experts received" if first else ""
            yield Claim("... experts received", row["received"], "", own["received"], whose, headline=first)
            yield Claim("... balance by tokens", row["balance"], "", own["balance"], whose, True)


def _engine_versions(record: Record) -> Iterator[Claim]:
    whole = [row for row in record["rows"] if row["parts"] and all(part["status"] == "works" for part in row["parts"])]
    said = f"of {len(record['rows'])} versions of vLLM and SGLang, those in which all parts of the plug-ins work"
    yield Claim(said, len(whole))


def _engine(record: Record) -> Iterator[Claim]:
    if "skewed" in record:
        after, before = record["skewed"]["after"]["balancedness"], record["skewed"]["before"]["balancedness"]
        yield Claim("reference engine, skewed load: balance", after, "", before, "before the first migration", True)
    modes = record["modes"]
    if {"off", "async"} <= modes.keys():
        ours, off = modes["async"]["balancedness"], modes["off"]["balancedness"]
        yield Claim("... drifting load: balance", ours, "", off, "off", True)
    if "soak" in record:
        soak = record["soak"]
        said = ("soak: tokens compared", soak["tokens_compared"]), ("of them wrong", soak["wrong_tokens"])
        for what, number in (*said, ("faults survived", sum(soak["faults"].values()))):
            yield Claim(f"... {what}", number, environment=soak["environment"])


def _engine_nodes(record: Record) -> Iterator[Claim]:
    rows = {row["dispatch"]: row for row in record["rows"]}
    near, far = rows["near"], rows["weighted"]
    said = f"reference engine, {record['shape']['ranks']} ranks in {record['shape']['nodes']} nodes: sends per token"
    yield Claim(f"{said}, near with pairs", near["sends"], peer=far["sends"], whose="weighted, without pairs")
    yield Claim("... predicted from the pairs", near["predicted"])
    yield Claim("... tokens compared, none wrong", near["tokens_compared"] + far["tokens_compared"])


def _soak_engine(record: Record) -> Iterator[Claim]:
    soak = record["soak"]
    shared = "engines" in soak
    said = "shared weights: engines killed in turn" if shared else "ranks killed, stopped, joined, reloaded at random"
    faults = soak["engines"] if shared else sum(soak["faults"].values())
    yield Claim(f"soaks of {soak['seconds'] / 60:.0f} minutes in all, {said}", faults)
    yield Claim("... tokens compared", soak["tokens_compared"])
    first = "" if shared else f"wrong tokens of {soak['tokens_compared']:,}, ranks killed, stopped, joined at random"
    yield Claim("... of them wrong", soak["wrong_tokens"], headline=first)


def _engine_gpu(record: Record) -> Iterator[Claim]:
    for part, said in (
        ("threads", "4 ranks as threads, one GPU"),
        ("processes", "4 processes share one GPU"),
        ("two_gpus", "2 ranks, a GPU each"),
    ):
        modes = record[part]["modes"]
        for ms in ("p99", "worst"):
            ours, off, stop = (modes[mode][f"{ms}_ms"] for mode in ("async", "off", "sync"))
            what, here = f"reference engine, {said}, asynchronous: {ms} pass", record[part]["environment"]
            yield Claim(what, ours, "ms", off, "off", environment=here)
            yield Claim("... the same", ours, "ms", stop, "synchronous", environment=here)


def _dispatch_gpu(record: Record) -> Iterator[Claim]:
    us = record["microseconds"]
    for tokens in us["torch: random replicas"]:
        ours, torch = us["weighted: map + count"][tokens][0], us["torch: random replicas"][tokens][0]
        said = f"map and count of {int(tokens):,} tokens x 8"
        first = f"{said} (H200)" if int(tokens) == 4096 else ""
        yield Claim(said, ours, "us", torch, "torch operations, map alone", headline=first)
    for tokens in ("512", "4096"):
        for name, nodes in (("near", 4), ("near, 8 nodes", 8)):
            if (key := f"{name}: map + count") in us:
                said = f"map and count of {int(tokens):,} tokens x 8, mode near, {nodes} nodes"
                yield Claim(said, us[key][tokens][0], "us", us["weighted: map + count"][tokens][0], "mode weighted")


def _fingerprint_gpu(record: Record) -> Iterator[Claim]:
    for name, entry in record.items():
        if isinstance(entry, dict) and "full_gb_s" in entry:
            ours, plain = entry["full_gb_s"], entry["reduction_gb_s"]
            yield Claim(f"fingerprints, {name}", ours, "GB/s", plain, "torch's sum", True)
            found, injected = entry["faults_found"], entry["faults_injected"]
            yield Claim("... faults found", found, "", injected, "faults put in", True)


def _moving_gpu(record: Record) -> Iterator[Claim]:
    install = record["install"]
    ours, plain = install["from staging"]["kernel"]["gb_s"], install["plain copy"]["gb_s"]
    yield Claim("install of a layer", ours, "GB/s", plain, "plain device copy", True)
    decode = record["ranks"]["by_rank"][0]["decode"]
    moving = _asynchronous(decode)
    for ms in ("p50", "p99", "worst"):
        said = f"{ms} pass while 58 layers move"
        first = "p99 pass while 58 layers move (H200)" if ms == "p99" else ""
        yield Claim(said, moving[ms], "ms", decode["off"]["all"][ms], "no moves", headline=first)
        buffers = decode["temporary buffers and device synchronize"]["moving"][ms]
        whose = "temporary buffers, as engines do"
        yield Claim("... the same", moving[ms], "ms", buffers, whose, headline="... the same" if first else "")
    attach = record["host"]["first engine"]
    yield Claim(f"mapping {attach['bytes'] / 1e9:.1f} GB of a weight host", attach["attach_s"] * 1e3, "ms")


def _multi_gpu(record: Record) -> Iterator[Claim]:
    first = record["ranks"]["by_rank"][0]
    transport = {"ipc": "CUDA IPC", "nccl": "NCCL"}[record["sizes"]["transport"]]
    ways = list(first["ipc"].values())
    reads = statistics.median(run["reading_gb_s"] for run in ways[0])
    plain = record["plain_copy_both_ways_gb_s"]
    yield Claim(f"migration between two GPUs by {transport}, reads", reads, "GB/s", plain, "copies both ways", True)
    moving = _asynchronous(first["decode"])
    for ms in ("p50", "worst"):
        off = first["decode"]["off"]["all"][ms]
        yield Claim(f"... {ms} pass while 41 GB a GPU move", moving[ms], "ms", off, "no moves")
    for way, grid in first["grid"].items():
        said = f"... {grid['migrations']:,} migrations ({way}) beside kernels that fill every core: blocks that gave up"
        yield Claim(said, grid["blocks_that_gave_up"], environment=record["grid_environment"])


def _transport_gpu(record: Record) -> Iterator[Claim]:
    kind = record["kinds"]["batched, prefer overlap"]
    plain = record["plain_copy_gb_s"]
    yield Claim("`CudaIpc` on one GPU, a reader", kind["one_reader"]["gb_s"], "GB/s", plain, "plain copy", True)
    yield Claim("... all readers together", kind["all_readers_gb_s"], "GB/s", plain, "plain copy", True)


def _asynchronous(decode: Record) -> dict[str, float]:
    """Milliseconds of the passes in which layers move, of the first way of moving."""
    for name, entry in decode.items():
        if name.startswith("asynchronous"):
            times: dict[str, float] = entry["moving"]
            return times
    raise KeyError("asynchronous")


def _regimes(record: Record) -> Iterator[Claim]:
    for cost in dict.fromkeys(row["move_cost"] for row in record["judged"]):
        rows = [row for row in record["judged"] if row["move_cost"] == cost]
        said = f"`Balancer`, {len(rows)} kinds of traffic, move cost {cost:g}: balance less cost of moves"
        ours, best = (statistics.fmean(row[name] for row in rows) for name in ("utility", "best"))
        yield Claim(said, ours, "", best, "each one's best fixed setting in hindsight", True)


def _against(record: Record) -> Iterator[Claim]:
    rows = record["rows"]
    yield Claim(f"answers of {len(rows)} calls that are equal to those of 0.1.0", sum(row["equal"] for row in rows))
    slow = max(rows, key=lambda row: row["this_s"] / row["other_s"])
    yield Claim(
        f"... the slowest beside it: {slow['case']}", slow["this_s"] * 1e3, "ms", slow["other_s"] * 1e3, "0.1.0"
    )


# In the order of the page.
CLAIMS: dict[str, Callable[[Record], Iterator[Claim]]] = {
    "placement": _placement,
    "over_time": _over_time,
    "from_layout": _from_layout,
    "forecast": _forecast,
    "dispatch": _dispatch,
    "loading": _loading,
    "moving": _moving,
    "transports": _transports,
    "engines": _engines,
    "engines_auto": _engines_auto,
    "regimes_speed": _regimes_speed,
    "engines_sglang": _engines_sglang,
    "engines_vllm": _engines,
    "engine_versions": _engine_versions,
    "real_sglang": _real,
    "real_vllm": _real,
    "real_vllm_one_gpu": _real,
    "engine": _engine,
    "engine_nodes": _engine_nodes,
    "soak_engine": _soak_engine,
    "soak_engine_shared": _soak_engine,
    "record": _record,
    "contents": _contents,
    "optimal": _optimal,
    "few_transfers": _few_transfers,
    "affinity": _affinity,
    "schedules": _schedules,
    "record_faults": _record_faults,
    "fuzz_record": _fuzz_record,
    "soak_moves": _soak_moves,
    "simulation": _simulation,
    "startup": _startup,
    "against": _against,
    "regimes": _regimes,
    "dispatch_gpu": _dispatch_gpu,
    "fingerprint_gpu": _fingerprint_gpu,
    "moving_gpu": _moving_gpu,
    "transport_gpu": _transport_gpu,
    "multi_gpu": _multi_gpu,
    "multi_gpu_nccl": _multi_gpu,
    "engine_gpu": _engine_gpu,
}
