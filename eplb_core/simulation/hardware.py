"""What passes and moves cost on given hardware: data sheets, a cost model, and the links that transfers cross."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eplb_core._arrays import FloatArray, IntArray, check_int, check_kind, check_real, check_word
from eplb_core.layout import ExpertLayout
from eplb_core.placement.worth.costs import CostModel
from eplb_core.topology import Topology


@dataclass(frozen=True, slots=True)
class Hardware:
    """One rank's data sheet. Bytes and operations a second, in one direction, without sparsity."""

    name: str
    """As the vendor calls it."""
    operations: float
    """FP8 operations a second, dense."""
    memory_bandwidth: float
    """Bytes a second from the rank's own memory."""
    node_bandwidth: float
    """Bytes a second that a rank sends, or receives, within its node."""
    network_bandwidth: float
    """Bytes a second that a rank sends, or receives, between nodes: one 400 Gb/s adapter a rank."""
    memory_bytes: float
    """The rank's own memory."""
    source: str
    """Where the numbers stand."""
    node_ranks: int = 8
    """Ranks that the fast links join."""

    def topology(self, num_ranks: int) -> Topology:
        """Ranks on full nodes of this hardware, and the rest on one more."""
        return on_nodes(num_ranks, self.node_ranks)


def on_nodes(num_ranks: int, node_ranks: int) -> Topology:
    """Ranks on full nodes, and the rest on one more."""
    alone = Topology(num_ranks)  # refuses what is too many, before an array is made
    return Topology(rank_to_node=np.arange(alone.num_ranks) // check_int(node_ranks, "node_ranks", 1))


HARDWARE = {
    "H100": Hardware(
        "H100 SXM",
        *(1979e12, 3.35e12, 450e9, 50e9, 80e9),
        "NVIDIA H100 data sheet: FP8 3,958 TFLOPS with sparsity, 3.35 TB/s, NVLink 900 GB/s both ways",
    ),
    "H200": Hardware(
        "H200 SXM",
        *(1979e12, 4.8e12, 450e9, 50e9, 141e9),
        "NVIDIA H200 data sheet: FP8 3,958 TFLOPS with sparsity, 4.8 TB/s, NVLink 900 GB/s both ways",
    ),
    "B200": Hardware(
        "HGX B200",
        *(4500e12, 8e12, 900e9, 50e9, 180e9),
        "NVIDIA HGX data sheet, a GPU of eight: FP8 9 PFLOPS with sparsity, 8 TB/s, NVLink 1.8 TB/s both ways",
    ),
    "GB200 NVL72": Hardware(
        "GB200 NVL72",
        *(5000e12, 8e12, 900e9, 50e9, 186e9),
        "NVIDIA GB200 NVL72 data sheet, a GPU of 72: FP8 10 PFLOPS with sparsity, 8 TB/s, NVLink 1.8 TB/s both ways",
        node_ranks=72,
    ),
    "MI300X": Hardware(
        "Instinct MI300X",
        *(2614.9e12, 5.3e12, 448e9, 50e9, 192e9),
        "AMD Instinct MI300X data sheet: FP8 2,614.9 TFLOPS, 5.3 TB/s, seven links of 128 GB/s both ways",
    ),
}
"""Data sheets by name."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds and bytes of passes, moves and the all-to-all. Immutable.

    A layer takes the time of `model` plus the all-to-all time of the rank that receives longest. Tokens are assumed to
    come from all ranks in equal parts, and a token is sent once per expert: engines that do so once per rank take less.
    Where a replay knows the tokens (`TokenTrace`), each is sent once to each other node, within nodes once per expert.

    Raises:
        ValueError: A number is negative or NaN.
        TypeError: `model` is not a CostModel.
    """

    model: CostModel
    """Seconds of tokens, experts and layers, bytes of an expert, bandwidths."""
    token_bytes: float = 0.0
    """Bytes of a token's way to one expert and back; 0 = the all-to-all is in `model` or free."""
    memory_bytes: float = float("inf")
    """Memory of a rank, to say what part of it redundant experts take."""
    name: str = ""
    """Hardware, for headings."""
    assumed: str = ""
    """What the numbers are of, for sentences that weigh them: hardware, and the experts' dimensions."""

    def __post_init__(self) -> None:
        check_kind(self.model, "model", CostModel)
        check_real(self.token_bytes, "token_bytes", at_least=0.0)
        memory: object = self.memory_bytes
        if not isinstance(memory, float) or memory != float("inf"):
            check_real(self.memory_bytes, "memory_bytes", above=0.0)

    def exchange_s(self, topology: Topology) -> FloatArray:
        """Seconds of the all-to-all for each token that a rank computes, float64 `[R]`."""
        near, far = self.exchange_bytes(topology)
        return near / self.model.node_bandwidth + far / self.model.network_bandwidth

    def exchange_bytes(self, topology: Topology, sends: FloatArray | None = None) -> tuple[FloatArray, FloatArray]:
        """Bytes that a (token, expert) brings to its rank, within nodes and between them, each float64 `[..., R]`.

        Args:
            topology: Ranks and nodes.
            sends: Sends to other nodes for each (token, expert), `[..., 1]`. Default: as tokens from all ranks in equal
                parts that are sent once per expert.
        """
        check_kind(topology, "topology", Topology)
        node_size = (topology.rank_to_node[:, None] == topology.rank_to_node[None, :]).sum(axis=1)
        if sends is None:
            near, far = (node_size - 1) / topology.num_ranks, 1.0 - node_size / topology.num_ranks
        else:
            near, far = 1.0 - 1.0 / node_size, sends * np.ones(topology.num_ranks)
        return self.token_bytes * near, self.token_bytes * far

    def traffic_price(self, top_k: int) -> float:
        """What a token's send to another node is worth in balancedness, for `place(traffic_price=)`.

        The time of such a send, by that of the token's experts: where ranks wait for both, a send more costs a layer
        what so much less balance does.

        Args:
            top_k: Experts of a token.

        Raises:
            ValueError: `top_k` is below 1, or the model's `token_s` is 0: a send is then worth any balance.

        Example:
            >>> f"{cost_preset('H200').traffic_price(8):.2f}"
            '1.21'
        """
        compute_s = self.model.token_s * check_int(top_k, "top_k", 1)
        if compute_s == 0.0:
            raise ValueError("`token_s` (=0.0) of `model` must be above 0 to weigh sends against it; fit or give it")
        return self.token_bytes / self.model.network_bandwidth / compute_s


def cost_preset(
    hardware: str | Hardware,
    *,
    hidden_size: int = 7168,
    intermediate_size: int = 2048,
    weight_bytes: float = 1.0,
    dispatch_bytes: float = 1.0,
    combine_bytes: float = 2.0,
    achieved: float = 0.6,
    layer_s: float = 0.0,
    stall: float = 0.0,
    install_s: float = 5e-5,
) -> StepCost:
    """What do tokens, experts and moves cost on this hardware?

    The answer is computed from a data sheet's figures times `achieved`. It is good enough to compare policies; for
    reliable seconds, measure passes and use `CostModel.fit`. The defaults are DeepSeek-V3's experts in FP8.

    Args:
        hardware: A name in `HARDWARE`, or your own data sheet.
        hidden_size: Values of a token.
        intermediate_size: Values between an expert's matrices, of which there are three.
        weight_bytes: Bytes of a weight.
        dispatch_bytes: Bytes of a value on its way to an expert.
        combine_bytes: Bytes of a value on its way back.
        achieved: Share of the data sheet's operations and bytes that is reached, above 0 and at most 1.
        layer_s: Seconds per layer that do not depend on the placement, such as attention.
        stall: Seconds that passes lose for each second of transfers: 0 = transfers run beside the passes.
        install_s: Seconds that a pass waits for the install of one layer.

    Returns:
        The cost for `simulate(cost=...)`; its `model` is for `should_rebalance`.

    Raises:
        ValueError: An unknown name (the text lists the known ones), or a number out of range.

    Example:
        >>> cost = cost_preset("H200")
        >>> f"{cost.model.expert_bytes / 1e6:.1f} MB, {cost.model.link_s(same_node=False) * 1e3:.2f} ms"
        '44.0 MB, 1.47 ms'

    Source:
        `Hardware.source` of each; 6 x hidden x intermediate operations for a token and an expert.
    """
    if not isinstance(hardware, Hardware):
        hardware = HARDWARE[check_word(hardware, "hardware", HARDWARE, ", or a Hardware")]
    reached = check_real(achieved, "achieved", above=0.0, at_most=1.0)
    matrix = check_real(hidden_size, "hidden_size", above=0.0) * check_real(
        intermediate_size, "intermediate_size", above=0.0
    )
    expert_bytes = 3.0 * matrix * check_real(weight_bytes, "weight_bytes", above=0.0)
    model = CostModel(
        token_s=6.0 * matrix / (hardware.operations * reached),
        expert_s=expert_bytes / (hardware.memory_bandwidth * reached),
        layer_s=layer_s,
        expert_bytes=expert_bytes,
        node_bandwidth=hardware.node_bandwidth * reached,
        network_bandwidth=hardware.network_bandwidth * reached,
        stall=stall,
        install_s=install_s,
    )
    token_bytes = hidden_size * (
        check_real(dispatch_bytes, "dispatch_bytes", at_least=0.0)
        + check_real(combine_bytes, "combine_bytes", at_least=0.0)
    )
    own = " (DeepSeek-V3's)" if (hidden_size, intermediate_size, weight_bytes) == (7168, 2048, 1.0) else ""
    assumed = (
        f"{hardware.name} at {reached:.0%} of its data sheet, experts of {hidden_size:g} x {intermediate_size:g} at "
        f"{weight_bytes:g} byte{'s' * (weight_bytes != 1.0)} a weight{own}"
    )
    return StepCost(model, token_bytes, hardware.memory_bytes, hardware.name, assumed)


# ---- links -----------------------------------------------------------------------------------------------------------

LINKS = ("rank", "node", "network")
"""Where a slot's new expert comes from: a slot of the same rank, of another rank of its node, of another node."""


def count_links(old: ExpertLayout, new: ExpertLayout) -> IntArray:
    """How many experts of a move come from the rank itself, from its node, from another node?

    An expert that a rank does not hold yet crosses the wire once, however many of its slots it fills; each slot whose
    new expert the rank holds is a copy within the rank.

    Args:
        old: Layout that the weights are in.
        new: Layout to reach; same L, P, E and topology.

    Returns:
        int64 `[L, 3]`, in the order of `LINKS`; the last two add up to `transfers`, summed over ranks.

    Raises:
        ValueError: The layouts differ in shape, experts or topology.

    Cost:
        O(L * R * E) time and bytes; any thread.

    Example:
        >>> from eplb_core import Topology
        >>> topology = Topology(num_ranks=4, num_nodes=2)
        >>> old = ExpertLayout([[0, 1, 2, 3, 4, 5, 6, 7]], num_experts=8, topology=topology)
        >>> new = ExpertLayout([[0, 2, 1, 3, 5, 4, 6, 7]], num_experts=8, topology=topology)
        >>> count_links(old, new).tolist()
        [[2, 2, 0]]
    """
    old.check_same_frame(new)
    topology, experts = old.topology, old.num_experts
    shape = (old.num_layers, topology.num_ranks, old.slots_per_rank)
    before, after = (layout.physical_to_logical_map.reshape(shape) for layout in (old, new))
    had = np.zeros((old.num_layers, topology.num_ranks, experts + 1), dtype=np.bool_)
    gets = had.copy()
    np.put_along_axis(had, before, True, axis=2)  # -1, an empty slot, is the last column
    np.put_along_axis(gets, after, True, axis=2)
    own = np.take_along_axis(had, after, axis=2)
    counts = np.zeros((old.num_layers, len(LINKS)), dtype=np.int64)
    counts[:, 0] = (own & (before != after) & (after >= 0)).sum(axis=(1, 2))
    gets &= ~had
    gets[:, :, experts] = False
    for node in range(topology.num_nodes):
        members = np.flatnonzero(topology.rank_to_node == node)
        on_node = np.any(had[:, members], axis=1, keepdims=True)
        counts[:, 1] += (gets[:, members] & on_node).sum(axis=(1, 2))
    counts[:, 2] = gets.sum(axis=(1, 2)) - counts[:, 1]
    return counts
