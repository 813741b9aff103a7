"""Other users of the machine, who may take any name in a folder that all can write, and any name of a socket."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from pathlib import Path

import pytest
from kit import run_script

import kvpool
from kvpool.cluster.local.user_folder import UserFolders, cluster_path, this_users_folders

OURS = os.getuid()
needs_other_users = pytest.mark.skipif(OURS != 0, reason="only root can act as another user")


@pytest.fixture
def places(tmp_path):
    """Two folders in which all may write, none that the system made for the user, and a home."""
    for name in ("shm", "tmp", "home"):
        (tmp_path / name).mkdir()
    shared = (str(tmp_path / "shm"), str(tmp_path / "tmp"))
    return UserFolders(OURS, shared, str(tmp_path / "run"), str(tmp_path / "home"), "boot-1")


def take(root: str, by: int = 65534) -> None:
    """Another user makes a folder of that name first."""
    os.mkdir(root)
    os.chown(root, by, by)


def make(path: str) -> None:
    os.makedirs(path, mode=0o700)


# ---- which place it is


def test_the_first_place_is_taken_and_nothing_is_made_by_asking(places):
    assert cluster_path("x", places) == f"{places.shared[0]}/kvpool-{OURS}/x"
    assert os.listdir(places.shared[0]) == os.listdir(places.home) == []


def test_no_environment_variable_sets_the_place(monkeypatch):
    before = cluster_path("x", this_users_folders())
    for name in ("XDG_RUNTIME_DIR", "TMPDIR", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "/somewhere/else")
    assert cluster_path("x", this_users_folders()) == before


def test_a_place_that_cannot_be_made_is_left_out(places):
    os.rmdir(places.shared[0])
    assert cluster_path("x", places) == f"{places.shared[1]}/kvpool-{OURS}/x"
    os.mkdir(places.run)
    assert cluster_path("x", places) == f"{places.run}/kvpool/x"


def test_an_existing_cluster_is_found_although_a_better_place_is_free(places):
    elsewhere = f"{places.shared[1]}/kvpool-{OURS}/x"
    make(elsewhere)
    assert cluster_path("x", places) == elsewhere
    assert cluster_path("y", places) == f"{places.shared[0]}/kvpool-{OURS}/y"


@needs_other_users
def test_a_place_of_another_user_is_left_out(places, caplog):
    take(f"{places.shared[0]}/kvpool-{OURS}")
    expected = f"{places.shared[1]}/kvpool-{OURS}/x"
    assert cluster_path("x", places) == cluster_path("x", places) == expected
    assert caplog.text.count("belongs to nobody (uid 65534)") == 1  # once in a process
    make(expected)
    os.rmdir(f"{places.shared[0]}/kvpool-{OURS}")  # the stranger goes
    assert cluster_path("x", places) == expected


@needs_other_users
def test_a_cluster_of_another_user_is_not_taken_for_ours(places):
    theirs = f"{places.shared[0]}/kvpool-{OURS}"
    take(theirs)
    os.mkdir(f"{theirs}/x")
    assert cluster_path("x", places) == f"{places.shared[1]}/kvpool-{OURS}/x"


@needs_other_users
def test_when_every_name_is_taken_the_home_keeps_another_one(places):
    for root in places.fixed():
        if os.path.isdir(os.path.dirname(root)):
            take(root)
    os.makedirs(f"{places.home}/.cache/kvpool")  # by something else, with the usual mode
    path = cluster_path("x", places)
    assert os.path.dirname(os.path.dirname(path)) == places.shared[0]
    assert os.path.dirname(path) not in places.fixed()
    assert cluster_path("x", places) == path  # all processes of the user agree
    make(path)
    for root in places.fixed():
        if os.path.isdir(root):
            os.rmdir(root)
    assert cluster_path("x", places) == path
    file = Path(places.home, ".cache", "kvpool", "local-boot-1")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600  # no other user can read which name it is
    for content in ("../../etc", "", "0" * 15, "0" * 17):
        file.write_text(content)
        assert cluster_path("y", places) == f"{places.shared[0]}/kvpool-{OURS}/y"


@needs_other_users
@pytest.mark.parametrize("home", ["none", "another user's"])
def test_if_there_is_no_place_the_error_names_the_owner_of_each(places, home):
    if home == "none":
        places = UserFolders(OURS, places.shared, places.run, None, places.boot)
    else:
        os.chown(places.home, 65534, 65534)
    taken = [f"{root}/kvpool-{OURS}" for root in places.shared]
    for root, uid in zip(taken, (65534, 3_000_000_000), strict=True):
        take(root, uid)
    with pytest.raises(kvpool.StateError) as caught:
        cluster_path("x", places)
    text = str(caught.value)
    assert f"{taken[0]} belongs to nobody (uid 65534)" in text
    assert f"{taken[1]} belongs to uid 3000000000" in text
    assert f"{places.run}/kvpool cannot be created" in text


def test_a_folder_of_ours_that_others_may_open_is_refused_with_its_mode(local):
    os.makedirs(local.folder, 0o700)
    os.chmod(local.folder, 0o750)
    with pytest.raises(kvpool.StateError, match=r"mode 0750.*0700"):
        local.join()


# ---- another user at work

AS = """
import glob, os, shutil, socket, sys
def as_user(uid, work):
    process = os.fork()
    if process == 0:
        try:
            os.setgroups([]); os.setgid(uid); os.setuid(uid)
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        finally:
            sys.stdout.flush()
        os._exit(0)
    return os.waitpid(process, 0)[1]
"""


@needs_other_users
def test_another_user_who_takes_all_names_of_ids_takes_no_id(local):
    names = 300
    run_script(
        AS
        + f"""
from kvpool.cluster.local.ids import _prefix
kept = []
prefix = _prefix("{local.name}")
def take():
    for number in range(1, {names}):
        for end in (b"", b"-0000000000000007"):
            one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            one.bind(prefix + str(number).encode() + end)
            kept.append(one)
    os.write(write, b"taken")
    os.read(until, 1)
read, write = os.pipe()
until, end = os.pipe()
stranger = os.fork()
if stranger == 0:
    os.close(end)
    os._exit(1 if as_user(65534, take) else 0)
os.close(until)
assert os.read(read, 5) == b"taken"
try:
    cluster = kvpool.Cluster.join("{local.url}", timeout=60)  # it would wait for unknown members
    member = cluster.register(name="a", role="both", incarnation=1)
    assert member.instance == 1, member.instance
    other = kvpool.Cluster.join("{local.url}").register(name="b", role="both", incarnation=2)
    assert other.instance == 2, other.instance
    member.leave()
    other.leave()
    cluster.close()
    assert kvpool.Cluster.forget("{local.url}")
finally:
    os.close(end)
    assert os.waitpid(stranger, 0)[1] == 0
"""
    )


@needs_other_users
def test_processes_of_a_user_find_each_other_although_another_user_has_their_folder():
    uid = 2_000_000_000 + secrets.randbelow(1 << 24)  # nobody's
    taken = f"/dev/shm/kvpool-{uid}"
    take(taken)
    try:
        run_script(
            AS
            + f"""
def first():
    cluster = kvpool.Cluster.join("local://meet")
    assert cluster.register(name="a", role="both", incarnation=1).instance == 1
    os.write(write, b"there")
    os.read(until, 1)
    cluster.close()
    assert kvpool.Cluster.forget("local://meet")
def second():
    cluster = kvpool.Cluster.join("local://meet")
    assert cluster.wait_for(n=1)[0].name == "a"
    cluster.close()
read, write = os.pipe()
until, end = os.pipe()
member = os.fork()
if member == 0:
    os.close(end)
    os._exit(1 if as_user({uid}, first) else 0)
os.close(until)
assert os.read(read, 5) == b"there"
os.rmdir("{taken}")  # the stranger goes: now the best place is free
assert as_user({uid}, second) == 0
os.close(end)
assert os.waitpid(member, 0)[1] == 0
"""
        )
    finally:
        for root in (taken, f"/tmp/kvpool-{uid}", f"/run/user/{uid}/kvpool"):
            shutil.rmtree(root, ignore_errors=True)


@needs_other_users
def test_the_error_of_join_names_the_owner_of_the_folder():
    uid = 2_000_000_000 + secrets.randbelow(1 << 24)
    taken = [f"/dev/shm/kvpool-{uid}", f"/tmp/kvpool-{uid}"]
    for root in taken:
        take(root)
    try:
        run_script(
            AS
            + f"""
os.environ.pop("HOME", None)
def work():
    try:
        kvpool.Cluster.join("local://none")
    except kvpool.StateError as error:
        assert "{taken[0]} belongs to nobody (uid 65534)" in str(error), error
        assert "{taken[1]} belongs to nobody (uid 65534)" in str(error), error
        assert "uid {uid}" in str(error), error
    else:
        raise AssertionError("it joined")
assert as_user({uid}, work) == 0
"""
        )
    finally:
        for root in taken:
            shutil.rmtree(root, ignore_errors=True)
