"""The client of etcd and the renewer, with an etcd that checks passwords slowly, as under load."""

from __future__ import annotations

import http.server
import json
import mmap
import os
import threading
import time

import pytest
from cluster.kit import in_thread

from kvpool.cluster.etcd.gateway import Denied, Gateway, NoAnswer, Options
from kvpool.cluster.etcd.lease_renewer import DUE_WORD, FAILED_WORD, PAGE_BYTES, UNTIL_WORD, LeaseRenewer

WITHOUT_TOKEN = {"lease/keepalive"}  # requests for which etcd asks no token


class SlowEtcd(http.server.ThreadingHTTPServer):
    """Grants and denies as etcd does; checks a password for as long as `checked` is not set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.checked = threading.Event()
        self.password = "right"
        self.ttl_s = 5  # of every lease
        self.keys: list[dict[str, str]] = []
        self.asked: list[str] = []
        self.revoking: list[tuple[int, dict[str, object]]] = []  # answers to lease/revoke, before those that grant it
        self.refusals: list[tuple[int, dict[str, object]]] = []  # answers to requests with a valid token, before others

    @property
    def options(self) -> Options:
        return Options((("127.0.0.1", self.server_address[1]),), user="root", password="right")


class _Answer(http.server.BaseHTTPRequestHandler):
    server: SlowEtcd
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        path = self.path.removeprefix("/v3/")
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(path)
        status, answer = 200, {"result": {"TTL": str(self.server.ttl_s)}, "kvs": self.server.keys}
        if path == "auth/authenticate":
            self.server.checked.wait(60)
            if body["password"] != self.server.password:
                status, answer = 400, {"code": 3, "message": "etcdserver: authentication failed"}
            else:
                answer = {"token": "of root"}
        elif path not in WITHOUT_TOKEN and self.headers["Authorization"] != "of root":
            if self.headers["Authorization"]:
                status, answer = 401, {"code": 16, "message": "etcdserver: invalid auth token"}
            else:
                status, answer = 400, {"code": 3, "message": "etcdserver: user name is empty"}
        elif self.server.refusals:
            status, answer = self.server.refusals.pop(0)
        elif path == "lease/revoke" and self.server.revoking:
            status, answer = self.server.revoking.pop(0)
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def etcd():
    server = SlowEtcd()
    with in_thread(server.serve_forever):
        yield server
        server.checked.set()
        server.shutdown()
    server.server_close()


@pytest.fixture
def kept(etcd):
    """A renewer of lease 7, whose member has a heartbeat; and the page that they share."""
    page = os.memfd_create("page")
    os.ftruncate(page, PAGE_BYTES)
    first = {"options": vars(etcd.options), "heartbeat_s": 0.5, "page": page, "parent": os.getpid()}
    renewer = LeaseRenewer(first)
    words = memoryview(mmap.mmap(page, PAGE_BYTES)).cast("q")
    words[0] = time.monotonic_ns()
    renewer._lease, renewer._ttl_s, renewer._key = 7, 60.0, "a2V5"
    yield renewer, words
    renewer._gateway.close()
    os.close(page)


def test_a_lease_is_renewed_while_the_password_is_still_being_checked(etcd, kept):
    renewer, words = kept
    assert renewer._renew(7) == 0.5
    assert words[UNTIL_WORD] > time.monotonic_ns()
    assert etcd.asked == ["lease/keepalive"]


def test_a_renewer_announces_its_next_step_and_counts_unanswered_requests(etcd, kept):
    """This tells a hanging renewer from one with an etcd that does not answer."""
    renewer, words = kept
    assert words[DUE_WORD] == 0
    renewer._renew(7)
    first = words[DUE_WORD]
    assert first > time.monotonic_ns()
    assert words[FAILED_WORD] == 0
    renewer._gateway.close()
    renewer._gateway = Gateway(Options((("127.0.0.1", 1),)))
    assert renewer._renew(7) == 0.125
    assert words[DUE_WORD] > first
    assert words[FAILED_WORD] == 1


def test_a_lease_that_etcd_does_not_know_yet_is_not_gone_while_its_key_exists(etcd, kept, capfd):
    """As it says in the moment after it has come back."""
    renewer, words = kept
    etcd.checked.set()
    etcd.ttl_s, etcd.keys = 0, [{"key": "a2V5", "lease": "7"}]
    assert renewer._renew(7) == 0.125
    etcd.ttl_s = 5
    assert renewer._renew(7) == 0.5
    assert words[UNTIL_WORD] > time.monotonic_ns()
    assert renewer._lease == 7
    etcd.ttl_s, etcd.keys = 0, [{"key": "a2V5", "lease": "8"}]  # of the member that has the name now
    assert renewer._renew(7) == 0.0
    assert renewer._lease is None
    assert capfd.readouterr().out == '{"gone": 7}\n'


def test_a_lease_that_etcd_no_longer_has_counts_as_revoked_whatever_the_text_says(etcd, kept):
    renewer, _ = kept
    etcd.checked.set()
    renewer._id_lease = 8
    etcd.revoking = [
        (503, {"code": 14, "message": "etcdserver: no leader; lease not found"}),  # to be asked again
        (404, {"code": 5, "message": "no such lease"}),
    ]
    renewer._revoke()
    assert etcd.asked.count("lease/revoke") == 3  # twice for the first lease


def test_a_password_check_gets_more_time_than_a_request(etcd):
    gateway = Gateway(etcd.options)
    with pytest.raises(NoAnswer):
        gateway.call("kv/range", {}, 2.0)  # as it was before: begun again and again, and never done
    threading.Timer(3.0, etcd.checked.set).start()
    assert gateway.call("kv/range", {}, 2.0, authenticate_s=60.0)["kvs"] == []
    gateway.close()


@pytest.mark.parametrize("text", ["etcdserver: revision of auth store is old", "another text, of another version"])
def test_a_token_from_before_users_were_changed_is_replaced_whatever_the_text_says(etcd, text):
    etcd.checked.set()
    etcd.refusals = [(400, {"code": 3, "message": text})]
    gateway = Gateway(etcd.options)
    gateway._token = "of root"
    gateway.call("kv/range", {}, 20.0)
    assert etcd.asked == ["kv/range", "auth/authenticate", "kv/range"]
    gateway.close()


def test_a_refusal_costs_at_most_one_check_of_the_password(etcd):
    etcd.checked.set()
    gateway = Gateway(etcd.options)
    gateway._token = "of root"
    etcd.refusals = [(403, {"code": 7, "message": "etcdserver: permission denied"})]
    with pytest.raises(Denied):
        gateway.call("kv/range", {}, 20.0)
    assert etcd.asked == ["kv/range"]
    etcd.refusals = [(400, {"code": 3, "message": "etcdserver: key is not provided"})] * 2
    with pytest.raises(Denied):
        gateway.call("kv/range", {}, 20.0)
    assert etcd.asked == ["kv/range", "kv/range", "auth/authenticate", "kv/range"]
    gateway.close()


def test_a_token_that_etcd_has_forgotten_is_replaced_and_a_wrong_password_is_reported(etcd):
    etcd.checked.set()
    gateway = Gateway(etcd.options)
    gateway._token = "of before the restart"
    gateway.call("kv/range", {}, 20.0)
    gateway.call("kv/range", {}, 20.0)
    assert etcd.asked == ["kv/range", "auth/authenticate", "kv/range", "kv/range"]
    etcd.password = "another"
    gateway._token = ""
    with pytest.raises(Denied):
        gateway.call("kv/range", {}, 20.0)
    gateway.close()
