"""A pytest plug-in for vLLM's own tests: loads vLLM's general plug-ins before they import anything."""

from __future__ import annotations

import vllm.plugins

vllm.plugins.load_general_plugins()
