"""What the benchmarks of real servers share: a model made on the spot, the server, requests, checks, tables.

The model is a Qwen3-MoE with seeded weights. Each token belongs to a topic, whose direction lies in its embedding and
in the rows of the routers; requests go from topic to topic, so that the hot experts change, and the ranks with them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import measure
from benchmarks.ranks import Peer, collect
from benchmarks.real_probe import FOLDER, ONE_GPU

Row = dict[str, Any]
TOPICS, RANKS, SPECIAL = 4, 2, 3
"""Kinds of text; GPUs; tokens that belong to no topic."""
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_sparse_step": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "max_position_embeddings": 4096,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 8192,
}


class Engine(NamedTuple):
    """What differs between engines."""

    name: str
    runs: dict[str, tuple[Any, dict[str, str]]]
    """Of each run: what its command is told of EPLB (None: off), and what the environment says in addition."""
    command: Callable[[argparse.Namespace, Any, int], list[str]]
    """Options, EPLB's settings and the port to words."""
    environment: dict[str, str]
    rebalance: str
    """What the log says once for each rebalance; a regular expression."""
    balance: str = ""
    """What the log says of balance: mean and largest load of the ranks; empty: the probe counts it."""
    logs: int = 1
    """Ranks that write the line of a rebalance."""


# ---- the model and what it is asked ----------------------------------------------------------------------------------


def make_model(folder: Path, config: dict[str, Any] = CONFIG, seed: int = 1) -> None:
    """Write the model, of 1.7 GB, and a tokenizer of one word a token."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, std: float = 0.0) -> torch.Tensor:
        return torch.randn(*shape, generator=made, device=device) * (std or shape[-1] ** -0.5)

    hidden, experts, vocab = config["hidden_size"], config["num_experts"], config["vocab_size"]
    inner, heads = config["moe_intermediate_size"], config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    topics = torch.nn.functional.normalize(normal(TOPICS, hidden, std=1.0), dim=-1)
    topic_of = topics[(torch.arange(vocab, device=device)) % TOPICS]
    tensors = {
        "model.embed_tokens.weight": normal(vocab, hidden, std=1.0) + 0.8 * math.sqrt(hidden) * topic_of,
        "lm_head.weight": normal(vocab, hidden, std=0.5) + 0.1 * math.sqrt(hidden) * topic_of,
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, rows, columns in (("q", heads, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, heads)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = normal(rows, columns)
        for name, size in (("self_attn.q_norm", config["head_dim"]), ("self_attn.k_norm", config["head_dim"])):
            tensors[f"{at}{name}.weight"] = torch.ones(size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = torch.ones(hidden)
        # A topic likes some experts, and those of one half of the ranks a little more, another half in the next layer.
        half = (torch.arange(experts, device=device) < experts // 2).float() * 2 - 1
        sides = torch.tensor([[1.0 if (topic + layer) % 2 else -1.0] for topic in range(TOPICS)], device=device)
        liking = normal(TOPICS, experts, std=1.5) + 0.4 * sides * half
        tensors[f"{at}mlp.gate.weight"] = normal(experts, hidden) + liking.T @ topics / 0.6 / math.sqrt(hidden)
        for expert in range(experts):
            for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
                tensors[f"{at}mlp.experts.{expert}.{name}_proj.weight"] = normal(rows, columns)
    save_file({name: each.bfloat16().cpu() for name, each in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(SPECIAL, vocab)}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    whole: Row = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": model,
        **parts,
    }
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    kept = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))


def prompts(number: int, seed: int, vocab: int = CONFIG["vocab_size"]) -> list[list[int]]:
    """Token ids; four of five tokens are of the topic of the hour, and the topics pass twice."""
    chance = random.Random(seed)
    made = []
    for request in range(number):
        topic = request * 2 * TOPICS // number % TOPICS
        tokens = [chance.randrange(SPECIAL, vocab) for _ in range(chance.randrange(48, 256))]
        near = [max(SPECIAL, token - TOPICS) // TOPICS * TOPICS + topic for token in tokens]
        chosen = [one if chance.random() < 0.8 else other for one, other in zip(near, tokens, strict=True)]
        made.append([max(SPECIAL, token) for token in chosen])
    return made


# ---- requests --------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """When what of an answer came, in seconds of `time.perf_counter`."""

    asked: float
    at: list[float]
    """When each piece came."""
    tokens: int


def tokens_in(line: bytes) -> int | None:
    """Tokens so far, as a line of the stream says; None: it says nothing.

    Raises:
        RuntimeError: it is an error of the server.
    """
    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
        return None
    said = json.loads(line[6:])
    if "error" in said or said.get("object") == "error":
        raise RuntimeError(f"the server said {str(said)[:300]}")
    return (said.get("usage") or {}).get("completion_tokens")


async def ask(port: int, prompt: Sequence[int], tokens: int) -> Answer:
    """Stream one greedy answer of so many tokens."""
    said = {"model": "model", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    said |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    body = json.dumps(said).encode()
    asked, at, sofar = time.perf_counter(), [], 0
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    try:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        )
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"the server answered {status!r} {(await reader.read(2000))[-300:]!r}")
        while line := await reader.readline():
            now = tokens_in(line)
            if now is not None and now > sofar:
                sofar = now
                at.append(time.perf_counter())
    finally:
        writer.close()
    if sofar != tokens:
        raise RuntimeError(f"an answer of {tokens} tokens ended after {sofar}")
    return Answer(asked, at, sofar)


async def ask_all(port: int, load: Iterable[Sequence[int]], tokens: int, at_once: int) -> list[Answer]:
    """The answers, in the order in which they end."""
    waiting, answers = iter(load), []

    async def client() -> None:
        for prompt in waiting:
            answers.append(await ask(port, prompt, tokens))

    await asyncio.gather(*(client() for _ in range(at_once)))
    return answers


def summary_of(answers: Sequence[Answer], pauses: Sequence[tuple[float, float]]) -> Row:
    """Tokens a second, time to the first token and between tokens, in ms; what overlaps a pause is left out.

    Args:
        answers: One at least.
        pauses: Begin and end of each check, in which the engine read its weights instead of serving.
    """

    def paused(begin: float, end: float) -> float:
        return sum(max(0.0, min(end, until) - max(begin, since)) for since, until in pauses)

    def between(begin: float, end: float) -> list[float]:
        return [] if paused(begin, end) else [end - begin]

    first = [gap for each in answers for gap in between(each.asked, each.at[0])]
    gaps = [gap for each in answers for pair in zip(each.at, each.at[1:], strict=False) for gap in between(*pair)]
    begin, end = min(each.asked for each in answers), max(each.at[-1] for each in answers)
    seconds = end - begin - paused(begin, end)
    return {
        "requests": len(answers),
        "seconds": seconds,
        "tokens_per_s": sum(each.tokens for each in answers) / seconds,
        "first_token_ms": quantiles(first),
        "between_tokens_ms": quantiles(gaps),
        "gaps": len(gaps),
    }


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and worst, in ms."""
    values = sorted(seconds) or [math.nan]
    at = {"p50": 0.5, "p99": 0.99, "worst": 1.0}
    return {name: 1e3 * values[min(len(values) - 1, int(share * len(values)))] for name, share in at.items()}


# ---- checks ----------------------------------------------------------------------------------------------------------


def verify(first: Sequence[Row], now: Sequence[Row]) -> Row:
    """Whether every slot holds the expert that its rank's map says, bit for bit as it was in the beginning.

    Args:
        first: Answers of all ranks from before the first move, by rank.
        now: Answers of all ranks.
    """
    wrong = checked = twice = 0
    for layer in range(len(first[0]["rows"])):
        truth: dict[int, set[int]] = {}
        for rank, answer in enumerate(first):
            for expert, value in _held(answer, rank, layer):
                truth.setdefault(expert, set()).add(value)
        different = len(set().union(*truth.values())) == len(truth)  # else nothing could be told by the values
        for rank, answer in enumerate(now):
            held = _held(answer, rank, layer)
            checked += len(held)
            wrong += sum(not different or truth.get(expert) != {value} for expert, value in held)
            experts = [expert for expert, _ in held]
            twice += len(experts) - len(set(experts))
    together = len({answer["step"] for answer in now}) == 1
    return {
        "slots": checked,
        "wrong_slots": wrong,
        "wrong_entries": sum(answer["wrong_entries"] for answer in now),
        "twice_on_a_rank": twice,
        "slots_changed": _differences(first[0]["rows"], now[0]["rows"]),
        "maps_differ": together and any(answer["rows"] != now[0]["rows"] for answer in now),
    }


def _held(answer: Row, rank: int, layer: int) -> list[tuple[int, int]]:
    prints = answer["prints"][layer]
    own = answer["rows"][layer][rank * len(prints) : (rank + 1) * len(prints)]
    return list(zip(own, prints, strict=True))


def _differences(one: list[list[int]], two: list[list[int]]) -> int:
    return sum(a != b for row, other in zip(one, two, strict=True) for a, b in zip(row, other, strict=True))


def counted_between(before: Sequence[Row], after: Sequence[Row]) -> Row:
    """What the ranks counted from one check to the next."""
    pairs = [(old["counted"], new["counted"]) for old, new in zip(before, after, strict=True)]
    row: Row = {"received": sum(new["received"] - old["received"] for old, new in pairs)}
    for name in ("same", "changed"):
        times = [each for old, new in pairs for each in new[f"{name}_s"][len(old[f"{name}_s"]) :]]
        row[f"layer_{name}_ms"] = {"layers": len(times), **(quantiles(times) if times else {})}
    mean, worst = (pairs[0][1]["balance"][i] - pairs[0][0]["balance"][i] for i in (0, 1))
    if worst:
        row["balance"] = mean / worst
    return row


def said_in(log: str, engine: Engine) -> Row:
    """Rebalances, balance by tokens, what the plug-in says of itself, and errors, as a server's log has them."""
    lines = log.splitlines()
    row: Row = {
        "rebalances": len(re.findall(engine.rebalance, log)) // engine.logs,
        "lines": sorted({line.split("eplb_core: ", 1)[1][:300] for line in lines if "eplb_core: in effect" in line}),
        "fallbacks": sorted({line.split("eplb_core: ", 1)[1][:300] for line in lines if "engine's own" in line}),
        "errors": [line[:300] for line in lines if "ERROR" in line or "Traceback" in line][:10],
    }
    found = [(float(mean), float(worst)) for mean, worst in re.findall(engine.balance, log)] if engine.balance else []
    if found and sum(worst for _, worst in found):
        row["balance"] = sum(mean for mean, _ in found) / sum(worst for _, worst in found)
    return row


# ---- a server --------------------------------------------------------------------------------------------------------


class Server:
    """An engine's server in a process group of its own, with the probe in it; a context manager.

    Raises:
        RuntimeError: it ended, or was not ready in time; with the end of its log.
    """

    def __init__(self, engine: Engine, options: argparse.Namespace, run: str, folder: Path) -> None:
        self.folder, self.asked = folder, -1
        eplb, environment = engine.runs[run]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        folder.mkdir(parents=True)
        _write_entry_points(folder / "plugin")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("EPLB_CORE")}
        paths = [str(folder / "plugin"), str(measure.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = engine.environment | inherited | environment | {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(paths)}
        if options.one_gpu:
            env |= {ONE_GPU: "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        self.began = time.time()
        self.log = folder / "log"
        with self.log.open("w") as log:
            command = engine.command(options, eplb, self.port)
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            self._wait(options.start_limit)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.time() - self.began

    def _wait(self, seconds: float) -> None:
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self._tail()}")
            if time.time() - self.began > seconds:
                raise RuntimeError(f"the server was not ready after {seconds:g} s:\n{self._tail()}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)

    def _tail(self) -> str:
        return "\n".join(line[:300] for line in self.log.read_text(errors="replace").splitlines()[-40:])

    async def ask_ranks(self, seconds: float = 60.0) -> list[Row]:
        """Every rank's answer; requests of one token make the engine step where nothing else does."""
        self.asked += 1
        if self.asked:
            (self.folder / f"ask-{self.asked}").touch()
        files = [self.folder / f"answer-{self.asked}.{rank}.json" for rank in range(RANKS)]
        until = time.monotonic() + seconds
        while not all(file.exists() for file in files):
            if time.monotonic() > until:
                raise RuntimeError(f"ranks did not answer within {seconds:g} s:\n{self._tail()}")
            await ask(self.port, [SPECIAL], 2)
        return [json.loads(file.read_text()) for file in files]

    def stop(self) -> None:
        """End its processes, all of them; again is nothing."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            until = time.monotonic() + 10
            while number == signal.SIGTERM and self.process.poll() is None and time.monotonic() < until:
                time.sleep(0.1)
        self.process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _write_entry_points(folder: Path) -> None:
    """A distribution by which engines find the probe."""
    info = folder / "real_probe-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: real_probe\nVersion: 1\n")
    groups = (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang"))
    text = "".join(f"[{group}]\nreal_probe = benchmarks.real_probe:{name}\n" for group, name in groups)
    (info / "entry_points.txt").write_text(text)


async def _measure(server: Server, options: argparse.Namespace, eplb: bool) -> Row:
    """A warm-up, the load with checks at its thirds, a check at the end."""
    pauses: list[tuple[float, float]] = []
    asked: list[list[Row]] = []

    async def check() -> None:
        began = time.perf_counter()
        asked.append(await server.ask_ranks())
        pauses.append((began, time.perf_counter()))

    first = await server.ask_ranks() if eplb else []
    await ask_all(server.port, prompts(2 * options.at_once, 1), 8, options.at_once)
    if eplb:
        await check()
        pauses.clear()
    load, given = prompts(options.requests, 2), 0
    at = {len(load) // 3, 2 * len(load) // 3} if eplb else set()
    checks: list[asyncio.Task[None]] = []

    def handed_out() -> Iterable[list[int]]:
        nonlocal given
        for prompt in load:
            given += 1
            if given in at:
                checks.append(asyncio.create_task(check()))
            yield prompt

    answers = await ask_all(server.port, handed_out(), options.tokens, options.at_once)
    await asyncio.gather(*checks)
    row = summary_of(answers, pauses)
    if eplb:
        await check()
        row["checks"] = [verify(first, each) for each in asked]
        row |= counted_between(asked[0], asked[-1])
    return row


def serve(engine: Engine, options: argparse.Namespace, run: str, folder: Path) -> Row:
    """One run of one server."""
    with Server(engine, options, run, folder) as server:
        row = asyncio.run(_measure(server, options, engine.runs[run][0] is not None))
        row["start_s"] = server.start_s
    return row | said_in(server.log.read_text(errors="replace"), engine)


# ---- all runs --------------------------------------------------------------------------------------------------------


def main(engine: Engine, name: str, about: str, argv: Sequence[str] | None) -> int:
    """Run servers in turns, print a table, write the record; 1 where a slot was wrong or a run failed."""
    parser = measure.parser(name, about, quick="one short turn")
    parser.add_argument("--runs", nargs="+", choices=engine.runs, default=list(engine.runs), metavar="NAME")
    parser.add_argument("--model", type=Path, default=Path(tempfile.gettempdir(), "real_model"), help="made if absent")
    parser.add_argument("--out", type=Path, help="folder for logs (default: a new one)")
    parser.add_argument("--repeats", type=int, default=3, help="turns; each second one goes backwards")
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--at-once", type=int, default=64, help="requests")
    parser.add_argument("--interval", type=int, default=64, help="steps from one rebalance to the next")
    parser.add_argument("--start-limit", type=float, default=300.0, help="seconds for a server to start")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no run is started")
    parser.add_argument("--one-gpu", action="store_true", help="both ranks on one GPU: checks count, times do not")
    options = parser.parse_args(argv)
    if options.quick:
        options.repeats, options.requests = 1, 200
    absent = absence(engine.name, options.one_gpu)
    if absent:
        print(f"absent: {absent}")
        measure.write_json(options.json, {"summary": []})
        return 0
    if not (options.model / "config.json").exists():
        make_model(options.model)
    out = options.out or Path(tempfile.mkdtemp(prefix=f"{name}_"))
    began, rows = time.time(), []
    for turn in range(options.repeats):
        for run in options.runs[:: -1 if turn % 2 else 1]:
            if time.time() - began > options.limit:
                continue
            row: Row = {"run": run, "turn": turn}
            try:
                row |= serve(engine, options, run, out / f"{run}-{turn}")
            except Exception as error:  # the other runs say what they say
                row["error"] = f"{type(error).__name__}: {error}"
            rows.append(row)
            print(json.dumps(measure.rounded(row)), file=sys.stderr, flush=True)
            _record(engine, options, rows)  # what is there so far, should a later run never end
    print(table(rows, options.one_gpu))
    print(*summary_lines(rows, engine.name, options.one_gpu), f"logs: {out}", sep="\n")
    return int(any("error" in row or wrong_in(row) for row in rows))


def absence(engine: str, one_gpu: bool) -> str:
    """What is missing for a run here; empty if nothing."""
    if not version(engine):
        return f"{engine} is not installed here"
    found, needed = torch.cuda.device_count(), 1 if one_gpu else RANKS
    if found < needed:
        return f"{needed} GPUs (found {found})"
    return share_a_gpu() if one_gpu else ""


def share_a_gpu(seconds: float = 90.0) -> str:
    """Why two ranks cannot use NCCL on one GPU; empty if they can. NCCL >= 2.30 lets them."""
    with tempfile.TemporaryDirectory() as folder:
        said, _ = collect([Peer(_sum_on_one_gpu, folder, rank) for rank in range(RANKS)], seconds)
    return next((f"NCCL with two ranks on a GPU: {each}" for each in said if each != "fine"), "")


def _sum_on_one_gpu(pipe: Any, folder: str, rank: int) -> None:
    import torch.distributed

    dist: Any = torch.distributed
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    try:
        dist.init_process_group("nccl", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
        ones = torch.full((1 << 20,), rank + 1.0, device="cuda:0")
        for _ in range(3):
            dist.all_reduce(ones)
        torch.cuda.synchronize()
        pipe.send("fine" if bool((ones == 12).all()) else f"a wrong sum, {ones[0]}")
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}"[:500])


def wrong_in(row: Row) -> int:
    """Wrong slots and entries of a run's checks, and maps that differ."""
    return sum(each["wrong_slots"] + each["wrong_entries"] + each["maps_differ"] for each in row.get("checks", []))


def table(rows: Sequence[Row], one_gpu: bool) -> str:
    """One line a run, medians over its turns."""
    head = ["run (medians of its turns)", "turns", "tokens/s", "first token p50 / p99", "between p50 / p99 / worst, ms"]
    head += ["rebalances", "received", "wrong slots", "twice", "balance", "layer same / changed, ms"]
    if one_gpu:
        head[2:5] = [f"{each} (one GPU)" for each in head[2:5]]
    cells = []
    for run in dict.fromkeys(row["run"] for row in rows):
        own = [row for row in rows if row["run"] == run and "error" not in row]
        if not own:
            cells.append([run, "failed", *["-"] * (len(head) - 2)])
            continue

        def middle(*path: str, own: list[Row] = own) -> str:
            values = [value for row in own if isinstance(value := _at(row, path), int | float)]
            return f"{statistics.median(values):,.4g}" if values else "-"

        checks = [check for row in own for check in row.get("checks", [])]
        cells.append(
            [
                run,
                str(len(own)),
                middle("tokens_per_s"),
                " / ".join(middle("first_token_ms", each) for each in ("p50", "p99")),
                " / ".join(middle("between_tokens_ms", each) for each in ("p50", "p99", "worst")),
                middle("rebalances"),
                middle("received"),
                f"{sum(each['wrong_slots'] for each in checks)} of {sum(each['slots'] for each in checks)}",
                str(checks[-1]["twice_on_a_rank"]) if checks else "-",
                middle("balance"),
                " / ".join(middle(f"layer_{each}_ms", "p50") for each in ("same", "changed")),
            ]
        )
    return measure.table(head, cells)


def _at(row: Any, path: Sequence[str]) -> Any:
    for step in path:
        row = row.get(step, {})
    return row


def summary_lines(rows: Sequence[Row], engine: str, one_gpu: bool) -> list[str]:
    """For the screen of all benchmarks."""
    checks = [check for row in rows for check in row.get("checks", [])]
    failed = sorted({row["run"] for row in rows if "error" in row})
    lines = [
        f"real {engine} server{' (two ranks on one GPU)' if one_gpu else ''}, {len(rows)} runs: "
        f"{sum(each['wrong_slots'] for each in checks)} of {sum(each['slots'] for each in checks):,} slots wrong, "
        f"during and after the load"
    ]
    return lines + [f"failed: {', '.join(failed)}"] * bool(failed)


def version(package: str) -> str:
    """Of what is installed here; empty if it is not."""
    try:
        return metadata.version(package.lower())
    except metadata.PackageNotFoundError:
        return ""


def _record(engine: Engine, options: argparse.Namespace, rows: Sequence[Row]) -> None:
    versions = {name: version(name) for name in (engine.name, "eplb_core", "torch", "transformers", "triton")}
    nccl: Any = torch.cuda.nccl
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    kept = {key: value for key, value in vars(options).items() if isinstance(value, bool | int | str)}
    measure.write_json(
        options.json,
        {
            "summary": summary_lines(rows, engine.name, options.one_gpu),
            "engine": engine.name,
            "versions": versions | {"nccl": ".".join(map(str, nccl.version())) if gpu != "none" else ""},
            "gpu": gpu,
            "times_count": not options.one_gpu,
            "options": kept,
            "rows": measure.rounded(list(rows)),
        },
    )
