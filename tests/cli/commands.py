"""The command line called in the process of a test."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from eplb_core.cli.main import main


class Said(NamedTuple):
    """What a command printed."""

    out: str
    err: str

    @property
    def facts(self) -> Any:
        """What `--json` printed."""
        return json.loads(self.out)


class Commands:
    """Runs commands one by one and takes what each prints."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *argv: str, status: int = 0) -> Said:
        """Run a command that must return `status`."""
        self._capsys.readouterr()
        assert main(list(argv)) == status
        return Said(*self._capsys.readouterr())

    def exits(self, *argv: str) -> Said:
        """Run a command that must end with status 2, returned or by `SystemExit`."""
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            raise SystemExit(main(list(argv)))
        assert end.value.code == 2
        return Said(*self._capsys.readouterr())
