"""What the operator does: drain, resume, add, remove; and clients that are not the operator."""

from __future__ import annotations

import pytest
from router.router_kit import eventually, fakes, routing


def test_a_drained_instance_finishes_its_requests_and_gets_no_new_ones():
    with fakes("a", "b") as two, routing(*two, cap=1000, warmup_s=0.0) as running:
        fields = {"prompt": "x" * 200, "stream": True, "pieces": 3, "hold_at": 1}
        with running.client.stream("POST", "/v1/completions", json=fields) as response:
            home = response.headers["x-kvpool-instance"]
            drained = running.admin.post(f"/instances/{home}/drain")
            assert drained.json() == {"name": home, "draining": True, "in_flight": 1}
            assert {running.where("x" * 200) for _ in range(5)} == {"a", "b"} - {home}
            assert running.admin.delete(f"/instances/{home}").status_code == 409  # it has a request
            next(each for each in two if each.name == home).released.set()
            text = response.read().decode()
        assert text.endswith("data: [DONE]\n\n")
        assert running.states()[home]["draining"]
        assert running.metric("instance_draining", engine=home) == 1
        assert running.admin.post(f"/instances/{home}/resume").json()["draining"] is False
        eventually(lambda: running.where("x" * 200) == home)


def test_if_all_instances_are_drained_the_answer_is_503():
    with fakes("a") as one, routing(*one) as running:
        running.admin.post("/instances/a/drain")
        assert running.complete("x").status_code == 503
        assert running.client.get("/health").status_code == 503


def test_an_instance_is_removed_and_added():
    with fakes("a", "b") as two, routing(*two, warmup_s=0.0) as running:
        assert running.admin.delete("/instances/a").status_code == 204
        assert set(running.states()) == {"b"}
        shown = [client.get("/instances").json()["instances"][0] for client in (running.client, running.admin)]
        assert "url" not in shown[0]  # addresses are the operator's
        assert shown[1]["url"] == two[1].spec.url
        assert running.where("x") == "b"
        assert running.metric("instance_up", engine="a") == 0
        added = running.admin.post("/instances", json={"url": two[0].spec.url})
        name = added.json()["name"]
        assert two[0].spec.url.endswith(name)
        eventually(lambda: running.state(name) == "healthy")
        assert running.admin.post("/instances", json={"url": two[0].spec.url}).status_code == 400


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"url": 5}', b'{"url": "ftp://x"}', b"x" * 10_000])
def test_a_wrong_instance_is_refused_and_changes_nothing(body):
    with fakes("a") as one, routing(*one) as running:
        response = running.admin.post("/instances", content=body)
        assert response.status_code == 400
        assert response.json()["error"]["message"]
        assert set(running.states()) == {"a"}


def test_an_unknown_name_is_404():
    with fakes("a") as one, routing(*one) as running:
        for response in (
            running.admin.post("/instances/z/drain"),
            running.admin.post("/instances/z/resume"),
            running.admin.delete("/instances/z"),
        ):
            assert response.status_code == 404
            assert "'z'" in response.json()["error"]["message"]


@pytest.mark.parametrize("headers", [{"origin": "http://evil.example"}, {"host": "evil.example"}])
def test_web_pages_are_kept_out(headers):
    with fakes("a") as one, routing(*one) as running:
        assert running.admin.post("/instances/a/drain", headers=headers).status_code in (400, 403)
        assert not running.states()["a"]["draining"]
