"""A store beside another engine: what that one has cached is fetched, and not computed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

import kvpool
from kvpool import DRAM
from kvpool.engines.packing import CPU_COLUMNS, ROWS, marked, unmarked
from kvpool.engines.transformers import PromptStore, sources

SIZE = 8  # tokens in a block
_names = itertools.count()
OPTIONS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 6}
SCORES = {"return_dict_in_generate": True, "output_scores": True}


def made(dtype: Any = torch.float32, **fields: Any) -> Any:
    torch.manual_seed(3)
    shape = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape | fields)).to(dtype).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return made()


@pytest.fixture
def url() -> Iterator[str]:
    name = f"local://sources-{os.getpid()}-{next(_names)}"
    yield name
    kvpool.Cluster.forget(name)


@pytest.fixture(params=[("NHD", ROWS), ("HND", CPU_COLUMNS)], ids=["rows", "columns"])
def engine(request: pytest.FixtureRequest, model: Any, url: str) -> Iterator[PromptStore]:
    """Another engine, whose blocks have another order inside, with a store of the same model in front."""
    dims, packing = request.param
    layout = kvpool.KVLayout(3, 2, 8, "float32", SIZE, order="discrete", dims=dims, pages="fused")
    settings = {"model": marked("m", packing), "audit": True}
    with kvpool.Cluster.join(url) as cluster, kvpool.Pool(layout, dram_blocks=32, **settings) as pool:
        pool.attach(cluster, name="engine")
        yield PromptStore(pool, model.config)


@pytest.fixture
def store(model: Any, url: str, engine: PromptStore) -> Iterator[PromptStore]:
    with (
        kvpool.Cluster.join(url) as cluster,
        PromptStore.beside(model, cluster, "engine", dram_blocks=16, model="m", audit=True) as beside,
    ):
        yield beside
        beside.pool.audit()


def prompt(length: int, seed: int = 0) -> Any:
    return torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(seed))


def test_what_the_other_has_computed_is_fetched_and_continued(
    model: Any, engine: PromptStore, store: PromptStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(45)
    engine.generate(model, tokens, **OPTIONS)
    cold = model.generate(tokens, **OPTIONS, **SCORES)
    computed = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **given: computed.append(given["input_ids"].shape) or forward(**given))
    warm = store.generate(model, tokens, **OPTIONS, **SCORES)
    monkeypatch.undo()
    assert computed == [(1, 5)] + [(1, 1)] * 5
    assert warm.sequences.tolist() == cold.sequences.tolist()
    torch.testing.assert_close(torch.stack(warm.scores), torch.stack(cold.scores), atol=1e-4, rtol=1e-4)
    counts = store.counts()
    assert (counts.fetched_tokens, counts.loaded_tokens, counts.failed_fetches) == (40, 40, 0)
    store.generate(model, tokens, **OPTIONS)
    assert store.counts().fetched_tokens == 40  # it is cached here
    assert store.counts().loaded_tokens == 80


def test_only_what_is_lacking_is_fetched_for_each_row(model: Any, engine: PromptStore, store: PromptStore) -> None:
    rows = [prompt(40, seed=seed) for seed in range(2)]
    store.generate(model, rows[0][:, :17], **OPTIONS)
    for row in rows:
        engine.generate(model, row, **OPTIONS)
    batch = torch.cat(rows)
    assert store.generate(model, batch, **OPTIONS).tolist() == model.generate(batch, **OPTIONS).tolist()
    assert store.counts().fetched_tokens == 16 + 32
    assert store.counts().loaded_tokens == 2 * 32


def test_a_common_beginning_of_rows_is_fetched_once(model: Any, engine: PromptStore, store: PromptStore) -> None:
    """The store has room for it once, and for the ends of the rows."""
    common = prompt(80)
    rows = [torch.cat([common, prompt(9, seed=seed)], dim=1) for seed in range(1, 5)]
    for row in rows:
        engine.generate(model, row, **OPTIONS)
    batch = torch.cat(rows)
    assert store.generate(model, batch, **OPTIONS).tolist() == model.generate(batch, **OPTIONS).tolist()
    counts = store.counts()
    assert (counts.fetched_tokens, counts.failed_fetches) == (80 + 4 * 8, 0)
    assert counts.loaded_tokens == 4 * 88


class Silent:
    """In place of a pool: of its peers the lost is gone, and the silent ones answer nothing until the deadline."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings = kvpool.Settings(timeout_s=5.0)
        self.kv_layout = kvpool.KVLayout(3, 2, 8, "float32", SIZE)
        self.now = 100.0
        self.asked: list[tuple[str, float]] = []
        monkeypatch.setattr(sources, "monotonic", lambda: self.now)

    def fetch_with_insert(self, peer: str, tokens: Any, *, timeout: float, **options: Any) -> Any:
        self.asked.append((peer, timeout))
        if peer == "lost":
            raise kvpool.PeerLost("the test says so")
        self.now += timeout
        raise kvpool.DeadlineExceeded("the test says so")


def test_peers_that_do_not_answer_delay_one_prompt_by_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Silent(monkeypatch)
    asked = sources.Sources(pool, ["lost", "silent", "other"], DRAM)  # type: ignore[arg-type]
    rows = [prompt(20, seed=0)[0].numpy(), prompt(7)[0].numpy()]
    assert asked.fetch(rows, "") == sources.Fetched(tokens=0, failures=2)
    assert pool.asked == [("lost", 5.0), ("silent", 5.0)]
    pool.asked.clear()
    asked.fetch(rows, "")
    assert pool.asked == [("other", 5.0)]
    pool.asked.clear()
    asked.fetch([*rows, *rows], "")
    assert pool.asked == [("lost", 5.0)], "it is asked again, once, and the next ones are not yet"
    pool.now += 20
    pool.asked.clear()
    asked.fetch(rows, "")
    assert pool.asked == [("lost", 5.0), ("silent", 5.0)]


def test_namespaces_are_kept_apart(model: Any, engine: PromptStore, store: PromptStore) -> None:
    engine.generate(model, prompt(40), namespace="a", **OPTIONS)
    store.generate(model, prompt(40), **OPTIONS)
    assert store.counts().fetched_tokens == 0
    store.generate(model, prompt(40), namespace="a", **OPTIONS)
    assert store.counts().fetched_tokens == 32


def test_the_content_comes_from_the_other(model: Any, engine: PromptStore, store: PromptStore) -> None:
    cold = engine.generate(model, prompt(45), **OPTIONS, **SCORES)
    torch.from_dlpack(engine.pool.tensor(DRAM)).mul_(-1.5)
    poisoned = store.generate(model, prompt(45), **OPTIONS, **SCORES)
    assert not torch.allclose(torch.stack(cold.scores), torch.stack(poisoned.scores), atol=1e-2)


def test_what_is_sent_the_other_continues(model: Any, engine: PromptStore, store: PromptStore) -> None:
    tokens = prompt(45)
    store.generate(model, tokens, **OPTIONS)
    assert store.send(tokens[0], "engine") == 40
    assert store.send(tokens[0], "engine") == 0
    assert store.send(prompt(45, seed=1)[0], "engine") == 0
    assert engine.generate(model, tokens, **OPTIONS).tolist() == model.generate(tokens, **OPTIONS).tolist()
    assert engine.counts().loaded_tokens == 40
    with pytest.raises(kvpool.PeerLost, match="nobody"):
        store.send(tokens[0], "nobody")


def test_what_does_not_come_is_computed(model: Any, engine: PromptStore, store: PromptStore) -> None:
    long = prompt(200)  # more than the store has room for
    engine.generate(model, long, **OPTIONS)
    wanted = model.generate(long, **OPTIONS).tolist()
    assert store.generate(model, long, **OPTIONS).tolist() == wanted
    assert store.counts().failed_fetches == 1
    engine.pool.close()
    assert store.generate(model, prompt(45), **OPTIONS).tolist() == model.generate(prompt(45), **OPTIONS).tolist()
    assert store.counts().failed_fetches == 2
    assert store.counts().fetched_tokens == 0


REFUSED = [
    ({"num_key_value_heads": 4}, {}, "engine have kv_heads 2, and the model 4"),
    ({"num_hidden_layers": 2}, {}, "engine have layers 3, and the model 2"),
    ({"head_dim": 16}, {}, "engine have head_dim 8, and the model 16"),
    ({"dtype": torch.bfloat16}, {}, "engine have dtype float32, and the model bfloat16"),
    ({}, {"model": "other"}, "the models differ: engine has 'm', and this side 'other'"),
    ({}, {"model": ""}, "the models differ: engine has 'm', and this side ''"),
]


@pytest.mark.parametrize(("fields", "settings", "says"), REFUSED)
def test_an_engine_with_other_content_is_refused(
    url: str, engine: PromptStore, fields: Any, settings: Any, says: str
) -> None:
    with kvpool.Cluster.join(url) as cluster, pytest.raises(kvpool.LayoutMismatch, match=says):
        PromptStore.beside(made(**fields), cluster, "engine", **{"dram_blocks": 4, "model": "m"} | settings)


def test_bytes_of_another_kind_and_unknown_members_are_refused(model: Any, url: str) -> None:
    with kvpool.Cluster.join(url) as other, kvpool.Pool(kvpool.RawLayout(1 << 10), dram_blocks=4) as pool:
        pool.attach(other, name="bytes")
        with kvpool.Cluster.join(url) as cluster:
            with pytest.raises(kvpool.LayoutMismatch, match="bytes has blocks of raw bytes"):
                PromptStore.beside(model, cluster, "bytes", dram_blocks=4)
            with pytest.raises(kvpool.PeerLost, match="no member engine: the cluster has bytes"):
                PromptStore.beside(model, cluster, "engine", dram_blocks=4)
            assert cluster.registration is None
    with pytest.raises(kvpool.ArgumentTypeError, match="must be a kvpool"):
        PromptStore.beside(model, url, "engine", dram_blocks=4)
    layout = kvpool.KVLayout(3, 2, 8, "float32", SIZE)
    for names in ("engine", [7]):
        with kvpool.Pool(layout, dram_blocks=4) as pool, pytest.raises(kvpool.ArgumentTypeError, match="list of names"):
            PromptStore(pool, model.config, sources=names)


def test_pages_that_are_packed_in_an_unknown_way_are_refused(model: Any, url: str) -> None:
    layout = kvpool.KVLayout(3, 2, 8, "float32", SIZE, dims="HND", pages="fused")
    name = marked("m", "cpu_attn-amx")
    assert unmarked(name) == ("m", "cpu_attn-amx")
    with kvpool.Cluster.join(url) as other, kvpool.Pool(layout, dram_blocks=4, model=name) as pool:
        with pytest.raises(kvpool.LayoutMismatch, match="cpu_attn-amx, packed inside"):
            PromptStore(pool, model.config)
        pool.attach(other, name="engine")
        with kvpool.Cluster.join(url) as cluster:
            with pytest.raises(kvpool.LayoutMismatch, match="cpu_attn-amx, packed inside"):
                PromptStore.beside(model, cluster, "engine", dram_blocks=4, model="m")
            with kvpool.Pool(layout, dram_blocks=4, model="m") as rows:  # which does not know of it
                rows.attach(cluster)
                with pytest.raises(kvpool.LayoutMismatch, match=r"'m\[pages of cpu_attn-amx\]'"):
                    rows.fetch_with_insert("engine", list(range(SIZE))).wait()
    with (
        kvpool.Pool(kvpool.KVLayout(3, 2, 8, "float32", SIZE), dram_blocks=4, model=marked("", CPU_COLUMNS)) as split,
        pytest.raises(kvpool.LayoutMismatch, match="packed inside"),
    ):
        PromptStore(split, model.config)


def test_columns_lie_as_vllm_has_them(model: Any) -> None:
    """Of each head K as [dim, token], then V as [token, dim]."""
    layout = kvpool.KVLayout(3, 2, 8, "float32", SIZE, dims="HND", pages="fused")
    with kvpool.Pool(layout, dram_blocks=4, model=marked("", CPU_COLUMNS)) as pool:
        store = PromptStore(pool, model.config)
        cache = store.load(prompt(SIZE)[0])
        with torch.no_grad():
            model(prompt(SIZE), past_key_values=cache)
        assert cache.save(prompt(SIZE)[0]) == SIZE
        with pool.match(prompt(SIZE)[0].numpy()) as hit:
            page = torch.from_dlpack(pool.tensor(DRAM))[int(kvpool.block_ids(hit.addrs)[0])].view(3, 2, 2, SIZE * 8)
    for number, layer in enumerate(cache.layers):
        for head in range(2):
            assert torch.equal(page[number, head, 0].view(8, SIZE), layer.keys[0, head].T)
            assert torch.equal(page[number, head, 1].view(SIZE, 8), layer.values[0, head])
