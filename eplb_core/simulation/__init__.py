"""Offline simulation: would balancing help, with how many redundant experts, how often, and at what cost?

`simulate` replays a recorded load through a policy and scores each layout on the windows that follow those it was made
from; `compare_policies` puts several side by side; `sweep` tries many settings; `generate_trace` makes load like that
of real models; `plots` draws, `html` writes one page that works by itself.
"""

from __future__ import annotations

from eplb_core.cli.terminal import progress as progress_bar  # noqa: F401
from eplb_core.simulation.compare import Comparison as Comparison
from eplb_core.simulation.compare import compare_policies as compare_policies
from eplb_core.simulation.compare import sweep as sweep
from eplb_core.simulation.hardware import HARDWARE as HARDWARE
from eplb_core.simulation.hardware import Hardware as Hardware
from eplb_core.simulation.hardware import StepCost as StepCost
from eplb_core.simulation.hardware import cost_preset as cost_preset
from eplb_core.simulation.links import count_links as count_links
from eplb_core.simulation.load.generator import Traffic as Traffic
from eplb_core.simulation.load.generator import generate_trace as generate_trace
from eplb_core.simulation.load.generator import stream_generated as stream_generated
from eplb_core.simulation.load.sources import TokenTrace as TokenTrace
from eplb_core.simulation.load.sources import TraceStream as TraceStream
from eplb_core.simulation.load.sources import stream_trace as stream_trace
from eplb_core.simulation.policies import BASIC as BASIC
from eplb_core.simulation.policies import DISPATCHES as DISPATCHES
from eplb_core.simulation.policies import POLICIES as POLICIES
from eplb_core.simulation.policies import Dispatch as Dispatch
from eplb_core.simulation.policies import Policy as Policy
from eplb_core.simulation.records import Records as Records
from eplb_core.simulation.records import table as table
from eplb_core.simulation.replay import simulate as simulate
from eplb_core.simulation.result import Simulation as Simulation
