"""A prefill, decode or colocated instance: the process, its messages, and the order in which it does things.

One thread computes. Others, that of the dispatcher's pipe and those of the pool's callbacks, only put what comes into
the mail. A round reads the mail, prefills one prompt (first come, first served), and decodes one token of each
request that is being decoded: so answers stream side by side. What is sent back to prefill is not waited for, but
looked at in each round: an instance that says nothing must not stop the answers of others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Final, Literal, TypeVar

import torch
from llama import Llama, LlamaConfig
from serving import kv_layout

import kvpool
from pd_disaggregated import messages
from pd_disaggregated.designs import BY_NAME
from pd_disaggregated.engine import Engine, Work
from pd_disaggregated.letter import Letter
from pd_disaggregated.records import Setting

_log = logging.getLogger("pd_disaggregated")

_T = TypeVar("_T")

_HEARD_S: Final = 0.5  # by then all processes know what one knows of a member
_AGAIN_S: Final = 0.005
_LOOK_S: Final = 0.001  # between looks at what is sent back, when there is nothing else to do
_REST_S = 10.0  # until the rest of something that has come by halves is there; then its sender is gone
_SETTLE_S = 10.0  # until blocks that were kept for a dead peer are free


@dataclass(frozen=True)
class Plan:
    """What a process is started with.

    Attributes:
        setting: Of the run.
        cluster: Which the instances join: "local://" and a name that no other run has.
        config: Of the model.
        seed: Of its weights: the same in all processes.
        hbm_blocks: Of the pool.
        lease_s: After which an instance that says nothing is lost to its peers and to the cluster.
    """

    setting: Setting
    cluster: str
    config: LlamaConfig
    seed: int
    hbm_blocks: int
    lease_s: float


@dataclass
class Decoding:
    """A request that is being decoded here."""

    letter: Letter
    work: Work
    prefill: str  # where it was prefilled; "" if here


@dataclass
class SentBack:
    """An answered request whose KV is on its way to prefill."""

    letter: Letter
    work: Work
    transfer: kvpool.Transfer  # ends by itself: it has a deadline


@dataclass
class Halves:
    """What has come of a request whose first token is not known yet."""

    items: list[kvpool.Received] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)


Mail = messages.ToInstance | kvpool.Received | kvpool.PeerEvent


class Worker:
    """The instance. Its methods are called by one thread."""

    def __init__(self, name: str, plan: Plan, pipe: Connection) -> None:
        """Makes model and pool, and joins the cluster: from then on requests and blocks may come."""
        torch.set_num_threads(1)  # the tiles are small
        self._plan = plan
        self._pipe = pipe
        self._design = BY_NAME[plan.setting.design]
        self.pool = kvpool.Pool(kv_layout(plan.config), plan.hbm_blocks, lease_s=plan.lease_s)
        self._engine = Engine(Llama(plan.config, seed=plan.seed), self.pool)
        self._warm_up()
        self._mail: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        self._waiting: deque[messages.Serve] = deque()
        self._decoding: dict[tuple[int, int], Decoding] = {}
        self._sent_back: list[SentBack] = []
        self._halves: dict[tuple[int, int], Halves] = {}
        self._over = False
        self._audit_until: float | None = None  # an audit is wanted: when to give up waiting for peers
        self.cluster = kvpool.Cluster.join(plan.cluster, lease=plan.lease_s)
        self.pool.attach(self.cluster, name=name, role=_role(name))
        self.pool.inbox.on_received(self._mail.put)
        self.pool.peers.on_change(self._mail.put)
        threading.Thread(target=self._read_pipe, name="pipe", daemon=True).start()

    def run(self) -> None:
        """Serves until the dispatcher closes the pipe."""
        while True:
            self._read_mail()
            if self._over:
                return
            self._end_sent_back()
            if self._audit_until is not None:
                self._audit(self._audit_until)
            if self._waiting:
                self._prefill(self._waiting.popleft())
            for decoding in list(self._decoding.values()):
                self._decode(decoding)

    # ---- mail

    def _tell(self, message: messages.FromInstance) -> None:
        with contextlib.suppress(OSError):  # the dispatcher is gone: the mail says so, too
            self._pipe.send(message)

    def _read_pipe(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._mail.put(self._pipe.recv())
        self._mail.put(messages.Stop())

    def _read_mail(self) -> None:
        """Reads all that is there; waits for something if there is nothing else to do."""
        busy = bool(self._waiting or self._decoding)
        pause_s = _LOOK_S if self._sent_back else 1.0 if self._audit_until is None else 0.01
        with contextlib.suppress(queue.Empty):
            self._open(self._mail.get(block=not busy, timeout=pause_s))
            while not self._over:
                self._open(self._mail.get_nowait())
        late = time.monotonic() - _REST_S
        for key in [key for key, halves in self._halves.items() if halves.since < late]:
            self._drop(key)

    def _open(self, mail: Mail) -> None:
        if isinstance(mail, messages.Stop):
            self._over = True
        elif isinstance(mail, kvpool.Received):
            self._receive(mail)
        elif isinstance(mail, kvpool.PeerEvent):
            if mail.kind == "lost":
                self._tell(messages.Noticed(mail.name))
        elif isinstance(mail, messages.Serve):
            self._waiting.append(mail)
        elif isinstance(mail, messages.Cancel):
            self._cancel((mail.request, mail.attempt))
        else:
            self._audit_until = time.monotonic() + _SETTLE_S

    def _cancel(self, key: tuple[int, int]) -> None:
        self._waiting = deque(order for order in self._waiting if (order.request, order.attempt) != key)
        self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        """Lets go of what is here of an attempt."""
        for item in self._halves.pop(key, Halves()).items:
            item.close()
        decoding = self._decoding.pop(key, None)
        if decoding is not None:
            decoding.work.close()

    # ---- prefill

    def _prefill(self, order: messages.Serve) -> None:
        letter = Letter(order.request, order.attempt, order.prompt, order.new_tokens, None)
        work = Work(self.pool, order.prompt, order.new_tokens)
        with self._failing(letter, work):
            with work.calling_kvpool():
                self._design.find_cached(self.pool, work)
            cached_tokens = work.held_blocks * self._plan.config.block_tokens
            work.grow()
            sent = self._compute_and_send(letter, work, order.decode)
            with work.calling_kvpool():
                self._design.prefilled(self.pool, work)
            sent_bytes = sum(transfer.stats.bytes for transfer in sent)
            skipped = sum(transfer.stats.skipped_blocks for transfer in sent) * self._plan.config.block_tokens
            spent_s, work.kvpool_s = work.kvpool_s, 0.0
            self._tell(messages.Prefilled(*letter.key, cached_tokens, sent_bytes, skipped, spent_s))
            if not order.decode:
                self._decoding[letter.key] = Decoding(letter, work, "")
                self._finish_if_answered(self._decoding[letter.key])
                return
            work.close()
            if work.finished:  # one token was wanted: there is nothing to decode
                self._tell(messages.Answered(*letter.key, 0, 0.0))

    def _compute_and_send(self, letter: Letter, work: Work, decode: str) -> list[kvpool.Transfer]:
        """Sends the first token as soon as it is known, and the KV to the instance that makes the others."""
        if not decode or letter.new_tokens == 1:
            self._first_token(letter, work)
            return []
        if self._plan.setting.strategy == "by_layer" and len(work.early_blocks):
            return self._compute_while_sending(letter, work, decode)
        token = self._first_token(letter, work)
        with work.calling_kvpool():
            content = dataclasses.replace(letter, first=token).pack()
            return [_begin(lambda: self._design.send(self.pool, decode, work, content)).wait()]

    def _compute_while_sending(self, letter: Letter, work: Work, decode: str) -> list[kvpool.Transfer]:
        with work.calling_kvpool():
            stream = _begin(lambda: self._design.open_stream(self.pool, decode, work, letter.pack()))

        def send_layer(layer: int) -> None:
            with work.calling_kvpool():
                stream.send_layer(layer)

        with stream:
            token = self._first_token(letter, work, send_layer)
        with work.calling_kvpool():
            early = stream.wait()  # so that what completes the request comes last
            return [
                early,
                self._design.send_last(self.pool, decode, work, dataclasses.replace(letter, first=token).pack()).wait(),
            ]

    def _first_token(self, letter: Letter, work: Work, on_layer: Callable[[int], None] | None = None) -> int:
        token = self._engine.next_token(work, on_layer)
        self._tell(messages.Token(*letter.key, 0, token))
        return token

    # ---- decode

    def _receive(self, item: kvpool.Received) -> None:
        """Takes over a request when all of it is here."""
        try:
            letter = Letter.unpack(item.private)
        except ValueError:
            _log.exception("what %s sent is no request", item.peer)
            item.close()
            return
        halves = self._halves.setdefault(letter.key, Halves())
        halves.items.append(item)
        if letter.first is None:
            return
        del self._halves[letter.key]
        work = Work(self.pool, letter.prompt, letter.new_tokens)
        with self._failing(letter, work):
            with work.calling_kvpool():
                for part in halves.items:
                    self._design.take_over(work, part)
            work.computed()
            work.append(letter.first)
            self._decoding[letter.key] = Decoding(letter, work, item.peer)
            self._tell(messages.Token(*letter.key, 0, letter.first))

    def _decode(self, decoding: Decoding) -> None:
        """One token."""
        letter, work = decoding.letter, decoding.work
        with self._failing(letter, work):
            work.grow()
            position = work.answered
            token = self._engine.next_token(work)
            self._tell(messages.Token(*letter.key, position, token))
            self._finish_if_answered(decoding)

    def _finish_if_answered(self, decoding: Decoding) -> None:
        letter, work = decoding.letter, decoding.work
        if not work.finished:
            return
        del self._decoding[letter.key]
        sent = None
        with work.calling_kvpool(), _keeping(letter):
            sent = self._design.answered(self.pool, decoding.prefill, work)
        if sent is not None:
            self._sent_back.append(SentBack(letter, work, sent))
            return
        work.close()
        self._tell(messages.Answered(*letter.key, 0, work.kvpool_s))

    def _end_sent_back(self) -> None:
        """Ends the requests whose KV has arrived at prefill, or will not."""
        for ended in [one for one in self._sent_back if one.transfer.done()]:
            self._sent_back.remove(ended)
            letter, work, sent_bytes = ended.letter, ended.work, 0
            with self._failing(letter, work):
                with _keeping(letter):
                    sent_bytes = ended.transfer.wait().stats.bytes
                work.close()
                self._tell(messages.Answered(*letter.key, sent_bytes, work.kvpool_s))

    # ---- what goes wrong

    @contextlib.contextmanager
    def _failing(self, letter: Letter, work: Work) -> Iterator[None]:
        """An error of kvpool ends the attempt, not the instance: its blocks are freed, and the dispatcher learns it."""
        try:
            yield
        except kvpool.Error as error:
            self._decoding.pop(letter.key, None)
            work.close()
            self._tell(messages.Failed(*letter.key, f"{type(error).__name__}: {error}"))
        except BaseException:
            work.close()
            raise

    def _audit(self, until: float) -> None:
        """Lets go of everything; tells the result when no block is kept for a peer, or what is still to be read is."""
        self._waiting.clear()
        for key in [*self._decoding, *self._halves]:
            self._drop(key)
        if self._sent_back:  # each ends by its deadline; its blocks are pinned as long
            self._audit_until = time.monotonic() + _SETTLE_S
            return
        stats = self.pool.audit()
        hbm = stats.hbm
        if not hbm.active + hbm.pinned + hbm.reserved + hbm.lent + hbm.quarantined or time.monotonic() > until:
            self._audit_until = None
            self._tell(messages.Audited(stats))

    def _warm_up(self) -> None:
        """The first call of a kernel is slow; nobody's time to first token should pay for it."""
        size = self._plan.config.block_tokens
        prompt = torch.arange(3 * size, dtype=torch.int32).numpy() % 256
        with Work(self.pool, prompt, 2) as work:
            for _ in range(2):
                work.grow()
                self._engine.next_token(work)


def _role(name: str) -> Literal["prefill", "decode", "both"]:
    return "prefill" if name.startswith("prefill") else "decode" if name.startswith("decode") else "both"


@contextlib.contextmanager
def _keeping(letter: Letter) -> Iterator[None]:
    """Lets an error of kvpool pass: the answer is out, and a cache that was not filled costs time later."""
    try:
        yield
    except kvpool.Error as error:
        _log.warning("what request %d has left could not be kept: %s", letter.request, error)


def _begin(send: Callable[[], _T]) -> _T:
    """Begins a transfer to a peer that the dispatcher knows of.

    A newcomer is announced to all processes, but not in the same moment: the dispatcher may be ahead of this one.

    Raises:
        kvpool.PeerLost: It is not there, or not any more.
    """
    until = time.monotonic() + _HEARD_S
    while True:
        try:
            return send()
        except kvpool.PeerLost:
            if time.monotonic() >= until:
                raise
        time.sleep(_AGAIN_S)


def main(name: str, plan: Plan, pipe: Connection) -> None:
    """What the process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who started it, who ends this process
    worker = Worker(name, plan, pipe)
    with worker.cluster, worker.pool:
        worker.run()
