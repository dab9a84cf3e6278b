from __future__ import annotations

import logging
import os
import subprocess
import sys
from importlib import metadata

import pytest

from eplb_core.adapters import plugins


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("EPLB_CORE")}
    return subprocess.run([sys.executable, "-c", code], env=inherited | environment, capture_output=True, text=True)


@pytest.mark.slow
def test_installed_and_not_asked_for_nothing_happens_and_nothing_is_imported() -> None:
    """R60: engines call this in each of their processes."""
    code = (
        "import sys; from eplb_core.adapters import plugins; plugins.register_vllm(); plugins.register_sglang(); "
        "print(sorted({'torch', 'numba', 'numpy', 'vllm', 'sglang'} & set(sys.modules)))"
    )
    for asked in ({}, {"EPLB_CORE": "another"}):
        result = run(code, **asked)
        assert result.returncode == 0, result.stderr
        assert set(result.stdout.split("'")) <= {"[]\n", "[", "]\n", ", ", "numpy"}


def test_each_entry_point_asks_its_own_plug_in(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine is not there: both say so in a line."""
    for name in ("vllm", "vllm.distributed", "sglang"):
        monkeypatch.setitem(sys.modules, name, None)
    plugins.register_vllm()
    plugins.register_sglang()
    monkeypatch.setenv("EPLB_CORE", "vllm")
    plugins.register_sglang()
    caplog.set_level(logging.ERROR, "vllm.eplb_core")
    plugins.register_vllm()
    assert "not active: ModuleNotFoundError" in caplog.text
    monkeypatch.setenv("EPLB_CORE", "sglang")
    plugins.register_vllm()
    plugins.register_sglang()
    assert "not active: this SGLang has no loader of plug-ins" in caplog.text


def test_the_package_names_its_plug_ins() -> None:
    distribution = next(iter(metadata.distributions(name="eplb-core")), None)
    if distribution is None:
        pytest.skip("needs the package installed")
    found = {entry.group: entry.value for entry in distribution.entry_points if entry.name == "eplb_core"}
    if "vllm.general_plugins" not in found:
        pytest.skip("the installed package is an older one")
    assert found["vllm.general_plugins"] == "eplb_core.adapters.plugins:register_vllm"
    assert found["sglang.srt.plugins"] == "eplb_core.adapters.plugins:register_sglang"
