"""What only etcd does: it dies, comes back with or without its data, compacts, wants TLS and passwords."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cluster.etcd_server import EtcdServer
from cluster.kit import LEASE, EtcdPlace, Events, in_thread, wait_for

import kvpool
from kvpool.cluster.directory import Unreachable
from kvpool.cluster.etcd.gateway import encode

# Of members that are to outlive an etcd: a busy machine must be able to put a record back, and to renew it, within it.
LASTING = 4.0
DOWN_S = 60.0 if os.environ.get("KVPOOL_LONG") else 2 * LASTING


@pytest.fixture
def lasting(own_etcd):
    """As `own`, with a lease that a busy machine does not make run out."""
    one = EtcdPlace(own_etcd, lease=LASTING, timeout=60.0)
    yield one
    one.close()


def rejoined(own, *names):
    """Whether these are in etcd now, as a newcomer sees them."""
    with kvpool.Cluster.join(own.url, lease=LEASE) as fresh:
        return [member.name for member in fresh.members()] == sorted(names)


def test_an_etcd_that_is_down_for_two_leases_loses_no_member(lasting, own_etcd):
    router = lasting.join()
    events = Events(router)
    member = lasting.member("a", lease=LASTING)
    here = lasting.join()
    words = []
    reg = lasting.register(here, "b")
    reg.on_lease(words.append)
    events.wait("b", "joined")
    own_etcd.kill()
    wait_for(lambda: not reg.lease_valid())  # it notices by itself that its lease is no longer renewed
    time.sleep(DOWN_S)
    assert [m.name for m in router.members()] == ["a", "b"]  # the last picture
    reg.publish(state="draining")  # which waits
    own_etcd.start()
    wait_for(lambda: [m.state for m in router.members()] == ["up", "draining"])
    wait_for(lambda: reg.lease_valid())
    wait_for(lambda: set(events.of("b")) == {"joined", "changed"})
    assert events.of("a") == ["joined"]
    assert words == []
    assert member.words == []
    member.kill()  # and what happens now is reported
    events.wait("a", "joined", "lost")


def test_survivors_return_to_an_etcd_that_has_lost_its_data(lasting, own_etcd):
    router = lasting.join()
    events = Events(router)
    member = lasting.member("a", lease=LASTING)
    here = lasting.join()
    words = []
    reg = lasting.register(here, "b")
    reg.on_lease(words.append)
    events.wait("b", "joined")
    before = router.members()
    own_etcd.kill()
    own_etcd.forget()
    own_etcd.start()
    newcomer = lasting.join()
    other = lasting.register(newcomer, "c", timeout=60)  # which must not have the id of one that is on its way back
    assert other.instance not in {member.instance, reg.instance}
    wait_for(lambda: rejoined(lasting, "a", "b", "c"))
    assert [m for m in router.members() if m.name != "c"] == before  # the same ids, incarnations and terms
    time.sleep(2 * LASTING)
    assert set(events.of("a") + events.of("b")) == {"joined"}
    assert words == []
    assert member.words == []
    wait_for(reg.lease_valid)


def test_a_newcomer_waits_for_survivors_that_return_slowly(own, own_etcd, monkeypatch):
    """An empty etcd does not say which ids are taken: a newcomer that takes the first one takes a survivor's."""
    reg = own.register(own.join(), "a")
    entry, tries, may_come = reg._entry, [], []
    enter_again = entry.enter_again

    def late(record, *, lost):
        tries.append(1)
        if not may_come:
            raise Unreachable("the test holds it up")
        return enter_again(record, lost=lost)

    monkeypatch.setattr(entry, "enter_again", late)
    own_etcd.kill()
    own_etcd.forget()
    own_etcd.start()
    wait_for(lambda: tries)
    newcomer = own.join(lease=40.0)  # for which it waits at most
    ids = []
    with in_thread(lambda: ids.append(own.register(newcomer, "b", timeout=60).instance)):
        asked = len(tries)
        wait_for(lambda: len(tries) > asked + 1)
        assert ids == []
        may_come.append(1)
    assert ids != [reg.instance]
    wait_for(reg.lease_valid)  # others see its record before its own thread knows that it was written
    wait_for(lambda: rejoined(own, "a", "b"))


def test_a_member_that_died_when_etcd_lost_its_data_is_lost(lasting, own_etcd):
    router = lasting.join()
    events = Events(router)
    member = lasting.member("a", lease=LASTING)
    lasting.register(lasting.join(), "b")
    events.wait("a", "joined")
    events.wait(
        "b", "joined"
    )  # or it is reported again when etcd is back, perhaps after the event that is waited for below
    own_etcd.kill()
    member.kill()
    own_etcd.forget()
    own_etcd.start()
    events.wait("a", "joined", "lost")
    assert events.of("b") == ["joined"]


def test_a_watch_whose_history_was_compacted_reads_everything_again(own, own_etcd):
    router = own.join()
    events = Events(router)
    first = own.register(own.join(), "a")
    second = own.register(own.join(), "b")
    events.wait("b", "joined")
    watcher = router._directory.watcher
    watcher._revision = 1  # as if it had received nothing since
    for number in range(3):
        first.publish(load=kvpool.Load(requests=number + 1))
        wait_for(lambda number=number: router.members()[0].load.requests == number + 1)
    second.leave()
    revision = own_etcd.call("kv/range", {"key": encode("x")})["header"]["revision"]
    own_etcd.call("kv/compaction", {"revision": revision, "physical": True})
    watcher._revision = 1
    watcher._stream.stop()
    own.register(own.join(), "c")
    events.wait("c", "joined")
    assert [m.name for m in router.members()] == ["a", "c"]
    assert events.of("a").count("joined") == 1


def test_a_broken_watch_continues_where_it_was(own, own_etcd, monkeypatch):
    router = own.join()
    events = Events(router)
    reg = own.register(own.join(), "a")
    events.wait("a", "joined")
    watcher = router._directory.watcher

    def never(*given):
        raise AssertionError("all was read again")

    monkeypatch.setattr(watcher, "read_all", never)
    for state in ("draining", "up", "draining"):
        watcher._stream.stop()
        reg.publish(state=state)
        wait_for(lambda state=state: [m.state for m in router.members()] == [state])
    assert events.of("a").count("joined") == 1


@pytest.mark.parametrize("moment", ["right after it was entered", "later"])
def test_an_etcd_with_passwords_that_restarts_loses_no_member(own_etcd, moment):
    """All must authenticate again, at once; renewing the lease must not wait for that."""
    # It writes its counter of ids while it needs no password.
    own = EtcdPlace(own_etcd, lease=LASTING, user="root", password="right")
    for command in (("user", "add", "root:right"), ("user", "grant-role", "root", "root"), ("auth", "enable")):
        own_etcd.etcdctl(*command)
    try:
        router = own.join()
        events = Events(router)
        for _ in range(3):
            member = own.member("a", lease=LASTING)
            until = member("reg._entry.renewer.valid_until_ns")
            if moment == "later":
                events.wait("a", "joined")
                wait_for(lambda until=until, member=member: member("reg._entry.renewer.valid_until_ns") > until)
            own_etcd.kill()
            own_etcd.start()
            restarted_ns = time.monotonic_ns()
            # Renewed since: it is certain for longer than it could be if it was not.
            sure = restarted_ns + int(LASTING * 1e9)
            wait_for(lambda sure=sure, member=member: member("reg._entry.renewer.valid_until_ns") > sure)
            events.wait("a", "joined")
            assert set(events.of("a")) == {"joined"}
            assert member.words == []
            member("reg.leave()")
            events.wait("a", "left")
            events.all.clear()
    finally:
        own.close()


def test_an_etcd_that_is_stopped_delays_no_call(own, own_etcd):
    cluster = own.join()
    reg = own.register(cluster, "a")
    own_etcd.stop()
    try:
        began = time.monotonic()
        assert [m.name for m in cluster.members()] == ["a"]
        reg.publish(state="draining")
        with pytest.raises(kvpool.DeadlineExceeded):
            kvpool.Cluster.join(own.url, lease=LEASE, timeout=0.3)
        assert time.monotonic() - began < 10
        wait_for(lambda: not reg.lease_valid())
    finally:
        own_etcd.kill()  # not SIGCONT alone: etcd 3.5.1 has been seen to panic when it wakes
    own_etcd.start()
    wait_for(lambda: [m.state for m in own.join().members()] == ["draining"])


def test_the_next_endpoint_is_asked_when_one_is_dead(own):
    port = own.server.port
    place = f"etcd://127.0.0.1:1,127.0.0.1:{port}/{own.prefix}"
    with kvpool.Cluster.join(place, lease=LEASE) as cluster:
        own.register(cluster, "a")
        wait_for(lambda: [m.name for m in own.join().members()] == ["a"])


def test_the_absence_of_etcd_is_reported_in_time():
    began = time.monotonic()
    with pytest.raises(kvpool.DeadlineExceeded, match="does not answer"):
        kvpool.Cluster.join("etcd://127.0.0.1:1/x", timeout=0.3)
    assert time.monotonic() - began < 10


def test_a_killed_renewer_is_started_again(own):
    router = own.join(lease=10.0)  # a busy machine takes seconds to start one
    events = Events(router)
    reg = own.register(own.join(lease=10.0), "a")
    renewer = reg._entry.renewer
    first = renewer.pid
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: renewer.pid != first)
    until = renewer.valid_until_ns
    wait_for(lambda: renewer.valid_until_ns > until)
    assert events.of("a") in ([], ["joined"])
    assert reg.lease_valid()


def test_a_renewer_that_cannot_be_started_again_is_tried_again(own, monkeypatch):
    router = own.join()
    reg = own.register(own.join(), "a")
    renewer = reg._entry.renewer
    first, popen, tries = renewer.pid, subprocess.Popen, []

    def no_more_processes(*arguments, **options):
        tries.append(1)
        raise BlockingIOError(11, "no more processes")

    monkeypatch.setattr(subprocess, "Popen", no_more_processes)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: len(tries) >= 3)
    monkeypatch.setattr(subprocess, "Popen", popen)
    wait_for(lambda: renewer.pid != first)
    reg.publish(state="draining")  # the cluster's thread lives
    wait_for(lambda: [m.state for m in router.members()] == ["draining"])
    wait_for(reg.lease_valid)


def renewer_pages():
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return sum("kvpool-renewer" in os.readlink(link) for link in links if os.path.islink(link))


def test_a_renewer_that_cannot_be_started_leaves_no_descriptor(own, monkeypatch):
    cluster = own.join()

    def no_more_processes(*arguments, **options):
        raise BlockingIOError(11, "no more processes")

    monkeypatch.setattr(subprocess, "Popen", no_more_processes)
    before = renewer_pages()
    for _ in range(3):
        with pytest.raises(kvpool.Unsupported, match="no more processes"):
            own.register(cluster, "a")
    assert renewer_pages() == before


def test_a_renewer_loads_neither_the_core_nor_numpy(own):
    renewer = own.register(own.join(), "a")._entry.renewer
    until = renewer.valid_until_ns
    wait_for(lambda: renewer.valid_until_ns > until)  # it runs
    mapped = Path(f"/proc/{renewer.pid}/maps").read_text()
    assert "python" in mapped
    assert "_core" not in mapped
    assert "numpy" not in mapped


def test_a_renewer_ends_with_its_member_however_that_ends(own):
    for end in ("kill", "leave"):
        member = own.member("a" + end)
        pid = member("reg._entry.renewer.pid")
        descriptor = os.pidfd_open(pid)
        try:
            if end == "kill":
                member.kill()
            else:
                member("reg.leave()")
            wait_for(lambda descriptor=descriptor: _ended(descriptor))
        finally:
            os.close(descriptor)


def _ended(pidfd):
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_killed_member_is_reported_before_its_lease_has_run_out(own):
    """The renewer revokes the lease: with a lease of a minute no one waits a minute."""
    router = own.join()
    events = Events(router)
    member = own.member("a", lease=60)
    events.wait("a", "joined")
    member.kill()
    events.wait("a", "joined", "lost", seconds=50)


@pytest.fixture
def certificates(tmp_path):
    """An authority of the test's own, a certificate for 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=tmp_path, check=True, capture_output=True)

    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority")
    openssl("req", *curve[:-2], "-keyout", "key.pem", "-out", "request.pem", "-subj", "/CN=etcd")
    (tmp_path / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    openssl("x509", "-req", "-in", "request.pem", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
            "-extfile", "names", "-out", "cert.pem")  # fmt: skip
    return tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem"


def test_tls_and_a_password(certificates, tmp_path):
    server = EtcdServer(tmp_path / "etcd", tls=certificates)
    try:
        ca = str(certificates[0])
        server.etcdctl("user", "add", "root:right")
        server.etcdctl("user", "grant-role", "root", "root")
        server.etcdctl("auth", "enable")
        url = f"etcds://127.0.0.1:{server.port}/x"
        options = {"lease": LEASE, "tls_ca": ca, "timeout": 60.0}
        with pytest.raises(kvpool.AuthError):
            kvpool.Cluster.join(url, **options, user="root", password="wrong")
        with pytest.raises(kvpool.AuthError):
            kvpool.Cluster.join(url, **options)
        with pytest.raises(kvpool.AuthError, match="certificate"):
            kvpool.Cluster.join(url, lease=LEASE, timeout=60.0, user="root", password="right")
        with (
            kvpool.Cluster.join(url, **options, user="root", password="right") as cluster,
            kvpool.Cluster.join(url, **options, user="root", password="right") as router,
        ):
            reg = cluster.register(name="a", role="both", incarnation=1)
            assert [m.name for m in router.wait_for(n=1)] == ["a"]
            until = reg._entry.renewer.valid_until_ns
            wait_for(lambda: reg._entry.renewer.valid_until_ns > until)  # the renewer is let in, too
            reg.publish(state="draining")
            wait_for(lambda: [m.state for m in router.members()] == ["draining"])
    finally:
        server.kill()
