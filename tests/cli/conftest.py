"""Fixtures for the tests of commands."""

from __future__ import annotations

import pytest

from tests.cli.commands import Commands


@pytest.fixture
def eplb(capsys: pytest.CaptureFixture[str]) -> Commands:
    """Call the command line as a function."""
    return Commands(capsys)
