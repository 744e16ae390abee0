"""A memory of hidden states: the right states in the right streams, labelled, checked and saved."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from hidden_memory_support import (
    EXAMPLES,
    TEXTS,
    Letters,
    config,
    memory,
    pooled,
    same,
    whole,
)
from hidden_support import (  # noqa: F401 - real_model is the fixture smollm2
    LAYERS,
    VOCABULARY,
    WIDTH,
    Toy,
    batch_of,
    gpt2,
    hooks,
    llama,
    real_model,
)
from torch.nn.functional import cosine_similarity, normalize

from rsm_torch import Calibration
from rsm_torch.cache import RowCache
from rsm_torch.hidden import HiddenStateMemory

LABELS = ["physics", "law", "physics", "law", 7]
STREAMS = [0, 2, 0, 2, 2]


# Writing and recalling


@pytest.mark.parametrize("batch_size", [1, 2, 16])
@pytest.mark.parametrize("pool", ["mean", "last", "first"])
def test_each_text_is_written_to_its_stream_by_its_state(batch_size, pool):
    model = llama()
    kept = memory(model=model, batch_size=batch_size, pool=pool)
    before = hooks(model)
    written = kept.write(TEXTS, streams=STREAMS)
    assert hooks(model) == before
    assert written.ids.shape == written.atoms.shape == written.opened.shape == (5,)
    assert kept.counts().members.tolist() == [2, 0, 3]
    for stream, mine in ((0, [0, 2]), (2, [1, 3, 4])):
        members = kept.memory.members(stream)
        assert members.ids.tolist() == written.ids[mine].tolist()
        expected = torch.stack([pooled(model, TEXTS[at], pool=pool) for at in mine])
        torch.testing.assert_close(members.vectors, normalize(expected), rtol=1e-4, atol=1e-5)


def test_recall_finds_what_was_written_with_labels_and_texts():
    kept = memory(keep_texts=True)
    written = kept.write(TEXTS, streams=STREAMS, labels=LABELS)
    found = kept.recall(TEXTS, streams=STREAMS, top_k=2)
    assert found.ids.shape == found.scores.shape == found.atoms.shape == (5, 2)
    assert found.ids[:, 0].tolist() == written.ids.tolist()
    assert [row[0] for row in found.labels] == LABELS
    assert [row[0] for row in found.texts] == TEXTS
    torch.testing.assert_close(found.scores[:, 0], torch.ones(5))


def test_streams_never_see_each_other():
    kept = memory()
    kept.write(TEXTS[:3], streams=1, labels=["a", "b", "c"])
    found = kept.recall(TEXTS[0], streams=0, top_k=2)
    assert found.ids.tolist() == [[-1, -1]]
    assert found.scores.tolist() == [[-torch.inf, -torch.inf]]
    assert found.labels == [[None, None]]
    assert kept.recall(TEXTS[0], streams=1, top_k=5).ids.ge(0).sum() == 3


def test_several_queries_of_several_streams_answer_as_alone():
    kept = memory()
    kept.write(TEXTS, streams=STREAMS, labels=LABELS)
    queries, streams = ["law", "force", "court", "x"], [2, 0, 2, 2]
    together = kept.recall(queries, streams=streams, top_k=3)
    for row, (query, stream) in enumerate(zip(queries, streams, strict=True)):
        alone = kept.recall(query, streams=stream, top_k=3)
        assert together.ids[row].tolist() == alone.ids[0].tolist()
        torch.testing.assert_close(together.scores[row], alone.scores[0])
        assert together.labels[row] == alone.labels[0]


def test_token_ids_padded_on_either_side_are_the_same_as_texts():
    ids = Letters()(TEXTS)["input_ids"]
    by_text = memory()
    by_text.write(TEXTS, streams=STREAMS)
    for side in ("left", "right"):
        kept = memory(keep_texts=True)
        written = kept.write(**batch_of(ids, side), streams=STREAMS)
        for stream in (0, 2):
            one, two = kept.memory.members(stream), by_text.memory.members(stream)
            assert cosine_similarity(one.vectors, two.vectors, dim=-1).min() > 0.9999
        found = kept.recall(**batch_of(ids, side), streams=STREAMS, top_k=1)
        assert found.ids[:, 0].tolist() == written.ids.tolist()
        assert [row[0] for row in found.texts] == TEXTS


def test_left_padding_is_safe_where_positions_are_learned():
    from hidden_support import gpt2

    model = gpt2()
    ids = Letters()(TEXTS)["input_ids"]
    kept = memory(model=model)
    kept.write(**batch_of(ids, "left"))
    expected = normalize(torch.stack([pooled(model, text) for text in TEXTS]))
    torch.testing.assert_close(kept.memory.members(0).vectors, expected, rtol=1e-4, atol=1e-5)


def test_texts_are_cut_to_max_length():
    kept = memory(max_length=4)
    kept.write(["abcdef", "abc"], streams=0)
    kept.write(**batch_of(Letters()(["abcdef"])["input_ids"], "left"))
    rows = kept.memory.members(0).vectors
    torch.testing.assert_close(rows[1:], rows[:1].expand(2, -1), rtol=1e-4, atol=1e-5)


def test_what_stands_in_padding_need_be_no_token():
    plain, padded = memory(), memory()
    batch = batch_of([[1, 9, 4], [1, 7]], "left")
    plain.write(**batch)
    padded.write(
        input_ids=batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100),
        attention_mask=batch["attention_mask"],
    )
    assert same(whole(plain), whole(padded))


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_an_offloaded_model_is_remembered_where_it_runs(tmp_path, where):
    from accelerate import dispatch_model

    device_map = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map |= {f"model.layers.{i}": where for i in range(LAYERS)} | {"model.norm": "cpu"}
    spread = dispatch_model(
        llama(), device_map, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True
    )
    kept = memory(model=spread)
    assert kept.memory.device.type == "cpu"
    assert kept.origin.weights == memory().origin.weights
    kept.write(TEXTS)
    expected = normalize(torch.stack([pooled(llama(), text) for text in TEXTS]))
    torch.testing.assert_close(kept.memory.members(0).vectors, expected, rtol=1e-4, atol=1e-5)


def test_a_cache_spares_the_model(tmp_path):
    model = llama()
    cache = RowCache(tmp_path / "states.rows")
    memory(model=model, cache=cache).write(TEXTS)
    ran = []
    model.model.register_forward_hook(lambda *_: ran.append(1))
    kept = memory(model=model, cache=cache)
    kept.write(TEXTS)
    assert ran == []
    expected = normalize(torch.stack([pooled(model, text) for text in TEXTS]))
    torch.testing.assert_close(kept.memory.members(0).vectors, expected, rtol=1e-4, atol=1e-5)


def test_times_and_ids_go_with_their_texts():
    kept = memory()
    written = kept.write(TEXTS[:3], streams=[1, 0, 1], times=[5.0, 6.0, 7.0], ids=[10, 20, 30])
    assert written.ids.tolist() == [10, 20, 30]
    members = kept.memory.members(1)
    assert members.ids.tolist() == [10, 30]
    assert members.times.tolist() == [5.0, 7.0]
    kept.write("x", streams=1, labels=["late"])
    assert kept.recall(TEXTS[2], streams=1, top_k=1).ids.tolist() == [[30]]
    assert kept.recall("x", streams=1, top_k=1).labels == [["late"]]


def test_labels_are_strings_and_integers_that_differ():
    kept = memory()
    kept.write(TEXTS, labels=["1", 1, None, "1", 0])
    kept.write("unlabelled")
    found = kept.recall([*TEXTS, "unlabelled"], top_k=1)
    assert [row[0] for row in found.labels] == ["1", 1, None, "1", 0, None]
    with pytest.raises(TypeError, match="labels: expected strings, integers or None, got True"):
        kept.write("x", labels=[True])


def test_no_labels_cost_nothing():
    kept = memory()
    kept.write(TEXTS)
    assert "labels" not in kept.memory.flat()
    assert kept.recall(TEXTS[0], top_k=1).labels == [[None]]


# Calibration


def test_calibrate_sets_threshold_transform_and_defaults():
    model = llama()
    kept = memory(model=model, config=None)
    for call in (lambda: kept.write("x"), lambda: kept.recall("x"), kept.counts):
        with pytest.raises(RuntimeError, match=r"no threshold yet: call calibrate\(texts\)"):
            call()
    found = kept.calibrate(EXAMPLES)
    settings = kept.memory.config
    assert (settings.scope, settings.members, settings.storage, settings.rank) == (
        "nearest", "full", "bits1", 2,
    )  # fmt: skip
    assert (settings.max_atoms, settings.policy) == (32, "ward")
    assert settings.tau == found.tau
    assert (found.quantile, found.examples) == (1.0, len(EXAMPLES))
    x = torch.stack([pooled(model, text) for text in EXAMPLES])
    torch.testing.assert_close(found.mean, x.mean(0), rtol=1e-4, atol=1e-5)
    assert found.directions.shape == (2, WIDTH)
    unit = normalize(found.transform(x), dim=-1)
    closest = (unit @ unit.mT).fill_diagonal_(-1).max()
    assert found.tau == pytest.approx(float(closest), abs=1e-4)
    assert "layer 2, pre norm, mean of tokens" in found.embedder
    kept.write(TEXTS)
    row = found.transform(pooled(model, TEXTS[0])[None])
    hits = kept.memory.search(pooled(model, TEXTS[0])[None], [0], top_k=1)
    assert hits.ids.tolist() == [[0]]
    assert row.norm() > 0
    with pytest.raises(ValueError, match="stored already; calibrate before writing"):
        kept.calibrate(EXAMPLES)


def test_calibrate_draws_at_most_fifty_examples_and_runs_no_more():
    model = llama()
    seen = []
    model.model.register_forward_pre_hook(
        lambda m, a, k: seen.append(len(k["input_ids"])), with_kwargs=True
    )
    many = [f"{a}{b}" for a in "abcdefghij" for b in "klmnopqrst"]
    one, two = memory(model=model, config=None), memory(model=model, config=None)
    assert one.calibrate(many).examples == 50
    assert sum(seen) == 50
    assert two.calibrate(many).tau == one.memory.config.tau
    padded = batch_of(Letters()(many)["input_ids"], "left")
    by_ids = memory(model=model, config=None).calibrate(**padded)
    assert by_ids.tau == pytest.approx(one.memory.config.tau, abs=1e-4)


def test_calibrate_refuses_to_remove_all_there_is():
    kept = memory(config=None)
    with pytest.raises(ValueError, match=r"the mean and 2 directions of 3 .* give at least 4, or"):
        kept.calibrate(EXAMPLES[:3])
    assert kept._store is None
    assert kept.calibrate(EXAMPLES[:4]).examples == 4


def test_calibrate_keeps_a_given_config_but_for_its_threshold():
    kept = memory(config=config(tau=0.1, storage="float16"))
    found = kept.calibrate(EXAMPLES, quantile=0.5, remove_directions=0)
    assert kept.memory.config.storage == "float16"
    assert kept.memory.config.tau == found.tau != 0.1
    assert found.directions is None


def test_a_calibration_given_is_used():
    found = memory(config=None).calibrate(EXAMPLES)
    kept = memory(config=None, calibration=found)
    assert kept.memory.config.tau == found.tau
    assert kept.calibration is found
    both = memory(config=config(tau=0.5), calibration=found)
    assert both.memory.config.tau == 0.5
    with pytest.raises(ValueError, match=f"mean has width 5, not dim={WIDTH}"):
        memory(config=None, calibration=Calibration(0.5, 0.9, 9, mean=torch.zeros(5)))


# What fails changes nothing


def spoilt(model):
    """The model with a NaN where the token of "!" stands."""
    model.model.embed_tokens.weight.data[3 + ord("!") - 32] = torch.nan
    return model


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"texts": ["ok", "no!", "ok"]}, ValueError, r"layer 2: states not finite in rows 1 \(NaN"),
        ({"texts": ["a", ""]}, ValueError, "texts: no tokens in those at 1"),
        ({"texts": []}, ValueError, "texts: expected at least one text"),
        ({"texts": ["a"], "streams": [0, 1]}, ValueError, "streams: expected one for each of 1"),
        ({"texts": ["a"], "streams": 3}, ValueError, "streams: 3 out of range for 3 streams"),
        ({"texts": ["a"], "streams": "alice"}, TypeError, "streams: expected slots"),
        ({"texts": ["a"], "labels": ["x", "y"]}, ValueError, "labels: expected one for each of 1"),
        ({"texts": ["a"], "labels": "x"}, TypeError, "labels: expected a list"),
        ({"texts": ["a"], "ids": [0]}, ValueError, "ids: 0"),
        ({"texts": ["a"], "labels": ["new"], "ids": [0]}, ValueError, "ids: 0"),
        ({"texts": ["a"], "times": [1.0, 2.0]}, ValueError, "times: expected one for each of 1"),
        ({}, TypeError, "texts: expected texts or input_ids"),
        ({"input_ids": torch.ones(2, 3)}, TypeError, "input_ids: expected a tensor of integers"),
        (
            {"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.ones(2, 2)},
            ValueError,
            r"attention_mask: expected \(2, 3\) as input_ids, got \(2, 2\)",
        ),
        (
            {"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.eye(3)[[0, 0]] * 0},
            ValueError,
            "no token counts in rows 0, 1",
        ),
        ({"texts": 5}, TypeError, "texts: expected a list of strings, got 5"),
        ({"texts": ["a"], "times": ["noon"]}, TypeError, "times: expected numbers, got"),
        ({"input_ids": [[1, 2]], "streams": [0]}, TypeError, "input_ids: expected a tensor of int"),
        (
            {"input_ids": torch.ones(2, 3) > 0},
            TypeError,
            "input_ids: expected a tensor of integers",
        ),
        ({"input_ids": torch.ones(1, 65).long()}, ValueError, "rows 0 .* model's context of 64"),
        ({"input_ids": torch.tensor([[1], [VOCABULARY]])}, ValueError, "rows 1 outside 0 to 96"),
        ({"input_ids": torch.tensor([[1, -1]])}, ValueError, "rows 0 outside 0 to 96"),
        (
            {"input_ids": torch.ones(1, 2).long(), "attention_mask": [[1, 1]]},
            TypeError,
            "attention_mask: expected a tensor",
        ),
    ],
)
def test_a_write_that_fails_changes_nothing(arguments, error, message):
    kept = memory(model=spoilt(llama()), keep_texts=True)
    kept.write(["one", "two"], streams=[0, 1], labels=["a", None])
    before, hanging = whole(kept), hooks(kept._encoder.model)
    with pytest.raises(error, match=message):
        kept.write(**arguments)
    assert same(before, whole(kept))
    assert hooks(kept._encoder.model) == hanging
    assert kept.write("three", labels=["b"]).ids.tolist() == [2]


def test_recall_and_saving_change_nothing(tmp_path):
    kept = memory(keep_texts=True)
    kept.write(TEXTS, streams=STREAMS, labels=LABELS)
    before = whole(kept)
    kept.recall(TEXTS, streams=STREAMS)
    kept.nbytes()
    kept.save_pretrained(tmp_path)
    assert same(before, whole(kept))


def test_arguments_that_do_not_fit_the_model_are_refused():
    model = llama()
    for more, message in (
        ({"layer": 12}, "layers: 12 out of range: model.layers has 4 layers"),
        ({"pool": "none"}, "pool: expected one of mean, last, first, got 'none'"),
        ({"config": config(dim=8)}, f"config: its dim is 8, the model's states have {WIDTH}"),
        ({"batch_size": 0}, "batch_size: expected an int of at least 1"),
        ({"max_length": 0}, "max_length: expected an int of at least 1"),
        ({"streams": 0}, "streams: expected an int of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            memory(model=model, **more)
    with pytest.raises(TypeError, match="layer: expected one index or name"):
        memory(model=model, layer=[1, 2])
    with pytest.raises(ValueError, match="texts: there is no tokenizer"):
        HiddenStateMemory(model, None, layer=1, config=config()).write("x")
    with pytest.raises(ValueError, match=r"training mode, with dropout; call model.eval\(\)"):
        memory(model=llama().train()).write("x")


def test_a_module_of_any_model_can_be_remembered():
    kept = HiddenStateMemory(Toy(), None, layer="blocks.1.linear", config=config())
    assert (kept.origin.layer, kept.origin.norm) == ("blocks.1.linear", None)
    with pytest.raises(ValueError, match="config: the model does not say how wide"):
        HiddenStateMemory(Toy(), None, layer="last", calibration=Calibration(0.5, 0.9, 9))


# Upkeep


def test_forget_and_reset_drop_items_with_their_texts():
    kept = memory(keep_texts=True)
    written = kept.write(TEXTS, streams=STREAMS, labels=LABELS)
    kept.forget(written.ids[:1])
    assert kept.counts().members.tolist() == [1, 0, 3]
    assert kept.recall(TEXTS[0], streams=0, top_k=2).texts == [["gravity", None]]
    before = whole(kept)
    with pytest.raises(KeyError, match="99 not stored"):
        kept.forget([1, 99])
    assert same(before, whole(kept))
    kept.reset([2])
    assert kept.counts().members.tolist() == [1, 0, 0]
    assert kept.nbytes()["texts"] == len("gravity")
    assert kept.write("x", streams=2).ids.tolist() == [5]


def test_limits_drop_the_texts_of_what_they_drop():
    kept = memory(keep_texts=True, config=config(max_members=2))
    kept.write(["a", "b", "c", "d"])
    found = kept.recall("a", top_k=4)
    assert sorted(text for text in found.texts[0] if text) == ["c", "d"]
    assert kept.nbytes()["texts"] == 2


def test_a_label_that_is_no_utf8_is_counted_and_saved(tmp_path):
    kept = memory()
    before = kept.nbytes()["label_names"]
    kept.write("a", labels=["\ud800b"])
    assert kept.nbytes()["label_names"] == before + 2
    kept.save_pretrained(tmp_path)
    back = HiddenStateMemory.from_pretrained(tmp_path, llama(), Letters())
    assert back.recall("a", top_k=1).labels == [["\ud800b"]]


def test_nbytes_counts_labels_and_texts():
    kept = memory(keep_texts=True)
    kept.write(["äb", "c"], labels=["é", 12])
    size = kept.nbytes()
    assert (size["texts"], size["label_names"]) == (4, 4)
    assert size["total"] == kept.memory.nbytes()["reserved"] + 8


# Saving, and what the states are


def saved_memory(folder, **more):
    kept = memory(keep_texts=True, **more)
    kept.write(TEXTS, streams=STREAMS, labels=LABELS)
    kept.save_pretrained(folder)
    return kept


def test_a_saved_memory_comes_back_whole(tmp_path):
    model = llama()
    kept = memory(model=model, config=None, keep_texts=True, max_length=9)
    kept.calibrate(EXAMPLES)
    kept.write(TEXTS, streams=STREAMS, labels=LABELS)
    kept.save_pretrained(tmp_path / "memory")
    back = HiddenStateMemory.from_pretrained(tmp_path / "memory", llama(), Letters())
    assert back.origin == kept.origin
    one, two = (each.recall(TEXTS, streams=STREAMS, top_k=3) for each in (kept, back))
    assert torch.equal(one.ids, two.ids)
    torch.testing.assert_close(one.scores, two.scores)
    assert (one.labels, one.texts) == (two.labels, two.texts)
    assert back.write("new", labels=["law"]).ids.tolist() == kept.write("new").ids.tolist()
    assert back.recall("new", top_k=1).labels == [["law"]]


def test_saving_again_replaces_and_leaves_nothing_behind(tmp_path):
    kept = saved_memory(tmp_path)
    kept.write("more", labels=["new"])
    kept.save_pretrained(tmp_path)
    kept.save_pretrained(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    back = HiddenStateMemory.from_pretrained(tmp_path, llama(), Letters())
    assert back.counts().members.tolist() == [3, 0, 3]


def test_a_save_that_is_killed_leaves_the_old_one(tmp_path, monkeypatch):
    kept = saved_memory(tmp_path)
    kept.write("more")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("rsm_torch.files.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        kept.save_pretrained(tmp_path)
    monkeypatch.undo()
    back = HiddenStateMemory.from_pretrained(tmp_path, llama(), Letters())
    assert back.counts().members.tolist() == [2, 0, 3]


def test_damaged_files_are_refused(tmp_path):
    saved_memory(tmp_path)
    for file in [path for path in tmp_path.rglob("*") if path.is_file()]:
        good = file.read_bytes()
        for place in (len(good) // 3, len(good) // 2, len(good) - 2):
            bad = bytearray(good)
            bad[place] ^= 1
            for damaged in (bytes(bad), good[:place]):
                file.write_bytes(damaged)
                with pytest.raises(ValueError, match=file.name):
                    HiddenStateMemory.from_pretrained(tmp_path, llama(), Letters())
        file.write_bytes(good)
    about = json.loads((tmp_path / "hidden_states.json").read_text())
    (tmp_path / "hidden_states.json").write_text(json.dumps(about | {"format": 9}))
    with pytest.raises(ValueError, match="format version 9; this library reads 1 to 1"):
        HiddenStateMemory.from_pretrained(tmp_path, llama(), Letters())
    with pytest.raises(FileNotFoundError, match=r"no rsm_torch\.HiddenStateMemory saved here"):
        HiddenStateMemory.from_pretrained(tmp_path / "elsewhere", llama(), Letters())


def test_another_model_is_refused(tmp_path):
    saved_memory(tmp_path, layer=-1)
    load = HiddenStateMemory.from_pretrained
    other = llama(seed=1)
    with pytest.raises(ValueError, match=r"holds states of LlamaForCausalLM \(weights (\w+)\), got "
                       r"LlamaForCausalLM \(weights (?!\1)\w+\)"):  # fmt: skip
        load(tmp_path, other, Letters())
    assert load(tmp_path, other, Letters(), check_weights=False).origin.layer == LAYERS - 1


def test_a_final_state_is_no_layer_of_a_deeper_model(tmp_path):
    saved_memory(tmp_path, layer="final")
    deeper = llama(layers=LAYERS + 1)
    with pytest.raises(
        ValueError, match=r"norm: this memory holds states of norm 'post', .* 'pre'"
    ):
        HiddenStateMemory.from_pretrained(tmp_path, deeper, Letters(), check_weights=False)


def test_a_model_of_another_width_is_refused_at_once(tmp_path):
    saved_memory(tmp_path)
    wider = gpt2()
    config = copy.deepcopy(wider.config)
    config.n_embd = 2 * WIDTH
    with pytest.raises(
        ValueError, match=f"its dim is {WIDTH}, the model's states have {2 * WIDTH}"
    ):
        HiddenStateMemory.from_pretrained(
            tmp_path, type(wider)(config).eval(), Letters(), check_weights=False
        )


def test_saving_again_mends_what_was_damaged(tmp_path):
    kept = saved_memory(tmp_path)
    (file,) = tmp_path.glob("memory-*/*.safetensors")
    file.write_bytes(file.read_bytes()[:-3])
    for _ in range(2):
        kept.save_pretrained(tmp_path)
        assert len(list(tmp_path.iterdir())) == 2
        back = HiddenStateMemory.from_pretrained(tmp_path, llama(), Letters())
        assert same(whole(kept), whole(back))


def test_texts_of_removed_items_are_not_saved(tmp_path):
    kept = memory(keep_texts=True)
    ids = kept.write(["in public", "a secret"]).ids
    kept.memory.forget(ids[1:])  # not by way of `kept.forget`
    kept.save_pretrained(tmp_path)
    saved = (tmp_path / "hidden_states.json").read_text()
    assert "in public" in saved
    assert "secret" not in saved


def test_the_last_layer_before_and_after_the_final_norm_are_not_mixed():
    model = llama()
    before, after = memory(model=model, layer=-1), memory(model=model, layer=-1, norm="post")
    assert (before.origin.norm, after.origin.norm) == ("pre", "post")
    assert memory(model=model, layer="final").origin == after.origin
    x = torch.randn(3, 2, WIDTH)
    for kept, layer, norm, message in (
        (before, LAYERS, "post", "layer: this memory holds states of layer 3, .* of layer 4"),
        (before, LAYERS - 1, "post", "norm: this memory holds states of norm 'pre', .* 'post'"),
        (after, LAYERS - 1, "pre", "layer: this memory holds states of layer 4, .* of layer 3"),
        (after, "final", "pre", "norm: this memory holds states of norm 'post', .* 'pre'"),
    ):
        empty = whole(kept)
        with pytest.raises(ValueError, match=message):
            kept.write_states(x, layer=layer, norm=norm)
        with pytest.raises(ValueError, match=message):
            kept.recall_states(x[0], layer=layer, norm=norm)
        assert same(empty, whole(kept))
    after.write_states(x, layer="final", norm="post")
    assert after.counts().members.tolist() == [2, 2, 2]


def test_given_states_are_written_as_they_are():
    kept = memory()
    x = torch.randn(2, 3, WIDTH)
    kept.write_states(
        x, streams=[2, 0], lengths=[3, 1], labels=[["a", "b", "c"], ["d", None, None]],
        layer=2, norm="pre",
    )  # fmt: skip
    torch.testing.assert_close(kept.memory.members(2).vectors, normalize(x[0], dim=-1))
    found = kept.recall_states(x[[0, 1, 0], [2, 0, 1]], [2, 0, 2], layer=2, norm="pre", top_k=1)
    assert [row[0] for row in found.labels] == ["c", "d", "b"]
    x[0, 1, 5] = torch.nan
    x[1, 2] = torch.inf  # behind what counts
    before = whole(kept)
    with pytest.raises(ValueError, match=r"layer 2: states not finite in rows \[0, 1\] \(NaN\);"):
        kept.write_states(x, streams=[2, 0], lengths=[3, 1], layer=2, norm="pre")
    with pytest.raises(ValueError, match="labels: expected 2 lists of 3"):
        kept.write_states(
            torch.ones_like(x), streams=[2, 0], labels=[["a"], ["b"]], layer=2, norm="pre"
        )
    assert same(before, whole(kept))


def test_a_real_model_recalls_by_meaning(smollm2):
    model, tokenizer = smollm2
    physics = ["A force moves a mass.", "Energy is conserved in a collision.", "Light is a wave."]
    law = ["The court dismissed the claim.", "A contract needs consent.", "He sued for damages."]
    others = ["Cats sleep.", "Bread rises.", "It rains in spring.", "The bus is late again."]
    kept = HiddenStateMemory(model, tokenizer, layer=24, streams=2)
    kept.calibrate([*others, "The planet orbits a star.", "The lawyer wrote a letter."])
    kept.write(physics + law, streams=1, labels=["physics"] * 3 + ["law"] * 3)
    found = kept.recall(
        ["The judge ruled on the claim.", "A wave carries energy."], streams=1, top_k=1
    )
    assert [row[0] for row in found.labels] == ["law", "physics"]
    assert kept.origin.model.startswith("HuggingFaceTB/SmolLM2-135M-Instruct")


def test_a_memory_in_another_dtype_is_another_models(tmp_path, smollm2):
    model, tokenizer = smollm2
    kept = HiddenStateMemory(model, tokenizer, layer=3)
    kept.calibrate(["a", "b c", "d e f", "g"], remove_directions=0)
    kept.write("x")
    kept.save_pretrained(tmp_path)
    half = copy.deepcopy(model).to(torch.bfloat16)
    with pytest.raises(ValueError, match="load that model in the dtype it had"):
        HiddenStateMemory.from_pretrained(tmp_path, half, tokenizer)
    back = HiddenStateMemory.from_pretrained(tmp_path, half, tokenizer, check_weights=False)
    assert back.recall("x", top_k=1).ids.tolist() == [[0]]
