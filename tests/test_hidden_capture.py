"""Capturing: the states are transformers' own, whatever the padding, model, device or failure."""

from __future__ import annotations

import copy
from contextlib import ExitStack

import pytest
import torch
from hidden_support import (  # noqa: F401 - real_model is the fixture smollm2
    FAMILIES,
    LAYERS,
    VOCABULARY,
    WIDTH,
    Toy,
    batch_of,
    hooks,
    llama,
    real_model,
    states,
)  # fmt: skip
from torch.nn.functional import cosine_similarity

from rsm_torch.hidden import capture

ROWS = [[5, 6, 7, 8, 9], [11, 12], [21, 22, 23, 24]]
TEXTS = [
    "The capital of France is Paris.",
    "Water boils.",
    "2 + 2 = 4, as every child knows by six.",
]


# Equal to transformers' own


def check_every_layer(model, batch, **tolerance):
    with torch.no_grad():
        expected = model(**batch, output_hidden_states=True).hidden_states
    count = len(expected) - 1
    acts = states(model, batch, range(count + 1), "none")
    assert list(acts) == list(range(count + 1))
    for layer in range(count - 1):
        torch.testing.assert_close(acts[layer], expected[layer + 1], **tolerance)
    torch.testing.assert_close(acts["final"], expected[-1], **tolerance)
    assert acts[count] is acts["final"]
    return acts, expected


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_the_hidden_state_of_transformers(family):
    model = FAMILIES[family]()
    batch = batch_of(ROWS)
    acts, expected = check_every_layer(model, batch, rtol=0, atol=0)
    name = acts.names[LAYERS]
    normed = model.get_submodule(name)(acts[LAYERS - 1])
    torch.testing.assert_close(normed, expected[-1])
    assert not torch.allclose(acts[LAYERS - 1], expected[-1], atol=1e-2)
    assert acts.norms == dict.fromkeys(range(LAYERS), "pre") | {LAYERS: "post"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layer_of_a_real_model(smollm2, dtype):
    model, tokenizer = smollm2
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    if dtype == torch.bfloat16:
        model = copy.deepcopy(model).to(dtype)
    acts, _ = check_every_layer(model, batch, rtol=0, atol=0)
    assert len(acts) == 31
    assert all(state.dtype == dtype for state in acts.values())


def test_alone_left_and_right_padded_agree_in_a_real_model(smollm2):
    model, tokenizer = smollm2
    ids = tokenizer(TEXTS)["input_ids"]

    def pooled(batch):
        with torch.no_grad(), ExitStack() as stack:
            captures = [
                stack.enter_context(capture(model, [0, 12, -1, "final"], pool))
                for pool in ("last", "mean", "first")
            ]
            model.model(**batch)
        return torch.stack([state for acts in captures for state in acts.values()], 1)

    left, right = pooled(batch_of(ids, "left")), pooled(batch_of(ids, "right"))
    assert left.shape == (3, 12, 576)
    for row, one in enumerate(ids):
        alone = pooled({"input_ids": torch.tensor([one])})[0]
        assert cosine_similarity(alone, left[row], -1).min() > 0.999
        assert cosine_similarity(alone, right[row], -1).min() > 0.999


# Pooling


@pytest.mark.parametrize("side", ["left", "right"])
def test_pools_take_the_tokens_that_count(side):
    model, batch = llama(), batch_of(ROWS, side)
    every = states(model, batch, 1, "none")[1]
    assert every.shape == (3, 5, WIDTH)
    own = [every[row][batch["attention_mask"][row] == 1] for row in range(3)]
    expected = {
        "last": torch.stack([row[-1] for row in own]),
        "first": torch.stack([row[0] for row in own]),
        "mean": torch.stack([row.mean(0) for row in own]),
    }
    for pool, value in expected.items():
        torch.testing.assert_close(states(model, batch, 1, pool)[1], value)
    spans = {(1, 3): slice(1, 3), (-2, None): slice(-2, None), (0, -1): slice(0, -1)}
    for span, meant in spans.items():
        pooled = states(model, batch, 1, "mean", span=span, check=False)[1]
        torch.testing.assert_close(pooled, torch.stack([row[meant].mean(0) for row in own]))


def test_a_mask_narrows_what_counts():
    model, batch = llama(), batch_of(ROWS)
    chosen = torch.tensor([[0, 1, 0, 1, 0], [1, 0, 1, 1, 1], [0, 0, 0, 1, 1]])
    every = states(model, batch, 2, "none")[2]
    pooled = states(model, batch, 2, "mean", mask=chosen)[2]
    expected = torch.stack([every[0, [1, 3]].mean(0), every[1, 0], every[2, 3]])
    torch.testing.assert_close(pooled, expected)
    with pytest.raises(ValueError, match=r"mask: expected \(3, 5\) .*got \(3, 4\)"):
        states(model, batch, 2, "mean", mask=chosen[:, :4])


@pytest.mark.parametrize("how", ["keyword", "position", "decoder", "decoder position"])
def test_the_attention_mask_is_seen_however_it_is_given(how):
    model, batch = llama(), batch_of(ROWS, "left")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with capture(model, [1, "final"], "first") as acts:
        if how == "keyword":
            model(ids, attention_mask=mask)
        elif how == "position":
            model(ids, mask)
        elif how == "decoder":
            model.model(input_ids=ids, attention_mask=mask)
        else:
            model.model(ids, mask)
    expected = states(model, batch, [1, "final"], "none")
    for layer in acts:
        alone = [expected[layer][row, 5 - len(ROWS[row])] for row in range(3)]
        torch.testing.assert_close(acts[layer], torch.stack(alone))


def test_without_a_mask_every_token_counts_and_masks_do_not_outlive_their_call():
    model, batch = llama(), batch_of(ROWS)
    ids = batch["input_ids"]
    with torch.no_grad(), capture(model, 1, "last") as acts:
        model(**batch)
        model(input_ids=ids)
        model.model(input_ids=ids)
    every = states(model, {"input_ids": ids}, 1, "none")[1]
    assert torch.equal(acts.steps(1)[1], every[:, -1])
    assert torch.equal(acts.steps(1)[2], every[:, -1])
    assert not torch.allclose(acts.steps(1)[0], every[:, -1])


def test_nan_in_padding_does_no_harm_and_half_means_do_not_overflow():
    model, batch = Toy().half(), batch_of(ROWS, "left")
    model.embed.weight.data[0] = torch.nan
    model.blocks[3].register_forward_hook(lambda module, args, out: out * 0 + 60000)
    acts = states(
        model, {"ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}, 3, "mean"
    )
    assert acts[3].dtype == torch.float16
    assert bool((acts[3] == 60000).all())
    tokens = states(
        model, {"ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}, 3, "none"
    )
    assert tokens[3].isnan().any()  # in padding, which check= passes over


# Runs


def test_runs_are_joined_along_the_batch_and_given_one_by_one():
    model = llama()
    with torch.no_grad(), capture(model, [1, 2], "mean") as acts:
        model(**batch_of(ROWS[:2]))
        model(**batch_of(ROWS[2:]))
    assert acts.runs == 2
    whole = states(model, batch_of(ROWS), [1, 2], "mean")
    for layer in (1, 2):
        assert [len(step) for step in acts.steps(layer)] == [2, 1]
        torch.testing.assert_close(acts[layer], whole[layer])
    acts.clear()
    assert acts.runs == 0
    with pytest.raises(RuntimeError, match="layer 1: no forward has run"):
        acts[1]


def test_generation_gives_the_prompt_and_then_each_token():
    model, batch = llama(), batch_of(ROWS, "left")
    with capture(model, 2, "last") as acts, capture(model, 2, "none") as tokens:
        out = model.generate(
            **batch, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0
        )
    assert acts.runs == 4
    assert [step.shape[1] for step in tokens.steps(2)] == [5, 1, 1, 1]
    mask = torch.cat([batch["attention_mask"], torch.ones(3, 4, dtype=torch.long)], 1)
    full = states(model, {"input_ids": out, "attention_mask": mask}, 2, "none")[2]
    for step in range(4):
        torch.testing.assert_close(acts.steps(2)[step], full[:, 4 + step], rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match=r"its 4 runs have different numbers of tokens.*steps\(\)"):
        tokens[2]


def test_stop_ends_the_forward_after_the_last_wanted_layer():
    model, batch = llama(), batch_of(ROWS)
    ran = []
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda m, a, o, index=index: ran.append(index))
    with torch.no_grad(), capture(model, [2, 0], "mean", stop=True) as acts:
        assert acts.run(**batch) is None
        assert acts.run(**batch) is None
    assert ran == [0, 1, 2, 0, 1, 2]
    assert acts.runs == 2
    torch.testing.assert_close(acts.steps(2)[1], states(model, batch, 2, "mean")[2])


def test_a_plain_call_ends_a_block_that_stops():
    model, batch, reached = llama(), batch_of(ROWS), []
    before = hooks(model)
    with capture(model, 1, stop=True) as acts:
        model(**batch)
        reached.append("behind the call")
    assert reached == []
    assert acts[1].shape == (3, WIDTH)
    assert hooks(model) == before


def test_of_nested_captures_the_inner_one_stops():
    model, batch = llama(), batch_of(ROWS)
    with capture(model, 1, "mean") as outer, capture(model, 1, "last", stop=True) as inner:
        inner.run(**batch)
    assert (outer.runs, inner.runs) == (1, 1)
    with capture(model, 1, stop=True) as outer:  # ends at the outer block, not at the inner
        with capture(model, 3, "mean") as inner:
            inner.run(**batch)
        pytest.fail("the block should have ended")
    assert (outer.runs, inner.runs) == (1, 0)


def test_run_gives_the_output_where_nothing_stops_and_needs_the_block():
    model, batch = llama(), batch_of(ROWS)
    captured = capture(model, 1)
    with pytest.raises(RuntimeError, match="run: the block has ended, or was not entered"):
        captured.run(**batch)
    with captured as acts:
        assert acts.run(**batch).logits.shape == (3, 5, VOCABULARY)
        with pytest.raises(RuntimeError, match="already open"):
            captured.__enter__()
    assert acts.runs == 1


def test_states_are_detached_copies():
    model, batch = Toy(), batch_of(ROWS)
    with capture(model, 1, "none") as acts:
        out = model(batch["input_ids"])
    assert out.requires_grad
    assert not acts[1].requires_grad
    kept = []
    model.blocks[1].register_forward_hook(lambda m, a, o: kept.append(o))
    with torch.no_grad(), capture(model, 1, "none") as acts:
        model(batch["input_ids"])
    kept[0].zero_()
    assert bool((acts[1] != 0).any())
