"""Keys and TLS of the router, over real sockets: which clients get in, and what instances see of it."""

from __future__ import annotations

import contextlib
import socket
import ssl
from pathlib import Path

import pytest
from router.router_kit import ADMIN_KEY, PATIENCE_S, eventually, fakes, httpx, logged, routing
from router.test_command import command

from kvpool import cli
from kvpool.control.router import Router, RouterSettings, admin_app
from kvpool.control.router.auth import KeyCheck
from kvpool.errors import ArgumentError

pytestmark = pytest.mark.timeout(600)  # some start processes and wait for them
TLS = Path(__file__).with_name("tls")
KEY = "correct-horse.battery/staple="


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def guarded():
    with fakes("a") as one, routing(*one, api_key=KEY) as running:
        running.client.headers.update(bearer(KEY))  # for the kit's own requests
        running.fake = one[0]
        yield running


# ---- keys


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "Bearer")],
        [("authorization", f"Basic {KEY}")],
        [("authorization", f"Bearer {KEY}x")],
        [("authorization", f"Bearer {KEY[:-1]}")],
        [("authorization", KEY)],
        [("authorization", b"Bearer \xff\xe9")],
        [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer other")],
        [("x-api-key", KEY)],
    ],
)
def test_a_client_without_the_key_is_refused_and_no_instance_is_asked(guarded, headers):
    seen = len(guarded.fake.seen)
    refused = guarded.metric("refused_total", reason="invalid_api_key")
    with httpx.Client(base_url=guarded.url, timeout=PATIENCE_S, trust_env=False) as client:
        responses = [
            client.post("/v1/completions", json={"prompt": "x"}, headers=headers),
            client.get("/v1/models", headers=headers),
        ]
        shown = [client.get(path, headers=headers) for path in ("/metrics", "/instances")]
        assert client.get("/health", headers=headers).status_code == 200  # is for everybody
    for response in [*responses, *shown]:
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert len(guarded.fake.seen) == seen
    assert guarded.metric("refused_total", reason="invalid_api_key") == refused + 2


def test_a_body_without_a_key_is_not_waited_for(guarded):
    """It is refused by its headers: a client without access cannot fill the memory."""
    host, _, port = guarded.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_a_client_with_the_key_gets_in_and_the_instance_does_not_see_the_key(guarded, scheme):
    response = guarded.complete("x", headers={"authorization": f"{scheme} {KEY}"})
    assert response.status_code == 200
    assert "authorization" not in guarded.fake.seen[-1][1]
    for path in ("/metrics", "/instances"):
        assert guarded.client.get(path).status_code == 200


@pytest.mark.parametrize("headers", [{}, bearer(KEY), bearer(ADMIN_KEY + "x"), {"authorization": ADMIN_KEY}])
def test_the_operators_listener_requires_a_separate_key(guarded, headers):
    asked = [
        ("GET", "/metrics"), ("GET", "/instances"), ("POST", "/instances"), ("DELETE", "/instances/a"),
        ("POST", "/instances/a/drain"), ("POST", "/instances/a/resume"), ("GET", "/nowhere"),
    ]  # fmt: skip
    with httpx.Client(base_url=guarded.admin_url, timeout=PATIENCE_S, trust_env=False, headers=headers) as client:
        for method, path in asked:
            refused = client.request(method, path)
            assert refused.status_code == 401, path
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/health").status_code == 200  # for everybody
    assert not guarded.states()["a"]["draining"]
    for path in ("/metrics", "/instances"):
        assert guarded.admin.get(path).status_code == 200


def test_an_operators_listener_without_a_key_is_not_made():
    with pytest.raises(ArgumentError, match="admin_key"):
        admin_app(Router(RouterSettings(())))


@pytest.mark.parametrize("api_key", [None, KEY])
def test_instances_have_separate_keys(api_key):
    with fakes("a") as one, routing(*one, api_key=api_key, instance_key="theirs") as running:
        running.client.headers.update(bearer(KEY))
        assert running.complete("x").status_code == 200
        assert one[0].seen[-1][1]["authorization"] == "Bearer theirs"


def test_keys_appear_neither_in_logs_nor_in_printed_settings(guarded):
    with logged() as records:
        guarded.complete("x")
        guarded.complete("x", headers=bearer("wrong-and-secret"))
        eventually(lambda: [record.getMessage() for record in records].count("request") >= 2)
    text = " ".join(str(vars(record)) for record in records)
    assert KEY not in text
    assert "wrong-and-secret" not in text
    assert KEY not in repr(RouterSettings((), api_key=KEY, instance_key=KEY, admin_key=KEY))


def test_without_a_key_every_client_gets_in():
    assert KeyCheck(None).admits([])
    check = KeyCheck(KEY)
    assert check.admits([(b"authorization", b"  bearer   %s " % KEY.encode())])
    for value in (b"", b"Bearer", b"Bearer ", b"Bearer  ", KEY.encode(), b"Bearer %s," % KEY.encode()):
        assert not check.admits([(b"authorization", value)])
    assert not check.admits([])


@pytest.mark.parametrize("key", ["", "two words", "ümlaut", "x" * 1025, "line\nbreak"])
def test_a_key_that_no_header_can_carry_is_refused(key):
    for name in ("api_key", "instance_key", "admin_key"):
        with pytest.raises(ArgumentError, match=name) as refusal:
            RouterSettings((), **{name: key})
        assert not key or key not in str(refusal.value)


# ---- TLS


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(TLS / "cert.pem"))


def test_the_command_speaks_tls_and_takes_its_key_from_the_environment(monkeypatch):
    monkeypatch.setenv("KVPOOL_ROUTER_API_KEY", KEY)
    monkeypatch.setenv("KVPOOL_ROUTER_ADMIN_KEY", ADMIN_KEY)
    files = ("--tls-cert", str(TLS / "cert.pem"), "--tls-key", str(TLS / "key.pem"))
    with fakes("a") as one:
        instance = ("--instances", one[0].spec.url, "--health-interval", "0.2", "--admin-port", "0")
        with (
            command(*instance, *files) as (_, url, admin),
            httpx.Client(verify=trusting(), timeout=PATIENCE_S, trust_env=False) as client,
        ):
            url = url.replace("http://", "https://")
            eventually(lambda: client.get(f"{url}/health").status_code == 200)
            fields = {"prompt": "x", "stream": True, "pieces": 3}
            assert client.post(f"{url}/v1/completions", json=fields).status_code == 401
            response = client.post(f"{url}/v1/completions", json=fields, headers=bearer(KEY))
            assert response.text.endswith("data: [DONE]\n\n")
            with pytest.raises(httpx.TransportError):  # without TLS there is no answer
                client.get(f"{url.replace('https://', 'http://')}/health")
            with pytest.raises(httpx.ConnectError), httpx.Client(timeout=PATIENCE_S, trust_env=False) as other:
                other.get(f"{url}/health")  # a client that does not trust the certificate is not fooled
            operators = client.get(f"{admin}/instances", headers=bearer(ADMIN_KEY))
            assert operators.status_code == 200  # loopback: no TLS


def test_a_client_that_connects_and_never_speaks_tls_is_disconnected():
    files = ("--tls-cert", str(TLS / "cert.pem"), "--tls-key", str(TLS / "key.pem"))
    with command("--instances", "http://127.0.0.1:1", *files, "--head-timeout", "0.5") as (_, url, _admin):
        host, _, port = url.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), PATIENCE_S / 2) as silent:  # asyncio waits twice as long
            with contextlib.suppress(ConnectionError):
                assert silent.recv(1) == b""


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["--tls-cert", "cert.pem"], "go together"),
        (["--tls-cert", "none.pem", "--tls-key", "key.pem"], "none.pem: No such file"),
        (["--tls-cert", "cert.pem", "--tls-key", "other-key.pem"], "KEY_VALUES_MISMATCH"),
        (["--tls-cert", "README.md", "--tls-key", "key.pem"], "README.md with"),
        (["--tls-cert", "cert.pem", "--tls-key", "locked-key.pem"], "has a password"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_reported_before_anything_listens(files, message, capsys):
    arguments = [str(TLS / each) if each.endswith((".pem", ".md")) else each for each in files]
    assert cli.main(["router", "--port", "0", "--instances", "http://127.0.0.1:1", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_empty_key_does_not_switch_the_check_off(capsys, monkeypatch):
    arguments = ["router", "--port", "0", "--instances", "http://127.0.0.1:1"]
    monkeypatch.setenv("KVPOOL_ROUTER_API_KEY", KEY)
    assert cli.main([*arguments, "--api-key", ""]) == 2
    assert "api_key" in capsys.readouterr().err
    monkeypatch.setenv("KVPOOL_ROUTER_API_KEY", "")  # a secret that was not filled in
    assert cli.main(arguments) == 2
    assert "api_key" in capsys.readouterr().err
