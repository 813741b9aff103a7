"""Members that lose their lease and get it back."""

from __future__ import annotations

import threading

from attach_kit import eventually, member, two, url
from kit import refused

from kvpool import Fenced

__all__ = ["url"]


def test_peers_that_disconnected_before_a_loss_reconnect_when_the_lease_is_back(url):
    with two(url) as (a, b):
        a.transfer("b", a.alloc(1)).wait()
        eventually(lambda: "b" in a._attachment._members._met)
        for _ in range(2):
            b._expel(a._incarnation(), "its lease has run out")  # b learns it first
            eventually(lambda: a.peers.list() == [] == b.peers.list())
            b._attachment._members.pass_again()
            a._attachment._on_lease("lost")
            a._attachment._on_lease("lost")
            with refused(a, Fenced, "lost its lease"):
                a.alloc(1, instance="b")
            a._attachment._on_lease("regained")
            eventually(lambda: [peer.name for peer in a.peers.list()] == ["b"])


def test_a_peer_that_has_left_is_not_called_again(url):
    with member(url, "a") as (a, _, attachment):
        with member(url, "b") as (b, *_):
            eventually(lambda: len(attachment._members.names()) == 1)
            a.transfer("b", a.alloc(1)).wait()
            eventually(lambda: "b" in attachment._members._met)
            b.close()
        eventually(lambda: attachment._members._met == set())


def test_a_member_that_leaves_while_its_lease_comes_back_stays_fenced(url, monkeypatch):
    with two(url) as (a, b):
        own = a.alloc(1)
        attachment = a._attachment
        attachment._on_lease("lost")
        leaver = threading.Thread(target=attachment.close)
        unfence = a._unfence

        def leave_and_unfence() -> None:
            leaver.start()
            eventually(lambda: attachment.closed)
            leaver.join(0.5)
            unfence()

        monkeypatch.setattr(a, "_unfence", leave_and_unfence)
        attachment._on_lease("regained")
        leaver.join(30)
        assert not leaver.is_alive()
        for _ in range(2):
            with refused(a, Fenced, "has left its cluster"):
                a.transfer("b", own)
            attachment._on_lease("regained")  # and later
        assert b.peers.list() == []
