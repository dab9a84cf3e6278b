"""What engines load by entry point: nothing happens, and nothing more is imported, unless the environment asks.

An engine loads these in each of its processes as soon as this package is installed beside it.
"""

from __future__ import annotations

import os


def register_vllm() -> None:
    """Entry point of the group `vllm.general_plugins`; acts with `EPLB_CORE=vllm`."""
    if os.environ.get("EPLB_CORE") == "vllm":
        from eplb_core.adapters.vllm import plugin as vllm

        vllm.register()


def register_sglang() -> None:
    """Entry point of the group `sglang.srt.plugins`; acts with `EPLB_CORE=sglang`."""
    if os.environ.get("EPLB_CORE") == "sglang":
        from eplb_core.adapters.sglang import plugin as sglang

        sglang.register()
