"""What researchers ask of a capture: all layers, embeddings, routers, pools of their own, gradients,
edits, other devices, static caches, and models that number or mask otherwise."""

from __future__ import annotations

import pytest
import torch
from hidden_support import (
    FAMILIES,
    LAYERS,
    SPECIAL,
    WIDTH,
    batch_of,
    hooks,
    llama,
)  # fmt: skip
from transformers import (
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from rsm_torch.hidden import HiddenStateMemories, HiddenStateMemory, capture
from rsm_torch.hidden.pooling import of_square

ROWS = [[5, 6, 7, 8, 9], [11, 12], [21, 22, 23, 24]]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_and_the_embeddings(family):
    model, batch = FAMILIES[family](), batch_of(ROWS)
    expected = model(**batch, output_hidden_states=True).hidden_states
    before = hooks(model)  # transformers' own, for hidden_states
    with torch.no_grad(), capture(model, ["embeddings", "all", "final"], "none") as acts:
        model(**batch)
    assert list(acts) == ["embeddings", *range(LAYERS), LAYERS]
    assert torch.equal(acts["embeddings"], expected[0])
    assert torch.equal(acts[1], expected[2])
    assert torch.equal(acts["final"], expected[-1])
    assert hooks(model) == before


def test_the_embeddings_alone_may_stop_a_forward():
    model, batch = llama(), batch_of(ROWS)
    with torch.no_grad(), capture(model, "embeddings", "mean", stop=True) as acts:
        assert acts.run(**batch) is None
    table = model.get_input_embeddings()
    want = torch.stack([table(torch.tensor(row)).mean(0) for row in ROWS])
    torch.testing.assert_close(acts["embeddings"], want)
    assert acts.names == {"embeddings": "embeddings"}
    assert "model.layers.0" not in acts


def test_a_pool_of_ones_own():
    model, batch = llama(), batch_of(ROWS)

    def most(states, counted):
        return states.masked_fill(~counted[..., None], -torch.inf).amax(1)

    with (
        torch.no_grad(),
        capture(model, [0, 2], most) as acts,
        capture(model, [0, 2], "none") as all_,
    ):
        model(**batch)
    for layer in (0, 2):
        for row, tokens in enumerate(ROWS):
            assert torch.equal(acts[layer][row], all_[layer][row, : len(tokens)].amax(0))
    for bad, said in (
        (lambda s, c: s[0], "3 rows"),
        (lambda s, c: 7, "int"),
        (lambda s, c: s[:, 0, 0], "3"),
    ):
        with pytest.raises(ValueError, match=f"pool: expected.*{said}"), capture(model, 0, bad):
            model(**batch)


def test_states_go_where_they_are_told():
    model, batch = llama(), batch_of(ROWS)
    with torch.no_grad(), capture(model, "all", "none", device="cpu") as acts:
        acts.run(**batch)
    assert {acts[layer].device.type for layer in acts} == {"cpu"}
    with pytest.raises((TypeError, ValueError, RuntimeError), match="device"):
        capture(model, 1, device="nowhere")


@pytest.mark.parametrize(
    ("config", "kind", "gate"),
    [
        (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4}),
        (
            Qwen3MoeConfig,
            Qwen3MoeForCausalLM,
            {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
        ),
    ],
)
def test_routers_of_mixtures_of_experts(config, kind, gate):
    torch.manual_seed(0)
    model = kind(
        config(
            hidden_size=WIDTH,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts_per_tok=2,
            **gate,
            **SPECIAL,
        )
    ).eval()
    batch = batch_of(ROWS)
    with torch.no_grad(), capture(model, lambda name: name.endswith("mlp.gate"), "none") as acts:
        logits = model(**batch, output_router_logits=True).router_logits
    assert len(acts) == 2
    for found, want in zip(acts.values(), logits, strict=True):
        assert found.shape == (3, 5, 4)
        torch.testing.assert_close(found.flatten(0, 1), want)


def test_gradients_flow_from_what_was_captured():
    model, batch = llama(), batch_of(ROWS)
    for keep in (False, True):
        model.zero_grad()
        with capture(model, [1, "embeddings"], "mean", grad=keep) as acts:
            model(**batch)
        assert acts[1].requires_grad == keep
        if keep:
            acts[1].square().sum().backward()
            assert model.get_input_embeddings().weight.grad.abs().sum() > 0
            assert model.model.layers[2].mlp.up_proj.weight.grad is None


def test_edits_are_what_the_model_goes_on_with():
    model, batch = llama(), batch_of(ROWS)
    plain = model(**batch).logits

    def steer(layer, states):
        return states + 3 if layer == 1 else None

    with torch.no_grad(), capture(model, [0, 1, 2], "none", edit=steer) as acts:
        steered = model(**batch).logits
    with torch.no_grad(), capture(model, [0, 1, 2], "none") as before:
        model(**batch)
    assert torch.equal(acts[0], before[0])
    assert torch.equal(acts[1], before[1] + 3)
    assert not torch.allclose(acts[2], before[2])
    assert not torch.allclose(steered, plain)

    def in_place(layer, states):
        states[:, -1] = 0

    with torch.no_grad(), capture(model, 3, "none", edit=in_place) as acts:
        model(**batch)
    assert not acts[3][:, -1].any()
    with (
        pytest.raises(ValueError, match="edit: expected states"),
        capture(model, 0, edit=lambda *_: 1),
    ):
        model(**batch)
    with pytest.raises(ValueError, match=r"edit.*embeddings"):
        capture(model, "embeddings", edit=steer)
    with pytest.raises(TypeError, match="edit"):
        capture(model, 0, edit="no")
    assert not hooks(model)


# Masks


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_static_cache_gives_what_a_growing_one_does(side, attention):
    """Generating with a static cache gives layers a mask of who attends to whom."""
    model = llama(attn_implementation=attention)
    batch = batch_of(ROWS, side) if side == "left" else batch_of([[5, 6, 7], [8, 9, 10]])
    how = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = {}
    for cache in (None, "static"):
        with capture(model, [0, 2], "mean") as acts:
            model.generate(**batch, **how, cache_implementation=cache)
        found[cache] = acts.steps(2)
    assert len(found["static"]) == len(found[None]) == 4
    for one, other in zip(found[None], found["static"], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("keys", [4, 7])
@pytest.mark.parametrize("let_all", [False, True])
def test_padding_is_told_from_a_square_mask(kind, keys, let_all):
    """Rows padded on the left by 0 and 2 of 4 tokens, in a cache of `keys` places."""
    attends = torch.zeros(2, 1, 4, keys, dtype=torch.bool)
    for row, pad in enumerate((0, 2)):
        for t in range(4):
            attends[row, 0, t, pad : t + 1] = True
            if t < pad and let_all:
                attends[row, 0, t] = True
    mask = attends if kind == "bool" else torch.where(attends, 0.0, torch.finfo(torch.float32).min)
    assert of_square(mask, 4).tolist() == [[True] * 4, [False, False, True, True]]
    near = torch.arange(keys) > torch.arange(4)[:, None] - 2  # the last two alone
    assert of_square(attends & near, 4).tolist() == [[True] * 4, [False, False, True, True]]
    assert of_square(torch.ones_like(attends), 4).dim() == 4


# Models that number or mask otherwise


def test_mamba_numbers_its_states_from_its_first_layer():
    torch.manual_seed(0)
    model = MambaForCausalLM(
        MambaConfig(hidden_size=WIDTH, num_hidden_layers=3, state_size=4, **SPECIAL)
    ).eval()
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]])}
    with torch.no_grad(), capture(model, "all", "none") as acts:
        hidden = model(**batch, output_hidden_states=True).hidden_states
    assert torch.equal(acts[1], hidden[1])  # of others, hidden_states[2]
    assert torch.equal(acts[0], hidden[0])


def test_rwkv_is_warned_of():
    torch.manual_seed(0)
    model = RwkvForCausalLM(
        RwkvConfig(hidden_size=WIDTH, num_hidden_layers=2, attention_hidden_size=WIDTH, **SPECIAL)
    ).eval()
    with (
        torch.no_grad(),
        capture(model, 0, "last") as acts,
        pytest.warns(UserWarning, match="rwkv ignores"),
    ):
        model(**batch_of([[5, 6, 7], [8]], "left"))
    assert acts[0].shape == (2, WIDTH)


# Several layers


def test_several_layers_are_what_each_would_be_alone():
    model, tokenizer = llama(), Letters()
    texts = [f"{a}{b} {a}{a}" for a in "abcdef" for b in "xyz"]
    layers = ["embeddings", 0, -1, "final"]
    several = HiddenStateMemories(model, tokenizer, layers, streams=2, batch_size=5)
    assert list(several) == ["embeddings", 0, LAYERS - 1, LAYERS]
    with pytest.raises(RuntimeError, match="calibrate"):
        several.write(texts)
    found = several.calibrate(texts[:12])
    written = several.write(texts, streams=[n % 2 for n in range(len(texts))], labels=texts)
    recalled = several.recall(["ax aa", "fz ff"], streams=0, top_k=3)
    for layer in several:
        alone = HiddenStateMemory(model, tokenizer, layer, streams=2)
        assert alone.calibrate(texts[:12]).tau == pytest.approx(found[layer].tau, abs=1e-5)
        one = alone.write(texts, streams=[n % 2 for n in range(len(texts))], labels=texts)
        assert written[layer].atoms.tolist() == one.atoms.tolist()
        again = alone.recall(["ax aa", "fz ff"], streams=0, top_k=3)
        assert recalled[layer].labels == again.labels
    with pytest.raises(ValueError, match="stored already"):
        several.calibrate(texts)
    with pytest.raises(TypeError, match="texts"):
        several.write("one text")


class Letters:
    """A token for each letter."""

    def __call__(self, texts, verbose=True, truncation=False, max_length=None):
        return {
            "input_ids": [[3 + ord(letter) % 90 for letter in text][:max_length] for text in texts]
        }
