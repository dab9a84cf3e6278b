"""Devices that tests of loading run on."""

from __future__ import annotations

import pytest
import torch

from tests.loading.worlds import needs_cuda


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda])])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)
