"""An etcd that has lost its data gives no id to two live members; unknown cases are decided once they are known."""

from __future__ import annotations

from cluster.kit import Events, wait_for

from kvpool.cluster.directory import Unreachable
from kvpool.cluster.etcd.gateway import encode
from kvpool.cluster.etcd.keys import Keys


class CutOff:
    """A member that learns nothing of its lease until it is `back`."""

    def __init__(self, registration, monkeypatch) -> None:
        self.words = []
        registration.on_lease(self.words.append)
        self._entry = registration._entry
        self._hold = self._entry.check_lease
        self._patch = monkeypatch

        def nobody_answers():
            raise Unreachable("the test has cut it off")

        self._patch.setattr(self._entry, "check_lease", nobody_answers)

    def back(self) -> None:
        self._patch.setattr(self._entry, "check_lease", self._hold)


def lose_memory(server):
    server.kill()
    server.forget()
    server.start()


def test_the_id_of_a_lost_member_that_lives_is_remembered_by_those_that_saw_it(own, own_etcd, monkeypatch):
    """No list has it; but others hold its addresses, and it will be back."""
    cluster = own.join()
    events = Events(cluster)
    survivor = own.register(cluster, "a")
    reg = own.register(own.join(), "b")
    events.wait("b", "joined")
    cut_off = CutOff(reg, monkeypatch)
    own_etcd.call("lease/revoke", {"ID": str(reg._entry._lease)})  # as if it had run out
    events.wait("b", "joined", "lost")
    lose_memory(own_etcd)
    newcomer = own.register(own.join(), "c")
    assert newcomer.instance not in (survivor.instance, reg.instance)
    cut_off.back()
    events.wait("b", "joined", "lost", "joined")
    found = {one.name: one.instance for one in cluster.members()}
    assert found == {"a": survivor.instance, "b": reg.instance, "c": newcomer.instance}
    assert cut_off.words == []


def test_a_member_that_comes_back_too_late_for_its_id_is_refused(own, own_etcd, monkeypatch):
    """No other member was there to remember it: then one of the two ends, the one that was away."""
    reg = own.register(own.join(), "a")
    cut_off = CutOff(reg, monkeypatch)
    lose_memory(own_etcd)
    newcomer = own.register(own.join(), "b")  # after a lease
    assert newcomer.instance == reg.instance
    cut_off.back()
    wait_for(lambda: cut_off.words[-1:] == ["refused"])
    assert not reg.lease_valid()
    wait_for(newcomer.lease_valid)
    wait_for(lambda: [one.name for one in own.join().members()] == ["b"])


def test_survivors_are_back_before_their_renewers_ask_again(own, own_etcd):
    """The watch reports that etcd is new: no one waits for a heartbeat of half a minute."""
    reg = own.register(own.join(lease=90.0, heartbeat=30.0), "a")
    lose_memory(own_etcd)
    record = {"key": encode(Keys(own.prefix).member("a"))}
    wait_for(lambda: "kvs" in own_etcd.call("kv/range", record), 20)
    assert [(one.name, one.instance) for one in own.join().members()] == [("a", reg.instance)]
