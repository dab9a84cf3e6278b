"""The benchmarks of real servers, as far as no engine is needed: load, streams, checks, a server that stands in."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import measure, real_engines, real_probe, real_sglang, real_vllm
from benchmarks.real_engines import TOPICS, Answer
from tests.benchmarks.real_server import BASE, MOVED, Ranks

OPTIONS = argparse.Namespace(model="m", at_once=64, interval=32, one_gpu=False, requests=24, tokens=8, start_limit=60.0)


def stand_in(options: argparse.Namespace, eplb: Any, port: int) -> list[str]:
    return [sys.executable, "-m", "tests.benchmarks.real_server", str(port), eplb or "off"]


ENGINE = real_vllm.ENGINE._replace(command=stand_in, runs={"off": (None, {}), "right": ("right", {})})


def test_prompts_go_from_topic_to_topic_twice() -> None:
    load = real_engines.prompts(80, 1, vocab=400)
    assert load == real_engines.prompts(80, 1, vocab=400)
    assert all(3 <= token < 400 for prompt in load for token in prompt)
    most = [max(range(TOPICS), key=lambda topic: sum(t % TOPICS == topic for t in prompt)) for prompt in load]
    assert most == [request // 10 % TOPICS for request in range(80)]


def test_a_stream_says_its_tokens_and_its_errors() -> None:
    assert real_engines.tokens_in(b"data: [DONE]\n") is None
    assert real_engines.tokens_in(b"1f\r\n") is None
    assert real_engines.tokens_in(b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n') == 3
    assert real_engines.tokens_in(b'data: {"choices": [], "usage": null}\n') is None
    with pytest.raises(RuntimeError, match="out of memory"):
        real_engines.tokens_in(b'data: {"error": {"message": "out of memory"}}\n')


def test_what_overlaps_a_check_is_left_out_of_times() -> None:
    answers = [Answer(0.0, [1.0, 1.5, 4.5, 5.0], 4), Answer(1.0, [1.2, 1.3, 5.2], 3)]
    row = real_engines.summary_of(answers, [(2.0, 4.0)])
    assert row["seconds"] == pytest.approx(3.2)
    assert row["tokens_per_s"] == pytest.approx(7 / 3.2)
    assert row["first_token_ms"]["worst"] == pytest.approx(1000.0)
    assert row["gaps"] == 3
    assert row["between_tokens_ms"] == pytest.approx({"p50": 500.0, "p99": 500.0, "worst": 500.0})


def test_a_log_says_rebalances_balance_and_what_the_plug_in_says() -> None:
    log = (
        "Rearranging experts sync mode (profile)...\nRearranging experts (async mode) ...\n"
        "Rearranging experts sync mode ...\n"
        "EPLB step: 16 for model m: avg_tokens=30.00, max_tokens=40, balancedness=0.75, steps until\n"
        "EPLB step: 32 for model m: avg_tokens=10.00, max_tokens=10, balancedness=1.0, steps until\n"
        "INFO eplb_core: in effect in vLLM 1: policy\nERROR bad\n"
        "WARNING eplb_core: maps: the engine's own code goes on, since ours raised\n"
    )
    row = real_engines.said_in(log, real_vllm.ENGINE)
    assert [row["rebalances"], row["balance"]] == [2, 0.8]
    assert row["lines"] == ["in effect in vLLM 1: policy"]
    assert row["fallbacks"] == ["maps: the engine's own code goes on, since ours raised"]
    assert row["errors"] == ["ERROR bad"]
    twice = "[EPLBManager] rebalance end\n" * 4
    assert real_engines.said_in(twice, real_sglang.ENGINE)["rebalances"] == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_any_word_that_differs_changes_the_fingerprint_of_its_slot_alone(dtype: torch.dtype) -> None:
    weights = [torch.arange(5 * 7).reshape(5, 7).to(dtype), torch.ones(5, 4, dtype=dtype)]
    before = real_probe.fingerprints(weights)
    assert len(set(before)) == 5
    for number, tensor in enumerate(weights):
        for column in range(tensor.shape[1]):
            changed = [each.clone() for each in weights]
            changed[number][3, column] += 1
            now = real_probe.fingerprints(changed)
            assert [a != b for a, b in zip(before, now, strict=True)] == [False, False, False, True, False]


def test_entries_that_lead_elsewhere_and_experts_without_one_are_counted() -> None:
    model = Ranks(fault=False).model(0)
    assert real_probe.wrong_entries(*model[:3]) == 0
    slots_of, counts = model.slots_of.clone(), model.counts.clone()
    slots_of[0, 0, 1] = 1  # of expert 1
    slots_of[1, 1, 0] = 6  # no slot
    counts[1, 3] = 0
    assert real_probe.wrong_entries(model.rows, slots_of, counts) == 3
    assert real_probe.received(BASE, torch.tensor([[0, 1, 2, 3, 2, 1], [0, 1, 2, 0, 3, 1]]), 1, 2) == 1


def test_equal_experts_prove_nothing() -> None:
    answer = {"rows": [[0, 1]], "prints": [[5]], "wrong_entries": 0, "step": 1}
    assert real_engines.verify([answer, answer], [answer, answer])["wrong_slots"] == 2


def test_a_slot_that_holds_another_expert_than_its_map_says_is_found() -> None:
    ranks = Ranks(fault=True)

    def answers() -> list[Any]:
        return [{"step": 0, **real_probe.seen(ranks.model(rank))} for rank in range(2)]

    first = answers()
    ranks.rows, ranks.steps = MOVED, 21
    found = real_engines.verify(first, answers())
    assert found == {
        "slots": 12,
        "wrong_slots": 1,
        "wrong_entries": 0,
        "twice_on_a_rank": 0,
        "slots_changed": 4,
        "maps_differ": False,
    }


@pytest.mark.slow
def test_a_server_is_measured_and_checked_while_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_engines, "absence", lambda engine, one_gpu: "")
    (tmp_path / "config.json").touch()
    given = ["--model", str(tmp_path), "--out", str(tmp_path / "out"), "--json", str(tmp_path / "r.json")]
    given += ["--repeats", "1", "--requests", "24", "--tokens", "8", "--at-once", "4", "--runs", "right"]
    assert real_engines.main(ENGINE, "real_vllm", "About.", given) == 0
    record = json.loads((tmp_path / "r.json").read_text())
    (row,) = record["rows"]
    assert [row["requests"], row["rebalances"], row["balance"]] == [24, 1, 0.9]
    assert [check["wrong_slots"] for check in row["checks"]] == [0] * 4
    assert [check["slots"] for check in row["checks"]] == [12] * 4
    assert row["checks"][-1]["slots_changed"] == 4
    assert record["summary"] == ["real vLLM server, 1 runs: 0 of 48 slots wrong, during and after the load"]
    assert record["times_count"] is True
    assert {"vLLM", "torch", "nccl"} <= record["versions"].keys()


def test_a_server_that_ends_is_a_failed_run_and_the_others_go_on(tmp_path: Path) -> None:
    engine = ENGINE._replace(command=lambda options, eplb, port: [sys.executable, "-c", "raise SystemExit('no room')"])
    with pytest.raises(RuntimeError, match=r"ended with 1:\nno room"):
        real_engines.serve(engine, OPTIONS, "off", tmp_path / "run")
    rows: list[Any] = [{"run": "a", "turn": 0, "error": "no room"}, {"run": "b", "turn": 0, "tokens_per_s": 5.0}]
    assert "failed" in real_engines.table(rows, one_gpu=True)
    assert real_engines.summary_lines(rows, "vLLM", one_gpu=True)[1] == "failed: a"


def test_commands_say_what_a_run_says() -> None:
    for engine in (real_vllm.ENGINE, real_sglang.ENGINE):
        for eplb, _ in engine.runs.values():
            words = engine.command(OPTIONS, eplb, 99)
            assert ("--enable-eplb" in words) == (eplb is not None)
            assert "99" in words
    one = real_vllm.command(argparse.Namespace(**{**vars(OPTIONS), "one_gpu": True}), real_vllm.SYNC, 99)
    assert "--enforce-eager" in one
    told = json.loads(one[one.index("--eplb-config") + 1])
    assert (told["use_async"], told["step_interval"]) == (False, 32)
    with pytest.raises(ValueError, match="`--one-gpu`"):
        real_sglang.command(argparse.Namespace(**{**vars(OPTIONS), "one_gpu": True}), (), 99)


def test_a_model_of_topics_is_written_as_transformers_reads_it(tmp_path: Path) -> None:
    small = {"hidden_size": 32, "num_experts": 8, "vocab_size": 64, "moe_intermediate_size": 16, "head_dim": 8}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    real_engines.make_model(tmp_path, {**real_engines.CONFIG, **small})
    tensors = load_file(tmp_path / "model.safetensors")
    assert len(tensors) == 3 + 2 * (4 + 2 + 2 + 1 + 8 * 3)
    assert tensors["model.layers.1.mlp.experts.7.down_proj.weight"].shape == (32, 16)
    embedded = torch.nn.functional.rms_norm(tensors["model.embed_tokens.weight"][3:].float(), [32])
    chosen = (embedded @ tensors["model.layers.0.mlp.gate.weight"].float().T).topk(2, dim=1).indices
    topic = torch.arange(3, 64) % TOPICS
    loads = torch.stack([torch.bincount(chosen[topic == each].flatten(), minlength=8) for each in range(TOPICS)])
    assert len({int(row.argmax()) for row in loads}) > 1  # another topic, other hot experts


def test_without_engine_or_gpus_what_is_missing_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert real_engines.absence("numpy", one_gpu=False).startswith("2 GPUs (found ") or torch.cuda.device_count() > 1
    assert real_vllm.main(["--quick", "--json", str(tmp_path / "r.json")]) == 0 or torch.cuda.is_available()
    if not torch.cuda.is_available():
        assert capsys.readouterr().out.startswith("absent: vLLM is not installed here")
        assert json.loads((tmp_path / "r.json").read_text())["summary"] == []
    assert measure.ROOT.is_dir()
