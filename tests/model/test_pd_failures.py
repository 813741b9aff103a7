"""The PD example when instances are killed, stuck or full, or requests cancelled: every request ends as it should."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.cluster.local.folder import folder_path

torch = pytest.importorskip("torch")

from llama import LlamaConfig  # noqa: E402
from pd_disaggregated.dispatcher import Dispatcher, run  # noqa: E402
from pd_disaggregated.fleet import InstanceFailed  # noqa: E402
from pd_disaggregated.records import Kill, RunResult, Session, Setting, Turn  # noqa: E402
from pd_disaggregated.reference import Reference  # noqa: E402
from pd_disaggregated.requests import Reply, RequestFailed  # noqa: E402
from pd_disaggregated.worker import Plan  # noqa: E402
from pd_kit import CONFIG, chats, play, tokens  # noqa: E402

pytestmark = pytest.mark.timeout(600)  # each run imports PyTorch in every instance, and again in each that comes back
SESSIONS = chats(count=4, turns=2, new_tokens=12)
GENEROUS_S = 120.0  # for steps of some seconds: the machine is busy with other things
# Ten times what is promised for a quiet machine: a lease and a second, and two seconds from joining.
SURVIVORS_S, RESTARTED_S = 40.0, 20.0
LONG = replace(CONFIG, tokens_max=1 << 15)  # so that no answer ends before a test has said what it wants


@pytest.fixture(scope="module")
def reference() -> Iterator[Reference]:
    one = Reference(CONFIG)
    yield one
    one.close()


def times(result: RunResult, kind: str, instance: str) -> list[float]:
    return [event.at_s for event in result.events if (event.kind, event.instance) == (kind, instance)]


def first(result: RunResult, kinds: str | tuple[str, ...], instance: str, since: float) -> float:
    """When the first of these happened to the instance at `since` or later."""
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    told = [at for kind in kinds for at in times(result, kind, instance) if at >= since]
    assert told, f"no {' or '.join(kinds)} of {instance} since {since:.3f}: {result.events}"
    return min(told)


# ---- killed


@pytest.mark.parametrize(
    ("setting", "victim", "after_tokens"),
    [
        (Setting("PD-Caching-3", 1, 1), "prefill-0", 30),
        (Setting("PD-Caching-3", 1, 1), "decode-0", 30),
        (Setting("PD-Basic", 1, 1, "by_layer"), "prefill-0", 3),
        (Setting("PD-Caching-3", 1, 1, "by_layer"), "decode-0", 3),
        (Setting("PD-CC", 2, 0), "instance-1", 30),
    ],
    ids=lambda value: value.name if isinstance(value, Setting) else str(value),
)
def test_an_instance_is_killed_and_comes_back(
    setting: Setting, victim: str, after_tokens: int, reference: Reference
) -> None:
    result = play(setting, SESSIONS, reference, kill=[Kill(victim, after_tokens)])
    # A busy machine can let a lease of a living instance end, before or after: only what follows the kill is looked at.
    assert times(result, "joined", victim)[0] <= 0
    (killed,) = times(result, "killed", victim)
    lost = first(result, "lost", victim, since=killed)
    joined = first(result, "joined", victim, since=lost)
    (survivor,) = set(setting.instances) - {victim}
    if setting.colocated:  # a colocated instance has no peers, so it is told nothing; but it has all the work
        went_on = [answer.done_s for answer in result.answers if answer.decode == survivor and answer.done_s > killed]
        assert went_on
        assert min(went_on) - killed < SURVIVORS_S
        return
    noticed = first(result, "noticed", survivor, since=killed)
    assert noticed - killed < SURVIVORS_S
    # There is no other one of the victim's kind, and not all turns were asked when it was killed. So both have work
    # when it is back, and the survivor maybe before; of one that had given no token yet the next is its first.
    went_on = first(result, ("went_on", "served"), survivor, since=noticed)
    assert went_on - max(noticed, joined) < SURVIVORS_S
    assert first(result, "served", victim, since=joined) - joined < RESTARTED_S


def test_all_instances_are_killed_and_one_of_them_twice(reference: Reference) -> None:
    kill = [Kill("prefill-0", 5), Kill("decode-0", 5), Kill("decode-0", 40)]
    result = play(Setting("PD-Caching-3", 1, 1), SESSIONS, reference, kill=kill)
    assert len(times(result, "joined", "prefill-0")) == 2
    assert len(times(result, "joined", "decode-0")) >= 2


def test_an_instance_that_does_not_come_up_ends_the_run() -> None:
    with pytest.raises(InstanceFailed, match="did not come up"):
        run(Setting("PD", 1, 0), SESSIONS, config=CONFIG, hbm_blocks=1 << 40)


def test_instances_end_with_a_run_that_is_killed() -> None:
    mark = uuid.uuid4().hex
    tests, examples = Path(__file__).parent, Path(inspect.getfile(run)).parents[1]
    program = (
        f"import sys; sys.path[:0] = [{str(examples)!r}, {str(tests)!r}]\n"
        "from pd_kit import *\n"
        "turn = Turn(tokens(5, 1), 5)\n"
        "endless = Session(0, 0.0, tokens(9, 0), (turn,) * 100_000, remembers=False)\n"
        "run(Setting('PD-Caching-3', 1, 1), [endless], config=CONFIG, on_answer=lambda _: print('answer', flush=True))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | {"PD_MARK": mark}, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"answer\n"
        assert len(processes_with(mark)) >= 3
        folders = cluster_folders(process.pid)
    finally:
        process.kill()
        process.communicate()
    until = time.monotonic() + GENEROUS_S
    while processes_with(mark):
        assert time.monotonic() < until, "processes are left behind"
        time.sleep(0.02)
    for folder in folders:  # which a run removes at its end, unless it is killed
        shutil.rmtree(folder)


def processes_with(mark: str) -> set[int]:
    """Those that have inherited it in their environment."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended, or belongs to another process
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.add(int(entry.name))
    return found


def cluster_folders(pid: int) -> set[str]:
    """Folders of local clusters that a process has open."""
    links = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}
    return {link for link in links if os.path.dirname(link) == os.path.dirname(folder_path("any"))}


# ---- one request after another, by hand


async def serving(
    test: Callable[[Dispatcher], Awaitable[None]],
    setting: Setting,
    *,
    config: LlamaConfig = CONFIG,
    hbm_blocks: int = 256,
    lease_s: float = 2.0,
    deadline_s: float = 300.0,
    patience_s: float = 60.0,
) -> None:
    """Has a test speak with a dispatcher; at the end no block must be lost."""
    plan = Plan(setting, f"local://test-pd-{os.urandom(8).hex()}", config, 0, hbm_blocks, lease_s)
    async with Dispatcher.start(plan, deadline_s=deadline_s, patience_s=patience_s) as dispatcher:
        await test(dispatcher)
        audits = await dispatcher.audit()
        assert RunResult(setting, [], 0.0, audits).lost_blocks == 0


async def read(reply: Reply, count: int | None = None) -> list[int]:
    """The next tokens: so many, or to the end."""
    got: list[int] = []
    while count is None or len(got) < count:
        try:
            got.append(await asyncio.wait_for(reply.__anext__(), GENEROUS_S))
        except StopAsyncIteration:
            break
    return got


async def happened(dispatcher: Dispatcher, kind: str, instance: str) -> None:
    """Waits for it; returns some milliseconds later at most."""
    until = time.monotonic() + GENEROUS_S
    while not any((event.instance, event.kind) == (instance, kind) for event in dispatcher.events(0)):
        assert time.monotonic() < until, f"{instance} has not {kind}"
        await asyncio.sleep(0.005)  # not 0: the awaited work needs the processor


@contextlib.asynccontextmanager
async def stopped(dispatcher: Dispatcher, name: str) -> AsyncIterator[None]:
    pid = dispatcher.pids()[name]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if dispatcher.pids()[name] == pid:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("setting", [Setting("PD-Caching-3", 1, 1), Setting("PD-Basic", 1, 1), Setting("PD-CC", 1, 0)])
def test_a_cancelled_request_is_released(setting: Setting, reference: Reference) -> None:
    async def test(dispatcher: Dispatcher) -> None:
        long = dispatcher.ask(0, tokens(20, 1), 20_000)
        queued = dispatcher.ask(1, tokens(20, 2), 20_000)
        assert len(await read(long, 5)) == 5
        long.cancel()
        long.cancel()
        queued.cancel()
        assert len(await read(long)) < 19_995  # the tokens that had come already
        other = await read(dispatcher.ask(2, tokens(20, 3), 6))
        assert tuple(other) == reference.tokens(tokens(20, 3), 6)

    asyncio.run(serving(test, setting, config=LONG, hbm_blocks=1 << 14, lease_s=60.0))


@pytest.mark.parametrize(
    ("setting", "victim"), [(Setting("PD-Caching-2", 2, 1), "prefill-1"), (Setting("PD-Caching-3", 1, 2), "decode-1")]
)
def test_another_instance_takes_over(setting: Setting, victim: str, reference: Reference) -> None:
    async def test(dispatcher: Dispatcher) -> None:
        before = [dispatcher.ask(number, tokens(20, number), 6) for number in range(2)]
        for number, reply in enumerate(before):
            assert tuple(await read(reply)) == reference.tokens(tokens(20, number), 6)
        homes = [{reply.answer(0, 0.0).prefill, reply.answer(0, 0.0).decode} for reply in before]
        assert sum(victim in home for home in homes) == 1
        dispatcher.kill(victim)
        await happened(dispatcher, "lost", victim)
        after = [dispatcher.ask(number, tokens(20, number), 6) for number in range(4)]  # it cannot be back already
        for number, reply in enumerate(after):
            assert tuple(await read(reply)) == reference.tokens(tokens(20, number), 6)
            assert victim not in {reply.answer(1, 0.0).prefill, reply.answer(1, 0.0).decode}

    asyncio.run(serving(test, setting))


@pytest.mark.parametrize(
    ("setting", "victim"), [(Setting("PD-Caching-3", 2, 1), "prefill-1"), (Setting("PD-Caching-3", 1, 2), "decode-1")]
)
def test_an_instance_that_is_back_gets_work_of_sessions_that_went_on_without_it(
    setting: Setting, victim: str, reference: Reference
) -> None:
    async def test(dispatcher: Dispatcher) -> None:
        async def turn() -> list[str]:
            """One of each session, one after another: where they were served."""
            homes = []
            for number in range(4):
                reply = dispatcher.ask(number, tokens(20, number), 6)
                assert tuple(await read(reply)) == reference.tokens(tokens(20, number), 6)
                answer = reply.answer(0, 0.0)
                homes.append(answer.prefill if victim.startswith("prefill") else answer.decode)
            return homes

        assert (await turn()).count(victim) == 2
        dispatcher.kill(victim)
        await happened(dispatcher, "lost", victim)
        away = [dispatcher.ask(number, tokens(20, number), 6) for number in range(4)]  # it cannot be back already
        for number, reply in enumerate(away):
            assert tuple(await read(reply)) == reference.tokens(tokens(20, number), 6)
        until = time.monotonic() + GENEROUS_S
        while [event.kind for event in dispatcher.events(0) if event.instance == victim].count("joined") < 2:
            assert time.monotonic() < until
            await asyncio.sleep(0.005)
        assert (await turn()).count(victim) == 2
        assert [event.kind for event in dispatcher.events(0) if event.instance == victim][-2:] == ["joined", "served"]

    asyncio.run(serving(test, setting))


def test_requests_that_do_not_fit_together_wait_for_each_other(reference: Reference) -> None:
    async def test(dispatcher: Dispatcher) -> None:
        replies = [dispatcher.ask(number, tokens(60, number), 30) for number in range(5)]
        for number, reply in enumerate(replies):
            assert tuple(await read(reply)) == reference.tokens(tokens(60, number), 30)

    asyncio.run(serving(test, Setting("PD-Caching-3", 1, 1), hbm_blocks=50, lease_s=60.0))


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_an_instance_that_was_stopped_for_longer_than_a_lease_serves_on(victim: str, reference: Reference) -> None:
    """Its peers have lost it, and no process has ended: they must reconnect."""

    async def test(dispatcher: Dispatcher) -> None:
        long = dispatcher.ask(0, tokens(20, 1), 150)
        got = await read(long, 3)
        async with stopped(dispatcher, victim):
            await happened(dispatcher, "noticed", "decode-0" if victim == "prefill-0" else "prefill-0")
        short = await read(dispatcher.ask(1, tokens(20, 2), 6))
        got += await read(long)
        assert tuple(got) == reference.tokens(tokens(20, 1), 150)
        assert tuple(short) == reference.tokens(tokens(20, 2), 6)
        assert {event.kind for event in dispatcher.events(0)} == {"joined", "served", "noticed", "went_on"}

    asyncio.run(serving(test, Setting("PD-Caching-3", 1, 1), lease_s=1.0))


def test_sending_back_to_a_stopped_instance_does_not_stop_decoding() -> None:
    """The transfer ends by its deadline, or when the other goes on; until then the blocks are pinned."""
    prompt, new_tokens = tokens(20, 2), 1000  # still under way when prefill is stopped
    with contextlib.closing(Reference(LONG)) as alone:
        expected = alone.tokens(prompt, new_tokens)

    async def test(dispatcher: Dispatcher) -> None:
        long, short = dispatcher.ask(0, tokens(20, 1), 20_000), dispatcher.ask(1, prompt, new_tokens)
        assert len(await read(long, 3)) == 3
        got = await read(short, 3)
        async with stopped(dispatcher, "prefill-0"):
            got += await read(short, new_tokens - 3)  # the last one is reported before they are sent back
            before = len(long._request.tokens)
            until = time.monotonic() + GENEROUS_S
            while len(long._request.tokens) < before + 5:
                assert time.monotonic() < until, "nothing more is decoded"
                await asyncio.sleep(0.001)
            assert short._request.answered is None
        assert await read(short) == []  # it ends
        assert tuple(got) == expected
        long.cancel()

    asyncio.run(serving(test, Setting("PD-Caching-3", 1, 1), config=LONG, hbm_blocks=1 << 14, lease_s=60.0))


def test_a_request_has_a_deadline() -> None:
    async def test(dispatcher: Dispatcher) -> None:
        async with stopped(dispatcher, "decode-0"):
            reply = dispatcher.ask(0, tokens(20, 1), 5)
            with pytest.raises(RequestFailed, match="has had its"):
                await read(reply)

    asyncio.run(serving(test, Setting("PD-Caching-2", 1, 1), deadline_s=2.0))


def test_an_instance_that_is_stuck_is_replaced() -> None:
    prompt, new_tokens = tokens(20, 1), 1000  # still under way when the instance is stopped
    with contextlib.closing(Reference(LONG)) as alone:
        expected = alone.tokens(prompt, new_tokens)

    async def test(dispatcher: Dispatcher) -> None:
        reply = dispatcher.ask(0, prompt, new_tokens)
        got = await read(reply, 3)
        async with stopped(dispatcher, "decode-0"):
            got += await read(reply)
        assert tuple(got) == expected
        assert reply.answer(0, 0.0).attempts >= 2
        assert [event.kind for event in dispatcher.events(0) if event.instance == "decode-0"].count("joined") >= 2

    asyncio.run(serving(test, Setting("PD-Caching-3", 1, 1), config=LONG, hbm_blocks=1024, patience_s=10.0))


def test_bad_input_is_refused_before_anything_runs(reference: Reference) -> None:
    async def test(dispatcher: Dispatcher) -> None:
        for prompt, new_tokens in ((0, 1), (1, 0), (250, 7), (257, 1)):
            with pytest.raises(ValueError, match="a prompt and its answer"):
                dispatcher.ask(0, tokens(prompt, 0), new_tokens)
        assert len(await read(dispatcher.ask(0, tokens(250, 0), 6))) == 6

    asyncio.run(serving(test, Setting("PD-CC", 1, 0), lease_s=60.0))
    with pytest.raises(ValueError, match="no instance"):
        run(Setting("PD", 1, 0), SESSIONS, config=CONFIG, kill=[Kill("decode-0", 1)])
    with pytest.raises(ValueError, match="another model"):
        run(Setting("PD", 1, 0), SESSIONS, reference=reference, seed=7)


def test_a_session_that_fails_ends_the_run() -> None:
    long = Session(0, 0.0, tokens(250, 0), (Turn(tokens(50, 1), 5),), remembers=True)
    with pytest.raises(ValueError, match="a prompt and its answer"):
        run(Setting("PD", 1, 0), [*SESSIONS[1:], long], config=CONFIG, hbm_blocks=256)
