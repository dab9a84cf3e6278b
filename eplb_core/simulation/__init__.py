"""Offline simulation: replay recorded or generated load through policies, compare and sweep them, draw the results."""

from __future__ import annotations

from eplb_core.simulation.advice.advise import advise as advise
from eplb_core.simulation.advice.model import ModelExperts as ModelExperts
from eplb_core.simulation.advice.model import read_model as read_model
from eplb_core.simulation.advice.result import Advice as Advice
from eplb_core.simulation.compare import Comparison as Comparison
from eplb_core.simulation.compare import compare_policies as compare_policies
from eplb_core.simulation.dispatch import DISPATCHES as DISPATCHES
from eplb_core.simulation.dispatch import Dispatch as Dispatch
from eplb_core.simulation.dispatch import DispatchName as DispatchName
from eplb_core.simulation.hardware import HARDWARE as HARDWARE
from eplb_core.simulation.hardware import Hardware as Hardware
from eplb_core.simulation.hardware import StepCost as StepCost
from eplb_core.simulation.hardware import cost_preset as cost_preset
from eplb_core.simulation.hardware import count_links as count_links
from eplb_core.simulation.load.generator import Traffic as Traffic
from eplb_core.simulation.load.generator import generate_trace as generate_trace
from eplb_core.simulation.load.generator import stream_generated as stream_generated
from eplb_core.simulation.load.sources import TokenTrace as TokenTrace
from eplb_core.simulation.load.sources import TraceStream as TraceStream
from eplb_core.simulation.load.sources import stream_trace as stream_trace
from eplb_core.simulation.policies import BASIC as BASIC
from eplb_core.simulation.policies import POLICIES as POLICIES
from eplb_core.simulation.policies import Policy as Policy
from eplb_core.simulation.policies import PolicyName as PolicyName
from eplb_core.simulation.progress import progress_bar as progress_bar
from eplb_core.simulation.replay import SimulateOptions as SimulateOptions
from eplb_core.simulation.replay import simulate as simulate
from eplb_core.simulation.result import Records as Records
from eplb_core.simulation.result import Simulation as Simulation
from eplb_core.simulation.sweep import sweep as sweep
from eplb_core.simulation.words import table as table
