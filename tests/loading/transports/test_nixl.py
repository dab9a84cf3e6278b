"""Reads by NIXL between processes, over TCP and by the system's own copy."""

from __future__ import annotations

import weakref
from typing import cast

import pytest

from eplb_core.errors import TransportError
from eplb_core.loading.transport import ReadState
from eplb_core.loading.transports import nixl
from eplb_core.testing import TransportKit, transports
from eplb_core.testing.peers import batch, contents, pattern, wait, world
from tests.loading.engine_process import until
from tests.loading.transports import kits

pytestmark = kits.required(nixl._import)
TCP = TransportKit(kits.nixl_tcp)


def test_an_unknown_back_end_is_named() -> None:
    with pytest.raises(TransportError, match=r"`backend` \(='WIRE'\) must be one of NIXL's: .*UCX"):
        nixl.Nixl("WIRE")


@pytest.mark.slow
def test_what_lands_after_a_read_was_given_up_on_lands_before_it_drains() -> None:
    """A stopped owner that runs again: NIXL writes all of it, and the ticket is ABANDONED until then."""
    with transports._stalled(TCP) as (w, own, ticket):
        w.transport.abandon(ticket)
        assert w.transport.poll(ticket).state is ReadState.ABANDONED
        assert not contents(own[0])[100:].any()
        transports._process(w, 1).resume()
        assert wait(w.transport, ticket, TCP.deadline).state in (ReadState.DRAINED, ReadState.DONE)
        assert (contents(own[0]) == pattern(1, TCP.big)).all()


@pytest.mark.slow
def test_a_peer_whose_connection_ended_is_reached_again_by_its_blob() -> None:
    """UCX tells of it, and from then on NIXL refuses every read until the agent is forgotten and made known anew."""
    with world(TCP) as w:
        blob = transports._join(w, 1, [TCP.big], 1)
        own = transports._own(w, [TCP.big])
        transports._done(w, w.transport.read(1, batch(transports._pieces(TCP.big))))
        assert kits.shut_connections() > 0
        for _ in range(2):
            lost = w.transport.read(1, batch(transports._pieces(TCP.big)))
            assert wait(w.transport, lost, TCP.deadline).state is ReadState.LOST_PEER
        own[0].zero_()
        w.transport.connect(1, blob)
        transports._done(w, w.transport.read(1, batch(transports._pieces(TCP.big))))
        assert (contents(own[0]) == pattern(1, TCP.big)).all()


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True])
def test_an_agent_goes_when_the_last_read_of_its_closed_transport_is_over(dies: bool) -> None:
    """Its thread would keep a core busy. Nobody polls; the peer dies, or runs again, and all bytes land before."""
    with transports._stalled(TCP) as (w, own, ticket):
        agent = weakref.ref(cast(nixl.Nixl, w.transport)._agent.agent)
        w.transport.close()
        assert not contents(own[0])[100:].any()
        assert agent() is not None
        assert w.transport in nixl._UNDRAINED
        if dies:
            transports._process(w, 1).kill()
        else:
            transports._process(w, 1).resume()
        until(lambda: agent() is None)
        assert (contents(own[0]) == pattern(1, TCP.big)).all() != dies
        assert w.transport not in nixl._UNDRAINED
        assert w.transport.poll(ticket).state is (ReadState.LOST_PEER if dies else ReadState.DONE)


@pytest.mark.slow
def test_an_agent_goes_when_a_transport_without_reads_is_closed() -> None:
    with world(TCP) as w:
        agent = weakref.ref(cast(nixl.Nixl, w.transport)._agent.agent)
        w.transport.close()
        assert agent() is None
