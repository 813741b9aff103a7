"""The paged model agrees with plain dense attention, however its blocks were filled."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

torch = pytest.importorskip("torch")

from llama import EOS, VOCAB, Llama, LlamaConfig, PagedKV  # noqa: E402


def random_tokens(count: int, seed: int = 0):
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def empty_kv(config: LlamaConfig, blocks: int):
    shape = (blocks, config.layers, 2, config.kv_heads, config.block_tokens, config.head_dim)
    return torch.full(shape, 1e3)  # what a freed block may hold: large, and not ours


def paged_logits(model: Llama, tokens, cuts: Sequence[int] = (), order: str = "scattered"):
    """Logits after the last token, computed in pieces that end after `cuts` blocks, and the KV memory."""
    blocks = -(-len(tokens) // model.config.block_tokens)
    kv = empty_kv(model.config, 2 * blocks)
    ids = torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(1))[:blocks]
    if order == "contiguous":
        ids = torch.arange(blocks)
    done = 0
    for cut in cuts:
        model.forward(tokens[: cut * model.config.block_tokens], PagedKV(kv), ids[:cut], done)
        done = cut
    return model.forward(tokens, PagedKV(kv), ids, done), kv[ids]


def dense_logits(model: Llama, tokens):
    """A second implementation, in float64: the whole sequence at once, no blocks, rotation by complex numbers."""
    c = model.config
    count = len(tokens)
    frequency = c.rope_theta ** (-torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim)
    turn = torch.polar(torch.ones(count, c.head_dim // 2).double(), torch.outer(torch.arange(count), frequency))

    def norm(x, gain):
        return x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * gain.double()

    def rotate(x):  # [token, head, dim]; a pair is an element of the first half and its fellow of the second
        left, right = x.chunk(2, dim=-1)
        turned = torch.complex(left, right) * turn[:, None]
        return torch.cat([turned.real, turned.imag], dim=-1)

    x = model.embedding[tokens.long()].double()
    future = torch.ones(count, count, dtype=torch.bool).triu(1)
    for layer in model.layers:
        qkv = norm(x, layer.attention_norm) @ layer.qkv.double()
        q, k, v = qkv.split([n * c.head_dim for n in (c.heads, c.kv_heads, c.kv_heads)], dim=-1)
        q = rotate(q.view(count, c.heads, c.head_dim))
        k = rotate(k.view(count, c.kv_heads, c.head_dim)).repeat_interleave(c.heads // c.kv_heads, dim=1)
        v = v.view(count, c.kv_heads, c.head_dim).repeat_interleave(c.heads // c.kv_heads, dim=1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / c.head_dim**0.5
        attention = scores.masked_fill(future, -torch.inf).softmax(-1)
        x = x + torch.einsum("hij,jhd->ihd", attention, v).reshape(count, -1) @ layer.out.double()
        gate, up = (norm(x, layer.ffn_norm) @ layer.gate_up.double()).chunk(2, dim=-1)
        x = x + (gate * torch.sigmoid(gate) * up) @ layer.down.double()
    return (norm(x, model.norm) @ model.unembedding.double())[-1]


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 31, 64, 101])
@pytest.mark.parametrize("order", ["contiguous", "scattered"])
def test_paged_attention_agrees_with_dense_attention(model: Llama, count: int, order: str) -> None:
    tokens = random_tokens(count, seed=count)
    logits, _ = paged_logits(model, tokens, order=order)
    assert logits.shape == (VOCAB,)
    torch.testing.assert_close(logits.double(), dense_logits(model, tokens), rtol=1e-4, atol=1e-4)


def test_the_demo_model_agrees_with_dense_attention() -> None:
    model = Llama(LlamaConfig())
    tokens = random_tokens(150)
    logits, _ = paged_logits(model, tokens)
    torch.testing.assert_close(logits.double(), dense_logits(model, tokens), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("cuts", [(1,), (3,), (1, 2, 3, 4), (2, 7), (7,)])
def test_k_v_and_logits_are_the_same_bit_for_bit_however_prefill_is_split(model: Llama, cuts: tuple[int, ...]) -> None:
    tokens = random_tokens(30)
    logits, kv = paged_logits(model, tokens)
    split_logits, split_kv = paged_logits(model, tokens, cuts, order="contiguous")
    assert torch.equal(logits, split_logits)
    assert torch.equal(kv, split_kv)


def test_decoding_writes_the_k_and_v_that_prefill_would_have_written(model: Llama) -> None:
    tokens = random_tokens(12)
    _, prefilled = paged_logits(model, tokens)
    kv = empty_kv(model.config, 3)
    for known in range(1, 13):
        blocks = -(-known // model.config.block_tokens)
        model.forward(tokens[:known], PagedKV(kv), torch.arange(blocks), blocks - 1)
    assert torch.equal(kv, prefilled)


def test_a_later_token_does_not_change_earlier_results(model: Llama) -> None:
    tokens = random_tokens(11)
    other = tokens.clone()
    other[10] = EOS
    _, kv = paged_logits(model, tokens)
    _, other_kv = paged_logits(model, other)
    assert torch.equal(kv[:2], other_kv[:2])
    assert torch.equal(kv[2, :, :, :, :2], other_kv[2, :, :, :, :2])
    assert not torch.equal(kv[2, :, :, :, 2], other_kv[2, :, :, :, 2])


def test_a_token_depends_on_all_blocks_before_it(model: Llama) -> None:
    tokens = random_tokens(40)
    logits, _ = paged_logits(model, tokens)
    for position in range(0, 36, 4):
        other = tokens.clone()
        other[position] = EOS
        assert not torch.equal(logits, paged_logits(model, other)[0])


def test_weights_depend_on_the_seed_alone(config: LlamaConfig) -> None:
    tokens = random_tokens(9)
    logits = [paged_logits(Llama(config, seed), tokens)[0] for seed in (1, 1, 2)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


def test_the_number_of_parameters_is_that_of_the_weights(model: Llama) -> None:
    weights = [model.embedding, model.norm, model.unembedding]
    weights += [weight for layer in model.layers for weight in vars(layer).values()]
    assert sum(weight.numel() for weight in weights) == model.config.parameters


@pytest.mark.parametrize(("count", "blocks", "first"), [(8, 1, 0), (8, 3, 0), (8, 2, 2), (8, 2, -1), (0, 0, 0)])
def test_forward_refuses_blocks_that_do_not_fit_the_tokens(model: Llama, count: int, blocks: int, first: int) -> None:
    with pytest.raises(ValueError, match=rf"{count} tokens are"):
        model.forward(random_tokens(count), PagedKV(empty_kv(model.config, 3)), torch.arange(blocks), first)


def test_forward_refuses_more_tokens_than_it_has_positions(model: Llama) -> None:
    with pytest.raises(ValueError, match="257 tokens"):
        model.forward(random_tokens(257), PagedKV(empty_kv(model.config, 65)), torch.arange(65), 64)
