"""Which layers are meant, and where models keep them."""

from __future__ import annotations

import pytest
import torch
from hidden_support import LAYERS, WIDTH, Toy, batch_of, llama, states
from torch import nn

from rsm_torch.hidden import capture

ROWS = [[5, 6, 7, 8, 9], [11, 12], [21, 22, 23, 24]]


def test_layers_by_index_name_and_predicate():
    model, batch = llama(), batch_of(ROWS)
    acts = states(model, batch, [1, -1, "model.layers.2", "model.layers.0.mlp"])
    assert list(acts) == [1, 3, 2, "model.layers.0.mlp"]
    assert acts[-1] is not None
    assert torch.equal(acts[-1], acts[3])
    assert torch.equal(acts["model.layers.2"], acts[-2])
    assert acts.names[3] == "model.layers.3"
    assert acts.norms["model.layers.0.mlp"] is None
    chosen = states(model, batch, lambda name: name.endswith("mlp"))
    assert list(chosen) == [f"model.layers.{i}.mlp" for i in range(LAYERS)]
    assert torch.equal(chosen["model.layers.0.mlp"], acts["model.layers.0.mlp"])
    assert -1 in acts
    assert 0 not in acts
    assert {key: tuple(value.shape) for key, value in acts.items()} == dict.fromkeys(
        acts, (3, WIDTH)
    )
    with pytest.raises(KeyError, match="layer 0 is not captured; captured are 1, 3, 2"):
        acts[0]
    assert "runs=1" in repr(acts)


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        (LAYERS + 1, ValueError, r"layers: 5 out of range: model.layers has 4 layers \(0 to 3"),
        (-5, ValueError, "layers: -5 out of range"),
        ("model.layer.2", ValueError, "no module 'model.layer.2' in LlamaForCausalLM; near it: model.layers"),
        ([], ValueError, "layers: no layer named"),
        (1.5, TypeError, "layers: expected indices or names, got 1.5"),
        ([True], TypeError, "layers: expected indices or names, got True"),
        (lambda name: False, ValueError, "the predicate chose none"),
    ],
)  # fmt: skip
def test_layers_that_are_not_there_are_named(layers, error, message):
    with pytest.raises(error, match=message):
        capture(llama(), layers)


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"pool": "max"}, ValueError, "pool: expected one of mean, last, first, none, got 'max'"),
        ({"pool": "none", "span": (0, 2)}, ValueError, "pool: 'none' gives every token"),
        ({"span": 3}, TypeError, r"span: expected \(start, stop\)"),
        ({"mask": [[1]]}, TypeError, "mask: expected a tensor"),
        ({"mask": torch.ones(3)}, ValueError, r"mask: expected \[batch, tokens\]"),
        ({"norm": "both"}, ValueError, "norm: expected one of pre, post"),
    ],
)
def test_arguments_are_checked_before_anything_runs(more, error, message):
    with pytest.raises(error, match=message):
        capture(llama(), 1, **more)


def test_attention_masks_that_tell_nothing_about_padding_are_refused():
    model, batch = llama(), batch_of(ROWS)
    square = torch.zeros(3, 1, 5, 5)
    with pytest.raises(ValueError, match=r"attention_mask: cannot tell padding from .*pool='none'"):
        states(model, {"input_ids": batch["input_ids"], "attention_mask": square}, 1)
    tokens = states(model, {"input_ids": batch["input_ids"], "attention_mask": square}, 1, "none")
    assert tokens[1].shape == (3, 5, WIDTH)


def test_masks_by_kind_of_attention_are_not_taken_for_none():
    model, square = Toy(), torch.zeros(3, 1, 5, 5)
    ids = batch_of(ROWS)["input_ids"]
    with pytest.raises(ValueError, match="attention_mask: cannot tell padding from"):
        states(model, {"ids": ids, "attention_mask": {"full_attention": square}}, 1)
    with pytest.raises(ValueError, match="attention_mask: cannot tell padding from"):
        states(model, {"ids": ids, "attention_mask": {"sliding": None, "full": square}}, 1)


def test_layers_that_are_one_module_are_refused():
    model = Toy()
    model.blocks[2] = model.blocks[1]
    for layer in (1, 2, -2, "blocks.1"):
        with pytest.raises(ValueError, match="cannot be told from others, since 1, 2 of blocks"):
            capture(model, [0, layer])
    assert states(model, {"ids": torch.ones(2, 3, dtype=torch.long)}, [0, 3]).runs == 1


def test_a_module_that_gives_no_states_is_named():
    plain = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with pytest.raises(TypeError, match=r"layer 0: .*return \[B, T, D\] states, got .*\(4, 3\)"):  # noqa: SIM117
        with capture(plain, "0"):
            plain(torch.ones(4, 3))


# Where models keep their layers


def test_what_the_model_calls_its_decoder_is_searched_and_experts_are_not():
    class Wrapped(nn.Module):  # a longer vision tower, experts in each layer, a decoder of its own
        def __init__(self):
            super().__init__()
            self.vision, self.language_model = Toy(count=7), Toy(count=3)
            for block in self.language_model.blocks:
                block.experts = nn.ModuleList(nn.Identity() for _ in range(20))

        def get_decoder(self):
            return self.language_model

        def forward(self, ids, attention_mask=None):
            return self.language_model(ids, attention_mask)

    acts = states(Wrapped(), {"ids": torch.ones(2, 3, dtype=torch.long)}, [-1, "final"])
    assert acts.names == {2: "language_model.blocks.2", 3: "language_model.last"}


def test_a_longer_vision_tower_is_not_the_decoder():
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    text = {**llama().config.to_dict(), "num_hidden_layers": 2}
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    model = Idefics3ForConditionalGeneration(
        Idefics3Config(vision_config=vision, text_config=text, scale_factor=1)
    ).eval()
    acts = states(model, batch_of(ROWS, "left"), [-1, "final"], "first")
    assert acts.names == {1: "model.text_model.layers.1", 2: "model.text_model.norm"}
    alone = states(model, {"input_ids": torch.tensor(ROWS[1:2])}, -1, "first")
    torch.testing.assert_close(acts[-1][1], alone[-1][0], rtol=1e-3, atol=1e-4)


def test_a_model_without_a_list_of_layers_says_what_it_has():
    plain = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with pytest.raises(ValueError, match=r"found no list of decoder layers in Sequential \(0, 1\)"):
        capture(plain, 0)
    with capture(plain, "0", "mean") as acts:
        plain(torch.ones(2, 4, 3))
    assert acts["0"].shape == (2, 3)


def test_encoders_are_not_taken_for_decoders():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=2, vocab_size=30,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).eval()
    with pytest.raises(ValueError, match=r"T5ForConditionalGeneration has an encoder.*get_decoder"):
        capture(model, -1)
    decoder = model.get_decoder()
    acts = states(decoder, {"input_ids": torch.ones(2, 3, dtype=torch.long)}, [-1, "final"])
    assert acts["final"].shape == (2, 16)
