"""States of many texts: the right ones in the right order, and computed once."""

from __future__ import annotations

import pytest
import torch
from hidden_support import LAYERS, WIDTH, hooks, llama, real_model  # noqa: F401
from torch.nn.functional import cosine_similarity

from rsm_torch.cache import RowCache
from rsm_torch.hidden import activations, capture

TEXTS = ["bb", "a", "dddd eeee", "ccc", "a"]


class Letters:
    """A tokenizer without a padding token: a token for each character, behind a first one."""

    def __call__(self, texts, truncation=False, max_length=None, verbose=True):
        ids = [[1, *(3 + ord(c) % 90 for c in text)] if text else [] for text in texts]
        return {"input_ids": [row[:max_length] if truncation else row for row in ids]}


def alone(model, text, layer, pool, max_length=None):
    ids = Letters()([text], truncation=max_length is not None, max_length=max_length)["input_ids"]
    with torch.no_grad(), capture(model, layer, pool) as acts:
        model(input_ids=torch.tensor(ids))
    return acts[layer][0]


class Calls:
    """Counts the texts a model has seen."""

    def __init__(self, model):
        self.rows = 0
        model.model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module, args, kwargs):
        self.rows += len(kwargs["input_ids"])


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_each_text_gets_its_states_in_its_place(batch_size):
    model = llama()
    layers, pools = [0, -1, "final"], ["mean", "last", "first"]
    before = hooks(model)
    got = activations(model, Letters(), TEXTS, layers, pools, batch_size=batch_size)
    assert hooks(model) == before
    assert set(got) == {(layer, pool) for layer in layers for pool in pools}
    for (layer, pool), rows in got.items():
        assert rows.shape == (5, WIDTH)
        for row, text in zip(rows, TEXTS, strict=True):
            torch.testing.assert_close(row, alone(model, text, layer, pool), rtol=1e-4, atol=1e-5)


def test_one_layer_and_pool_need_no_list():
    got = activations(llama(), Letters(), TEXTS, 2, "last")
    assert list(got) == [(2, "last")]


def test_a_real_model_agrees_with_its_texts_alone(smollm2):
    model, tokenizer = smollm2
    texts = ["A short one.", "A longer text, which says a little more than the short one did."]
    got = activations(model, tokenizer, texts, 10, "mean")[10, "mean"]
    for row, text in zip(got, texts, strict=True):
        one = activations(model, tokenizer, [text], 10, "mean")[10, "mean"][0]
        assert cosine_similarity(row, one, 0) > 0.999


def test_what_was_computed_is_not_computed_again(tmp_path):
    model = llama()
    calls = Calls(model)
    first = activations(model, Letters(), TEXTS, [1, 2], "mean", cache=tmp_path)
    assert calls.rows == 4  # "a" stands there twice
    again = activations(model, Letters(), TEXTS[::-1], [2], ["mean"], cache=tmp_path)
    assert calls.rows == 4
    assert torch.equal(again[2, "mean"], first[2, "mean"].flip(0))
    activations(model, Letters(), [*TEXTS, "new"], [1, 2], ["mean"], cache=tmp_path)
    assert calls.rows == 5
    activations(model, Letters(), TEXTS, [1], ["mean", "last"], cache=tmp_path)
    assert calls.rows == 9
    assert len(list(tmp_path.iterdir())) == 1


def test_other_weights_norms_and_lengths_are_other_rows(tmp_path):
    cache = RowCache(tmp_path / "rows")
    texts = ["abcdefg"]
    rows = [
        activations(llama(), Letters(), texts, [-1], ["mean"], cache=cache)[-1, "mean"],
        activations(llama(seed=1), Letters(), texts, [-1], ["mean"], cache=cache)[-1, "mean"],
        activations(llama(), Letters(), texts, ["final"], ["mean"], cache=cache)["final", "mean"],
        activations(llama(), Letters(), texts, [-1], ["mean"], max_length=3, cache=cache)[-1, "mean"],
    ]  # fmt: skip
    assert len(cache) == 4
    assert len({tuple(row[0].tolist()) for row in rows}) == 4
    expected = alone(llama(), texts[0], -1, "mean", max_length=3)
    torch.testing.assert_close(rows[3][0], expected, rtol=1e-4, atol=1e-5)
    # a text longer than the cut and its beginning are fed as the same tokens
    activations(llama(), Letters(), ["ab"], [-1], ["mean"], cache=cache)
    assert len(cache) == 4


def test_models_of_other_dtypes_share_a_folder(tmp_path):
    wide = activations(llama(), Letters(), TEXTS, 1, "mean", cache=tmp_path)[1, "mean"]
    half = activations(llama().bfloat16(), Letters(), TEXTS, 1, "mean", cache=tmp_path)[1, "mean"]
    assert (wide.dtype, half.dtype) == (torch.float32, torch.bfloat16)
    assert cosine_similarity(wide, half.float(), -1).min() > 0.99


def test_batches_before_a_failure_are_kept_and_texts_are_named(tmp_path):
    model = llama()
    broken = [True]

    def spoil(module, args, output):
        if broken[0] and output.shape[1] == 3:  # "bb"
            output = output.clone()
            output[:, -1] = torch.inf
        return output

    model.model.layers[1].register_forward_hook(spoil)
    before = hooks(model)
    with pytest.raises(ValueError, match=r"layer 1: states not finite in rows 0 \(inf\); torch"):
        activations(model, Letters(), TEXTS, 1, "mean", batch_size=1, cache=tmp_path)
    assert hooks(model) == before
    broken[0] = False
    calls = Calls(model)
    activations(model, Letters(), TEXTS, 1, "mean", cache=tmp_path)
    assert calls.rows == 2  # "bb" and "a": the longer ones went first


def test_progress_is_told_in_texts(tmp_path):
    told = []
    for _ in range(2):
        activations(
            llama(), Letters(), ["a", "b", "c"], 0, "last", batch_size=2, cache=tmp_path,
            progress=lambda *done: told.append(done),
        )  # fmt: skip
    assert told == [(0, 3), (2, 3), (3, 3), (3, 3)]


def test_an_offloaded_model_is_read_where_it_is(tmp_path):
    from accelerate import disk_offload

    expected = activations(llama(), Letters(), TEXTS, [0, -1], ["mean"])
    model = llama()
    disk_offload(model, str(tmp_path / "weights"), torch.device("cpu"))
    got = activations(model, Letters(), TEXTS, [0, -1], ["mean"])
    for pair, rows in expected.items():
        torch.testing.assert_close(got[pair], rows)


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"texts": "abc"}, TypeError, "texts: expected a list of strings"),
        ({"texts": []}, ValueError, "texts: expected at least one"),
        ({"texts": ["a", "", "b", ""]}, ValueError, "texts: no tokens in those at 1, 3"),
        ({"texts": ["a", "b" * 64]}, ValueError, r"at 1 are longer .* context of 64 .*max_length=64"),
        ({"pools": ["none"]}, ValueError, "pools: expected one of mean, last, first"),
        ({"pools": []}, ValueError, "pools: expected some of"),
        ({"layers": [LAYERS + 1]}, ValueError, "layers: 5 out of range"),
        ({"batch_size": 0}, ValueError, "batch_size: expected an int of at least 1, got 0"),
        ({"max_length": 0}, ValueError, "max_length: expected an int of at least 1, got 0"),
        ({"model": llama().train()}, ValueError, r"model: is in training mode"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_named(more, error, message):
    given = {"model": llama(), "tokenizer": Letters(), "texts": TEXTS, "layers": 0, "pools": "last"}
    with pytest.raises(error, match=message):
        activations(**(given | more))


def test_a_long_text_fits_once_it_is_cut():
    got = activations(llama(), Letters(), ["b" * 200], 0, "last", max_length=64)
    assert got[0, "last"].shape == (1, WIDTH)
