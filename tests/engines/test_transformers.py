"""Stores of every family of Transformers: their experts are found, their routers refused."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PYTHON = Path(os.environ.get("EPLB_ENGINES", ROOT / ".engines")) / "sglang" / "bin" / "python"

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason=f"SGLang's environment, which has Transformers, is not installed: {PYTHON} is missing; run make engines",
    ),
]

# Experts in one matrix, or a module for each.
NOT_BY_SLOT = {"dbrx DbrxExperts", "switch_transformers SwitchTransformersExperts", "muse_spark MuseSparkExperts"}


def test_experts_of_every_family_are_found_or_refused_and_no_router_is_taken() -> None:
    script = Path(__file__).with_name("transformers_experts.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [str(PYTHON), str(script)], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout.rpartition("\n{")[0])
    said = json.loads(done.stdout.splitlines()[-1])["said"]
    assert len(said) > 100
    for name, answer in said.items():
        if name.endswith(("Experts", ", experts named")):
            if isinstance(answer, str):
                assert name in NOT_BY_SLOT or "must have 8 slots" in answer, (name, answer)
            else:
                assert not [each for each in answer if "gate." in each or "router" in each or "score" in each], name
        else:
            assert isinstance(answer, str), (name, answer)
    for family in ("mixtral Mixtral", "qwen3_moe Qwen3Moe", "deepseek_v3 DeepseekV3", "olmoe Olmoe"):
        assert said[f"{family}Experts"] == ["gate_up_proj [48, 48]", "down_proj [48, 24]"]
    assert len(said["gpt_oss GptOssExperts"]) == 4
