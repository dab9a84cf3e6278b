from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
PYTHON = Path(os.environ.get("EPLB_ENGINES", ROOT / ".engines")) / "sglang" / "bin" / "python"

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(), reason=f"SGLang is not installed for tests: {PYTHON} is missing; run make engines"
    ),
]


def environment_with(more: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("EPLB_CORE", "PYTHONPATH"))}
    return kept | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"} | more


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in SGLang's environment, in which this package is installed with its entry point."""
    command = [str(PYTHON), str(Path(__file__).with_name(script)), *arguments]
    return subprocess.run(command, env=environment_with(environment), capture_output=True, text=True, timeout=900)


def answers(script: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """The JSON that a script prints last, and under "said" what it logs."""
    result = run(script, *arguments, **environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1]) | {"said": result.stderr}  # type: ignore[no-any-return]


def hooked(*modes: str, **environment: str) -> dict[str, Any]:
    return answers("sglang_hooks.py", *modes, **environment)


def test_the_wheel_sends_tokens_to_slots_that_nothing_loads_and_the_plug_in_ends_it() -> None:
    """D1: expert 3 has two replicas on rank 1, and only the first is loaded."""
    without = run("sglang_loading.py", "reproduce")
    assert (without.returncode, without.stdout.splitlines()[-1]) == (1, "REPRODUCED"), without.stderr
    assert "deepep, static: tokens go to slots that nothing loads on 1 of 8 layers" in without.stdout
    assert "deepep, dynamic: tokens go to slots that nothing loads on 8 of 8 layers" in without.stdout
    within = run("sglang_loading.py", "reproduce", EPLB_CORE="sglang")
    assert (within.returncode, within.stdout.splitlines()[-1]) == (0, "NOT_REPRODUCED"), within.stderr


def test_after_a_scale_up_no_routed_expert_is_written_over_the_shared_one() -> None:
    """R36, R37, R41, H5: EP 2 -> 4; local row 3 is the shared expert's on the two ranks that were there before."""
    without = answers("sglang_loading.py", "grown")
    assert without["1"]["weight 1"] == [3]  # the wheel's fault, which the filter is there for
    for rank, expected in (("0", [[0], [1], [2], []]), ("1", [[2], [], [], [0, 1]])):
        writes = answers("sglang_loading.py", "grown", EPLB_CORE="sglang")[rank]
        assert [writes[f"weight {expert}"] for expert in range(4)] == expected
        assert [writes[f"zero points {expert}"] for expert in range(4)] == expected
        assert writes["weight 4"] == [3]


def test_lookups_follow_the_layout_through_moves_and_leave_the_rest_to_the_engine() -> None:
    """R38 - R40, R43, R46: draft layers, whole tensors and dispatch as before; ids out of range raise."""
    without, within = (answers("sglang_loading.py", "lookups", **plugin) for plugin in ({}, {"EPLB_CORE": "sglang"}))
    for unchanged in ("draft", "draft whole", "whole", "static picks", "candidates", "fallback"):
        assert within[unchanged] == without[unchanged]
    assert (without["pair"], within["pair"]) == ([3], [3, 4])
    assert (within["kept"], within["moved"]) == ([3, 4], [0, 4])
    assert (without["negative"], without["layer"]) == ([3], [5])  # counted from the end
    for name in ("negative", "beyond", "layer"):
        assert within[name].startswith("IndexError: ")


def test_maps_and_updates_are_the_engine_s_bit_for_bit_and_the_rest_differs_as_documented() -> None:
    """R23, R43, C7, D5: 66 metadata of random layouts, narrowed and not, static and dynamic, on one node and two."""
    without = hooked("maps", "update", "placement", "dispatch")
    within = hooked("maps", "update", "placement", "dispatch", EPLB_CORE="sglang")
    assert "the engine's own code goes on" not in within["said"]
    assert "is left to SGLang" not in within["said"]
    assert within["maps"] == without["maps"]
    assert within["update"] == without["update"]
    assert within["update"]["in place"]
    # A load that gains nothing moves nothing, and an idle layer keeps its row.
    assert without["placement"]["changed"] > 24
    assert (within["placement"]["changed"], within["placement"]["idle"]) == (0, [0, 1, 2, 3, 0, 1])
    assert within["placement"]["shapes"] == without["placement"]["shapes"]
    # Masked ids stay masked; an expert that even rows alone choose uses all its replicas; one graph, no break.
    assert (without["dispatch"]["static"][1], within["dispatch"]["static"][1]) == ([3, 3], [-1, -1])
    assert (without["dispatch"]["replicas used"], within["dispatch"]["replicas used"]) == ([0], [0, 4])
    assert within["dispatch"]["compiled"]
    assert within["dispatch"]["dtypes"] == without["dispatch"]["dtypes"]


def test_parts_that_are_off_are_the_engine_s_own() -> None:
    without = hooked("dispatch", "placement")
    off = hooked("dispatch", "placement", EPLB_CORE="sglang", EPLB_CORE_OFF="dispatch,placement")
    assert (off["dispatch"], off["placement"]) == (without["dispatch"], without["placement"])


def test_a_function_of_another_signature_leaves_its_part_to_the_engine() -> None:
    found = hooked("other", EPLB_CORE="sglang")
    assert "update" not in found["other"]["parts"]
    assert "maps" in found["other"]["parts"]
    assert (
        "update is left to SGLang, written for 0.5.23: expected eplb.expert_location.ExpertLocationMetadata.update("
        "self, other, update_layer_ids), found eplb.expert_location.ExpertLocationMetadata.update(self: 'Any', layers"
    ) in found["said"]


# ---- moves -----------------------------------------------------------------------------------------------------------


def test_sglang_s_rebalance_runs_end_to_end_with_right_weights_and_dispatch() -> None:
    """Its real `EPLBManager`, recorder, metadata and dispatch in two processes over gloo; looked at in every pass."""
    command = [str(PYTHON), "-m", "benchmarks.engines_sglang", "--quick", "--ranks", "2"]
    result = subprocess.run(command, cwd=ROOT, env=environment_with({}), capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [line.split("|") for line in result.stdout.splitlines() if line.startswith(("| static", "| dynamic"))]
    assert [(row[3].strip(), row[4].strip()) for row in rows] == [("0", "0")] * 8
    transfers = [int(row[5].replace(",", "")) for row in rows]
    for own, by_its_updater, by_a_migrator, over_shared_memory in (transfers[:4], transfers[4:]):
        # SGLang's updater and a Migrator move the same experts.
        assert 0 < by_its_updater == by_a_migrator == over_shared_memory <= own // 10


# ---- weight cache ----------------------------------------------------------------------------------------------------


@contextmanager
def daemon(path: Path, **environment: str) -> Iterator[None]:
    """SGLang's weight cache daemon in a process of its own."""
    script = str(Path(__file__).with_name("sglang_cache.py"))
    with subprocess.Popen(
        [str(PYTHON), script, "daemon", str(path)],
        env=environment_with(environment),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            said = []
            for line in process.stderr:
                said.append(line)
                if "Listening on" in line:
                    break
            else:
                raise AssertionError("".join(said)[-3000:])
            yield
        finally:
            process.kill()


def engine(path: Path, *modes: str, **environment: str) -> dict[str, Any]:
    return answers("sglang_cache.py", "engine", str(path), *modes, **environment)


def test_an_engine_on_moved_weights_is_served_wrong_without_a_record_and_adopts_with_one(tmp_path: Path) -> None:
    """Fault 20 of SGLang's: the next engine starts on its own layout, on weights that have moved."""
    row, moved = [0, 1, 2, 3, 3, 0], [3, 1, 2, 0, 3, 0]
    with daemon(tmp_path / "a"):
        assert engine(tmp_path / "a", "move")["moved to"] == moved
        assert engine(tmp_path / "a")["row"] == row  # and the slots hold the others
    with daemon(tmp_path / "b", EPLB_CORE="sglang"):
        first = engine(tmp_path / "b", "move", EPLB_CORE="sglang")
        assert (first["row"], first["moved to"], first["entries"]) == (row, moved, ["w"])
        assert "in effect in SGLang: record at" in first["said"]
        second = engine(tmp_path / "b", EPLB_CORE="sglang")
        assert (second["row"], second["slots of expert 3"]) == (moved, [0, 4])
        assert "record: version 1 of the layout is adopted" in second["said"]
        bare = engine(tmp_path / "b")
        assert "does not say which it routes by" in bare["error"]


# ---- another engine --------------------------------------------------------------------------------------------------


def test_a_manager_of_another_signature_keeps_its_rebalance() -> None:
    found = hooked("other_manager", EPLB_CORE="sglang")
    assert "moves" not in found["other_manager"]["parts"]
    assert found["other_manager"]["not in effect"] == []
    assert (
        "moves is left to SGLang, written for 0.5.23: expected eplb.eplb_manager.EPLBManager.rebalance(self), found "
        "eplb.eplb_manager.EPLBManager.rebalance(self: 'Any', layers: 'list[int]')"
    ) in found["said"]


def test_a_store_of_sglang_s_layer_of_experts_holds_all_of_it_whatever_the_quantization() -> None:
    """Its layer has nothing beside what is indexed by slot, but for scales that every rank keeps whole."""
    said = answers("sglang_experts.py")["families"]
    for name, stages in said.items():
        for stage, found in stages.items():
            by_slot = {each for each, shape in found["held"].items() if shape[:1] in ([6], [12])}
            assert set(found["named"]) == by_slot, (name, stage)
            if name == "w4afp8":  # strides of its kernel, a row for each slot
                assert "'quant_method.a_strides1'" in found["bare"]
            else:
                assert found["bare"] == found["named"], (name, stage)
