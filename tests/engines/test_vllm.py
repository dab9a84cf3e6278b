from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
HOME = Path(os.environ.get("EPLB_ENGINES", ROOT / ".engines")) / "vllm"
PYTHON, SOURCE = HOME / "bin" / "python", HOME / "vllm-0.33.0"

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists() or not SOURCE.exists(),
        reason=f"vLLM is not installed for tests: {SOURCE if PYTHON.exists() else PYTHON} is missing; run make engines",
    ),
]

OWN_TESTS = ("test_eplb_algo", "test_eplb_migration_scheduler", "test_eplb_utils", "test_expert_placement")
# Where ours is meant to answer otherwise in its default mode; in the mode "deepseek" nothing differs.
DIFFERENCES = {
    "test_basic_rebalance": "asks for DeepSeek's layout slot by slot; ours is another one, as balanced or better",
    "test_extreme_weight_imbalance": "wants more than two replicas of an expert whose group may use two ranks: that "
    "would put it twice on one rank, where a second copy takes no load off",
}


def run(command: list[str], folder: Path = ROOT, /, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("EPLB_CORE", "PYTHONPATH"))}
    kept |= {"VLLM_TARGET_DEVICE": "cpu", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    kept |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"} | environment
    return subprocess.run(
        [str(PYTHON), *command], cwd=folder, env=kept, capture_output=True, text=True, timeout=900, check=False
    )


def own_tests(**environment: str) -> tuple[set[str], int]:
    """Names of vLLM's own tests that fail, and how many pass."""
    files = [f"tests/distributed/{name}.py" for name in OWN_TESTS]
    # Without this project's settings, which lie above: warnings of the engine's libraries are errors there.
    options = ["-c", os.devnull, "--rootdir", ".", "-q", "--noconftest", "-p", "no:cacheprovider"]
    options += ["-p", "eplb_core_in_vllm"]
    result = run(["-m", "pytest", *options, *files], SOURCE, **environment)
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed, result.stdout[-2000:] + result.stderr[-2000:]
    return set(re.findall(r"^FAILED \S+::(\w+)", result.stdout, re.MULTILINE)), int(passed[1])


def answers(mode: str, **environment: str) -> dict[str, Any]:
    result = run([str(Path(__file__).with_name("vllm_hooks.py")), mode], **environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_vllm_s_own_tests_pass_with_ours_but_for_the_differences_that_are_documented() -> None:
    without, own = own_tests()
    assert (without, own) == (set(), 37)
    within, passed = own_tests(EPLB_CORE="vllm")
    assert (within, passed) == (set(DIFFERENCES), 37 - len(DIFFERENCES))
    assert own_tests(EPLB_CORE="vllm", EPLB_CORE_OPTIONS="mode=deepseek") == (set(), 37)
    page = (ROOT / "docs" / "engines.md").read_text()
    assert all(name in page for name in DIFFERENCES)


def test_installed_but_not_asked_for_nothing_is_changed() -> None:
    found = answers("names")
    assert all(home.startswith("vllm.") for home in found["homes"].values())
    assert answers("names", EPLB_CORE="sglang") == found


def test_asked_for_all_parts_are_in_place_in_the_real_modules() -> None:
    found = answers("names", EPLB_CORE="vllm")
    assert all(home.startswith("eplb_core.adapters.") for home in found["homes"].values())
    assert found["row without load stays"]
    off = answers("names", EPLB_CORE="vllm", EPLB_CORE_OFF="maps,dispatch,fold")["homes"]
    assert off["policy"] == "eplb_core.adapters.vllm.plugin"
    assert off["maps"] == off["commit"] == off["commit layer"] == "vllm.distributed.eplb.eplb_state"


def test_counts_of_before_a_move_are_read_right_after_it() -> None:
    """D1: a constant load that the next rebalance reads through the map of later."""
    without, within = answers("drift"), answers("drift", EPLB_CORE="vllm")
    assert without["read"] != without["truth"]
    assert within["read"] == within["truth"]


def test_an_engine_with_another_signature_goes_on_with_its_own_code() -> None:
    found = answers("other", EPLB_CORE="vllm")
    assert found["parts"] == ["policy", "fold"]
    assert found["answer"] == "the engine's"
    expected = "expected compute_logical_maps(physical_to_logical_map, num_logical_experts), found compute_logical_maps"
    assert any("maps is left to vLLM 0.33.0" in line and expected in line for line in found["lines"])


def test_vllm_s_rebalance_runs_end_to_end_with_right_weights() -> None:
    """Real `EplbState`, several processes over gloo, synchronous and beside the passes."""
    result = run(["-m", "benchmarks.engines_vllm", "--quick", "--ranks", "2"])
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [line.split("|") for line in result.stdout.splitlines() if line.startswith(("| sync", "| async"))]
    assert [int(row[3]) for row in rows] == [0] * 6
    transfers = [int(row[4].replace(",", "")) for row in rows]
    for default, ours, over_transport in (transfers[:3], transfers[3:]):
        assert ours == over_transport <= default // 20


def test_a_store_of_vllm_s_layer_of_experts_holds_what_vllm_moves_whatever_the_quantization() -> None:
    result = run([str(Path(__file__).with_name("vllm_experts.py"))], VLLM_LOGGING_LEVEL="ERROR")
    assert result.returncode == 0, result.stderr
    print(result.stdout.rpartition("\n{")[0])
    said = json.loads(result.stdout.splitlines()[-1])["said"]
    assert len(said) == 17
    for name, stages in said.items():
        assert isinstance(stages, dict), (name, stages)
        for stage, found in stages.items():
            assert "'_expert_map'" in found["bare"], (name, stage)  # refused, where nobody says what it is
            if name != "experts int8":  # its weights have no memory before they are loaded
                moved = set(found["own"]) | {each for each in found["named"] if each.endswith("input_scale")}
                assert set(found["named"]) == moved, (name, stage)
