"""Ranks, nodes and speeds are as told; nothing is guessed (FAULTS A4, A18)."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_core import Topology


def test_ranks_are_node_major_where_nodes_are_alike() -> None:
    topology = Topology(6, 3)
    assert (topology.num_ranks, topology.num_nodes) == (6, 3)
    assert topology.rank_to_node.tolist() == [0, 0, 1, 1, 2, 2]
    assert topology.rank_speed.tolist() == [1.0] * 6
    assert Topology(num_ranks=4).num_nodes == 1


def test_nodes_of_any_size_and_in_any_order_are_accepted() -> None:
    """A18: no 8 GPUs a node anywhere."""
    topology = Topology(rank_to_node=[1, 0, 1, 1, 2])
    assert (topology.num_ranks, topology.num_nodes) == (5, 3)
    assert topology.rank_to_node.dtype == np.int64
    assert Topology(5, 3, rank_to_node=[1, 0, 1, 1, 2]) == topology


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.data())
def test_a_topology_is_what_its_arrays_say(node: list[int], data: st.DataObject) -> None:
    rank_to_node = [sorted(set(node)).index(n) for n in node]
    speed = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=len(node), max_size=len(node)))
    topology = Topology(rank_to_node=rank_to_node, rank_speed=speed)
    for same in (
        Topology(rank_to_node=np.array(rank_to_node, dtype=np.int32), rank_speed=np.array(speed)),
        pickle.loads(pickle.dumps(topology)),
        copy.deepcopy(topology),
    ):
        assert same == topology
        assert hash(same) == hash(topology)
        assert same.rank_to_node.tolist() == rank_to_node
        assert same.rank_speed.tolist() == speed
    assert topology != Topology(rank_to_node=rank_to_node, rank_speed=[s * 2 for s in speed])
    assert topology != Topology(rank_to_node=[*rank_to_node, 0])


def test_a_topology_does_not_change() -> None:
    given_nodes, given_speed = np.array([0, 0, 1]), np.ones(3)
    topology = Topology(rank_to_node=given_nodes, rank_speed=given_speed)
    given_nodes[0], given_speed[0] = 1, 7.0
    assert topology.rank_to_node.tolist() == [0, 0, 1]
    assert topology.rank_speed.tolist() == [1.0, 1.0, 1.0]
    for array in (topology.rank_to_node, topology.rank_speed):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5
    with pytest.raises(AttributeError, match=r"`num_ranks` of a Topology cannot be set"):
        topology.num_ranks = 4
    with pytest.raises(AttributeError, match="of a Topology cannot be deleted"):
        del topology.num_nodes
    assert topology != "topology"


def test_text_names_ranks_nodes_and_unequal_speeds() -> None:
    assert repr(Topology(4, 2)) == "Topology(num_ranks=4, num_nodes=2)"
    assert repr(Topology(2, rank_speed=[1, 2])) == "Topology(num_ranks=2, num_nodes=1, rank_speed=...)"


@pytest.mark.parametrize(
    ("given_arguments", "error", "message"),
    [
        ({}, TypeError, "give `num_ranks` or `rank_to_node`"),
        ({"num_ranks": 0}, ValueError, r"`num_ranks` \(=0\) must be at least 1"),
        ({"num_ranks": True}, TypeError, r"`num_ranks` \(=True\) must be an integer"),
        ({"num_ranks": 4.0}, TypeError, r"`num_ranks` \(=4.0\) must be an integer"),
        ({"num_ranks": 4, "num_nodes": 0}, ValueError, r"`num_nodes` \(=0\) must be at least 1"),
        # Refused before anything that long is allocated.
        ({"num_ranks": 10**12}, ValueError, r"`num_ranks` \(=1000000000000\) must be at most 1048576"),
        ({"rank_to_node": [0, 10**12]}, ValueError, r"`rank_to_node` \(=1000000000000\) must be below 1048576 at rank"),
        ({"num_ranks": 2, "rank_speed": ["a", "b"]}, TypeError, r"`rank_speed` \(dtype <U1\) must be integers or"),
        ({"num_ranks": 2, "rank_speed": [1j, 2]}, TypeError, r"`rank_speed` \(dtype complex128\) must be integers or"),
        ({"num_ranks": 2, "rank_speed": [[1], 2]}, ValueError, r"`rank_speed` \(list\) must be one array with rows of"),
        # A4: a bare assertion elsewhere.
        ({"num_ranks": 3, "num_nodes": 2}, ValueError, r"`num_nodes` \(=2\) must divide `num_ranks` \(=3\)"),
        ({"rank_to_node": []}, ValueError, r"`rank_to_node` \(shape \[0\]\) must be \[R\] with one rank or more"),
        ({"rank_to_node": [[0]]}, ValueError, r"`rank_to_node` \(shape \[1, 1\]\) must be \[R\]"),
        ({"rank_to_node": [0, 2]}, ValueError, r"must name the nodes 0..2, each at least once; node 1 has no rank"),
        ({"rank_to_node": [0, -1]}, ValueError, r"must name the nodes 0..0, each at least once; rank 1 has -1"),
        ({"rank_to_node": [-1]}, ValueError, r"rank 0 has -1"),
        ({"rank_to_node": [0.5]}, TypeError, r"`rank_to_node` \(dtype float64\) must be signed integers"),
        ({"rank_to_node": [0, 0], "num_ranks": 3}, ValueError, r"`num_ranks` \(=3\) and `rank_to_node` \(2 ranks\)"),
        ({"rank_to_node": [0, 0], "num_nodes": 2}, ValueError, r"`num_nodes` \(=2\) and `rank_to_node` \(1 nodes\)"),
        ({"num_ranks": 2, "rank_speed": [1]}, ValueError, r"`rank_speed` \(shape \[1\]\) must be \[2\]"),
        ({"num_ranks": 2, "rank_speed": [1, 0]}, ValueError, r"`rank_speed` \(=0.0\) must be positive .* at rank 1"),
        ({"num_ranks": 2, "rank_speed": [1, -2]}, ValueError, r"`rank_speed` \(=-2.0\) must be positive .* at rank 1"),
        ({"rank_to_node": [0, 0], "num_ranks": "\x1b2"}, TypeError, r"`num_ranks` \(='\\x1b2'\) must be an integer"),
        ({"rank_to_node": [0, 0], "num_nodes": "1"}, TypeError, r"`num_nodes` \(='1'\) must be an integer"),
        ({"num_ranks": 2, "rank_speed": [np.nan, 1]}, ValueError, r"\(=nan\) must be positive and finite at rank 0"),
        ({"num_ranks": 2, "rank_speed": [1, np.inf]}, ValueError, r"\(=inf\) must be positive and finite at rank 1"),
        ({"num_ranks": 2, "rank_speed": [1, 1e7]}, ValueError, r"\(from 1 to 1e\+07\) must differ by a factor of a"),
    ],
)
def test_numbers_that_do_not_fit_raise_with_all_of_them(
    given_arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Topology(**given_arguments)


def test_a_notebook_shows_the_ranks_of_each_node() -> None:
    shown = Topology(rank_to_node=[0, 1, 0, 1, 2], rank_speed=[1, 1, 1, 2, 0.5])._repr_html_()
    for row in (["0", "2", "0, 2", "1"], ["1", "2", "1, 3", "1 to 2"], ["2", "1", "4", "0.5"]):
        assert "".join(f"<td>{cell}</td>" for cell in row) in shown
    many = Topology(80, 10)._repr_html_()
    assert many.count("<tr>") == 9
    assert "2 more nodes" in many
    assert "<td>0-7</td>" in many
    assert "0, 2, 4, 6, 8, 10, 12, 14 .." in Topology(rank_to_node=[0, 1] * 9)._repr_html_()
