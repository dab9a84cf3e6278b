"""Programs in a new process of Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python(program: str, *flags: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program of this checkout that must end well."""
    told = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *flags, "-c", program]
    return subprocess.run(command, cwd=folder, env=told, capture_output=True, text=True, check=True, timeout=600)
