"""Logs: silent until configured, with fields for formatters."""

from __future__ import annotations

import contextlib
import logging
import time

from cluster.kit import Events, LocalPlace
from kit import run_script, small_pool
from transfer.kit import pair_of


def test_nothing_is_printed_until_the_application_configures_logging():
    run_script(
        """
        import logging
        logging.getLogger("kvpool.peers").warning("a peer is lost")
        """.replace("\n        ", "\n")
    )


def test_peers_that_come_and_go_are_logged_with_the_reason(caplog):
    with caplog.at_level(logging.INFO, "kvpool"), small_pool(name="here", secret="s") as here:
        address = here.peers.listen("unix:@kvpool-logs-" + str(time.monotonic_ns()))
        seen = []
        with here.peers.on_change(seen.append):
            with small_pool(name="there", secret="s") as there:
                there.peers.connect(address)
            give_up = time.monotonic() + 60
            while len(seen) < 2:
                assert time.monotonic() < give_up
                time.sleep(0.005)
    found = {record.getMessage().split(":")[0]: record for record in caplog.records}
    assert found["there has joined"].levelno == logging.INFO
    lost = found["there is lost"]
    assert lost.levelno == logging.WARNING
    assert (lost.name, lost.peer, lost.reason) == ("kvpool.peers", "there", "PeerLost")
    assert lost.incarnation == found["there has joined"].incarnation != 0
    assert found["connected to here at unix"].peer == "here"
    assert next(record for record in caplog.records if "listening" in record.getMessage()).address == address


def test_transfers_log_nothing(caplog):
    """Neither those that work nor those that fail: they raise, and are counted."""
    with pair_of("loopback") as pair, caplog.at_level(logging.DEBUG, "kvpool"):
        caplog.clear()
        addrs = pair.a.alloc(1)
        pair.a.transfer(pair.to_b, addrs).wait()
        cancelled = pair.a.transfer(pair.to_b, addrs, layerwise=True).transfer
        cancelled.cancel()
        with contextlib.suppress(Exception):
            cancelled.wait()
        assert caplog.records == []


def test_members_that_come_and_go_are_logged_with_who_and_why(caplog):
    place = LocalPlace()
    try:
        with caplog.at_level(logging.INFO, "kvpool.cluster"):
            router = place.join()
            events = Events(router)
            reg = place.register(place.join(), "a", role="prefill")
            events.wait("a", "joined")
            killed = place.member("b", role="decode")
            events.wait("b", "joined")
            killed.kill()
            events.wait("b", "joined", "lost")
            reg._report("lost")
            reg.leave()
            events.wait("a", "joined", "left")
    finally:
        place.close()
    found = {(one.event, one.member): one for one in caplog.records if hasattr(one, "event")}
    joined, left, lost, lease = (found[key] for key in (("joined", "a"), ("left", "a"), ("lost", "b"), ("lost", "a")))
    assert (joined.incarnation, joined.role, joined.instance) == (reg.record.incarnation, "prefill", reg.instance)
    assert (left.incarnation, left.why) == (reg.record.incarnation, "it has announced its leave")
    assert (lost.incarnation, lost.role, lost.why) == (killed.incarnation, "decode", "its process has ended")
    assert (lease.levelno, lease.incarnation) == (logging.WARNING, reg.record.incarnation)
    assert "longer than its lease" in lease.why
