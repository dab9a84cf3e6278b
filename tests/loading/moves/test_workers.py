"""Threads that run a migration's jobs."""

from __future__ import annotations

import threading

import pytest
import torch

from eplb_core.loading.moves.workers import Worker


def test_a_job_that_raises_is_logged_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker("eplb-test", torch.device("cpu"))
    done = threading.Event()

    def fails() -> None:
        raise RuntimeError("a job may not do this")

    worker.submit(fails)
    worker.submit(done.set)
    assert worker.close(20.0)
    assert done.is_set()
    assert "a job of eplb-test failed" in caplog.text
    assert "RuntimeError: a job may not do this" in caplog.text
