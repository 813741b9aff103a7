"""What only the local cluster has: a folder that may be deleted under its members, the secret, permissions."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import time

import pytest
from cluster.kit import Events, LocalPlace, wait_for

import kvpool
from kvpool.cluster.directory import Unreachable
from kvpool.cluster.local.folder import Folder, folder_path
from kvpool.cluster.local.ids import IdLock, held_ids
from kvpool.cluster.local.page import OwnPage
from kvpool.cluster.local.scanner import RECORD_SUFFIX


def test_a_timeout_of_none_is_the_default(local, monkeypatch):
    monkeypatch.setattr("kvpool.cluster.cluster._WAIT_S", 0.05)
    router = local.join(timeout=None)
    for given in ({}, {"timeout": None}):
        with pytest.raises(kvpool.DeadlineExceeded, match=r"0 of 1 decode after 0\.05 s"):
            router.wait_for("decode", **given)
    router.close()
    assert kvpool.Cluster.forget(local.url, timeout=None)
    for default in ("_DIRECTORY_S", "_WAIT_S"):
        monkeypatch.setattr(f"kvpool.cluster.cluster.{default}", 0.0)
    again = local.join(timeout=10)  # a given one is no default
    assert again.wait_for(n=0, timeout=10) == []


@pytest.mark.parametrize("way", ["removed", "moved", "emptied", "unrecorded"])
def test_all_members_come_back_after_their_folder_is_deleted(local, way):
    members = [local.member(name) for name in "abc"]
    router = local.join()
    events = Events(router)
    for name in "abc":
        events.wait(name, "joined")
    before, secret = router.members(), router.secret
    if way == "removed":
        shutil.rmtree(local.folder, ignore_errors=True)  # while members restore missing files
    elif way == "moved":
        os.rename(local.folder, f"{local.folder}.gone")
    elif way == "emptied":
        for file in ("state", "lock"):
            (local.folder / file).unlink()
    else:
        records = list(local.folder.glob(f"*{RECORD_SUFFIX}"))
        assert len(records) == 3
        for record in records:
            record.unlink()
    newcomer = local.join(timeout=30)
    assert newcomer.secret == secret
    reg = local.register(newcomer, "d", timeout=30)
    assert reg.instance not in {member.instance for member in members}
    wait_for(lambda: [m.name for m in newcomer.members()] == ["a", "b", "c", "d"])
    assert [m for m in newcomer.members() if m.name != "d"] == before  # ids, incarnations and terms
    wait_for(lambda: len(router.members()) == 4)
    assert [events.of(name) for name in "abc"] == [["joined"]] * 3
    assert [member.words for member in members] == [[], [], []]
    shutil.rmtree(f"{local.folder}.gone", ignore_errors=True)
    members[0].kill()  # and the new files tell of deaths, as the old ones did
    events.wait("a", "joined", "lost")


def test_a_member_that_slept_while_its_folder_and_its_name_were_taken_is_refused(local):
    sleeper = local.member("a")
    router = local.join()
    events = Events(router)
    events.wait("a", "joined")
    sleeper.stop()
    events.wait("a", "joined", "lost")
    router.close()  # no process is left that knows the secret
    shutil.rmtree(local.folder)
    other = local.join(timeout=0.2)  # it waits for the one that sleeps, and then begins anew
    reg = local.register(other, "b")
    assert reg.instance != sleeper.instance  # which the kernel knows to be held
    sleeper.wake()
    wait_for(lambda: sleeper.words[-1:] == ["refused"])
    assert reg.lease_valid()
    assert [m.name for m in other.members()] == ["b"]


def test_the_secret_is_made_once_and_only_this_user_can_read_it(local):
    first, second = local.join(), local.join()
    assert first.secret == second.secret
    assert len(first.secret) == 64
    assert stat.S_IMODE(os.stat(local.folder).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(local.folder / "state").st_mode) == 0o600
    local.register(first, "a")
    assert local.join().secret == first.secret


def test_the_lock_of_the_folder_does_not_stay_with_a_child(local):
    local.join().close()
    folder = Folder(str(local.folder))
    with folder.locked(time.monotonic() + 60):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        with folder.locked(time.monotonic()):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_only_valid_ids_count_as_held(local):
    holds = [IdLock(local.name, number) for number in (0, 3, 16383, 16384, 10**20)]
    assert held_ids(local.name) == {3, 16383}
    for hold in holds:
        hold.close()


def test_an_id_is_held_by_one_process_at_a_time(local):
    """The last guard against two of one id, when two look for one in the same moment."""
    first = IdLock(local.name, 3)
    with pytest.raises(FileExistsError, match="the id 3 is held"):
        IdLock(local.name, 3)
    assert held_ids(local.name) == {3}  # the failed one has released it, the first has not
    first.close()
    IdLock(local.name, 3).close()


def test_failing_to_write_a_member_is_a_state_error(local, monkeypatch):
    cluster = local.join()

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvpool.cluster.local.entry.OwnPage", full)
    with pytest.raises(kvpool.StateError, match="No space left"):
        local.register(cluster, "a")
    monkeypatch.undo()
    local.register(cluster, "a")


def test_a_folder_that_others_can_open_is_refused(local):
    local.join().close()
    os.chmod(local.folder, 0o755)
    with pytest.raises(kvpool.StateError):
        local.join()
    shutil.rmtree(local.folder)
    elsewhere = LocalPlace()
    try:
        elsewhere.join()
        os.symlink(elsewhere.folder, local.folder)
        with pytest.raises(kvpool.StateError):
            local.join()
    finally:
        os.unlink(local.folder)
        elsewhere.close()


def test_ids_continue_after_the_last_and_skip_those_that_are_held(local):
    cluster, other = local.join(), local.join()
    held = local.register(other, "held").instance
    state = local.folder / "state"
    with state.open("r+") as file:  # never empty: the threads of both look at it
        changed = file.read().replace(f'"highest": {held}', '"highest": 16382')
        file.seek(0)
        file.write(changed)
    ids = []
    for name in "ab":
        reg = local.register(cluster, name)
        ids.append(reg.instance)
        reg.leave()
    assert ids == [16383, 2]
    assert held == 1


def test_a_state_file_with_garbage_is_made_anew(local):
    cluster = local.join()
    (local.folder / "state").write_bytes(b"[" * 9000)
    assert local.register(cluster, "a").instance == 1
    assert local.join(timeout=30).members()[0].name == "a"


def test_a_cluster_without_members_is_forgotten_and_begins_anew(local):
    first = local.join()
    assert local.register(first, "a").instance == 1
    secret = first.secret
    first.close()
    assert kvpool.Cluster.forget(local.url)
    assert not local.folder.exists()
    assert not kvpool.Cluster.forget(local.url)
    second = local.join()
    assert second.secret != secret
    assert local.register(second, "a").instance == 1


@pytest.mark.parametrize("state", ["runs", "is stopped", "has lost its folder"])
def test_a_cluster_with_members_is_not_forgotten(local, state):
    member = local.member("a b", lease=60.0)
    if state == "is stopped":
        member.stop()
    if state == "has lost its folder":
        member.stop()  # or it makes it again
        for file in local.folder.iterdir():
            file.unlink()
    with pytest.raises(kvpool.StateError, match="unknown by name" if "folder" in state else "live: a b"):
        kvpool.Cluster.forget(local.url, timeout=30)
    member.wake()
    assert local.join(timeout=30).wait_for(n=1)[0].instance == member.instance
    assert member.words == []
    member.kill()
    wait_for(lambda: not held_ids(local.name))
    assert kvpool.Cluster.forget(local.url)


def test_files_of_a_dead_member_are_forgotten_with_the_rest(local):
    local.member("a").kill()
    wait_for(lambda: not held_ids(local.name))
    assert (local.folder / "m.a.lock").exists()
    assert kvpool.Cluster.forget(local.url)
    assert not local.folder.exists()


def test_a_watcher_of_a_forgotten_cluster_sees_the_next_members(local):
    router = local.join()
    assert kvpool.Cluster.forget(local.url)
    local.register(local.join(timeout=30), "a")
    wait_for(lambda: [m.name for m in router.members()] == ["a"])


@pytest.mark.parametrize("url", ["etcd://127.0.0.1/x", "local://", "local://../x", "x"])
def test_only_a_local_cluster_can_be_forgotten(url):
    with pytest.raises(kvpool.ArgumentError):
        kvpool.Cluster.forget(url)


@pytest.mark.parametrize(
    ("url", "options", "error"),
    [
        ("local://", {}, kvpool.ArgumentError),
        ("local://a/b", {}, kvpool.ArgumentError),
        ("local://..", {}, kvpool.ArgumentError),
        ("local://" + "x" * 65, {}, kvpool.ArgumentError),
        ("demo", {}, kvpool.ArgumentError),
        ("redis://host/x", {}, kvpool.ArgumentError),
        ("etcd://", {}, kvpool.ArgumentError),
        ("etcd://host:0/x", {}, kvpool.ArgumentError),
        ("etcd://host:70000/x", {}, kvpool.ArgumentError),
        ("etcd://a,/x", {}, kvpool.ArgumentError),
        ("etcd://user:word@host/x", {}, kvpool.ArgumentError),
        ("etcd://host/a b", {}, kvpool.ArgumentError),
        ("etcd://host/x", {"tls_ca": "f"}, kvpool.ArgumentError),
        ("etcds://host/x", {"tls_cert": "f"}, kvpool.ArgumentError),
        ("etcds://host/x", {"tls_ca": "/does/not/exist"}, kvpool.ArgumentError),
        ("etcd://host/x", {"user": "u"}, kvpool.ArgumentError),
        ("local://x", {"user": "u", "password": "p"}, kvpool.ArgumentError),
        ("local://x", {"lease": 0}, kvpool.ArgumentError),
        ("local://x", {"lease": "3"}, kvpool.ArgumentTypeError),
        ("local://x", {"lease": 1, "heartbeat": 0.9}, kvpool.ArgumentError),
        ("local://x", {"timeout": -1}, kvpool.ArgumentError),
        (3, {}, kvpool.ArgumentTypeError),
    ],
)
def test_a_bad_address_or_option_is_refused(url, options, error):
    with pytest.raises(error) as raised:
        kvpool.Cluster.join(url, **options)
    assert "word@" not in str(raised.value)
    assert not os.path.exists(folder_path("x"))


def test_a_member_that_is_stopped_while_it_reads_its_page_has_lost_its_lease(local, monkeypatch):
    """Its findings say nothing then: another member may have the name by now."""
    reg = local.register(local.join(), "a")
    page = reg._entry._page

    def is_at(folder):
        monkeypatch.setattr(OwnPage, "lapses", 1)  # counted when it wakes
        return False

    with reg._entry_lock:  # the cluster's thread does not ask meanwhile
        monkeypatch.setattr(page, "is_at", is_at)
        assert reg._entry.check_lease() == "lost"
        monkeypatch.undo()


def test_a_member_that_is_stopped_before_it_registers_again_is_told_that_it_was_lost(local, monkeypatch):
    """Its pool may have fenced itself by the clock, and is let out by "lost" and "regained" alone."""
    reg = local.register(local.join(), "a")
    with reg._entry_lock:
        monkeypatch.setattr(OwnPage, "lapses", 1)
        assert reg._entry.lapsed()
        with pytest.raises(Unreachable, match="stopped meanwhile"):
            reg._entry.enter_again(reg.record, lost=False)
        assert reg._entry.check_lease() == "lost"
        assert reg._entry.enter_again(reg.record, lost=True) == 1
        assert reg._entry.check_lease() == "held"
        monkeypatch.undo()
