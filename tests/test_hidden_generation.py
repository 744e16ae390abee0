"""Writing while a model generates: the states of a forward over the result, in every row's stream."""

from __future__ import annotations

import threading

import pytest
import torch
from hidden_memory_support import Letters, memory, same, whole
from hidden_support import (  # noqa: F401 - real_model is the fixture smollm2
    LAYERS,
    VOCABULARY,
    batch_of,
    gpt2,
    hooks,
    llama,
    neox,
    real_model,
)
from torch.nn.functional import cosine_similarity, normalize
from transformers import LogitsProcessor

from rsm_torch.hidden import HiddenStateMemory, capture
from rsm_torch.hidden.generation import Block

EOS = 2
PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [21, 22, 23, 24]]
# What each row says; the second ends early, the third at once.
SCRIPT = [[30, 31, 32, 33, 34, 35, 36], [40, 41, EOS], [EOS]]


class Script(LogitsProcessor):
    """Makes rows say what is written."""

    def __init__(self, script, prompt):
        self.script, self.prompt = script, prompt

    def __call__(self, input_ids, scores):
        step, out = input_ids.shape[1] - self.prompt, torch.full_like(scores, -1e9)
        for row, tokens in enumerate(self.script):
            out[row, tokens[step] if step < len(tokens) else 3] = 0.0
        return out


def generate(model, script=SCRIPT, prompts=PROMPTS, **more):
    batch = batch_of(prompts, "left")
    arguments = {
        "max_new_tokens": max(map(len, script)), "do_sample": False, "pad_token_id": 0,
        "eos_token_id": EOS, "logits_processor": [Script(script, batch["input_ids"].shape[1])],
    }  # fmt: skip
    return model.generate(**batch, **(arguments | more))


def sequence(model, row, layer=2, script=SCRIPT):
    """States [T, D] of one forward over a row's prompt and all it said."""
    with torch.no_grad(), capture(model, layer, "none") as acts:
        model(input_ids=torch.tensor([PROMPTS[row] + script[row]]))
    return acts[layer][0]


def fed(row, script=SCRIPT):
    """How many generated tokens count: not the end, and not the last, which no forward reads."""
    tokens = script[row]
    return len(tokens) - 1


def expected(model, row, every, pool, prompt=True, layer=2):
    """The items of one row, as unit rows."""
    states, start = sequence(model, row, layer), len(PROMPTS[row])
    answer = states[start : start + fed(row)]
    parts = [states[:start]] if prompt else []
    step = every or max(1, len(answer))
    parts += [answer[at : at + step] for at in range(0, len(answer), step)]
    pick = {"mean": lambda x: x.mean(0), "last": lambda x: x[-1], "first": lambda x: x[0]}[pool]
    return normalize(torch.stack([pick(part) for part in parts]), dim=-1) if parts else None


@pytest.mark.parametrize("pool", ["mean", "last", "first"])
@pytest.mark.parametrize("every", [None, 1, 2, 3])
def test_items_are_the_states_of_a_forward_over_the_result(every, pool):
    model = llama()
    kept = memory(model=model, pool=pool)
    before = hooks(model)
    with kept.while_generating(streams=[2, 0, 1], every=every) as written:
        out = generate(model)
    assert hooks(model) == before
    assert out.shape == (3, 5 + 7)
    for row, stream in enumerate([2, 0, 1]):
        members = kept.memory.members(stream)
        wanted = expected(model, row, every, pool)
        assert members.vectors.shape == wanted.shape
        assert cosine_similarity(members.vectors, wanted, dim=-1).min() > 0.9999
        ids = written.ids[row]
        assert ids[ids >= 0].tolist() == members.ids.tolist()
        assert bool((ids[len(wanted) :] == -1).all())
    assert written.ids.shape == (3, 1 + {None: 1, 1: 6, 2: 3, 3: 2}[every])


@pytest.mark.parametrize("make", [gpt2, neox])
@pytest.mark.parametrize("use_cache", [True, False])
def test_other_models_with_a_cache_and_without(make, use_cache):
    model = make()
    kept = memory(model=model, layer=LAYERS - 1)
    with kept.while_generating(every=2, prompt=False):
        generate(model, use_cache=use_cache)
    for row in (0, 1):
        members = kept.memory.members(row)
        wanted = expected(model, row, 2, "mean", prompt=False, layer=LAYERS - 1)
        assert cosine_similarity(members.vectors, wanted, dim=-1).min() > 0.999
    assert kept.counts().members.tolist() == [3, 1, 0]


def test_the_state_after_the_final_norm():
    model = llama()
    kept = memory(model=model, layer="final")
    with kept.while_generating(every=3):
        generate(model)
    wanted = expected(model, 0, 3, "mean", layer="final")
    assert cosine_similarity(kept.memory.members(0).vectors, wanted, dim=-1).min() > 0.9999


def test_rows_write_the_same_alone_and_beside_others():
    model = llama()
    together, alone = memory(model=model), memory(model=model)
    with together.while_generating(every=2):
        generate(model)
    with alone.while_generating(streams=[1], every=2):
        generate(model, SCRIPT[1:2], PROMPTS[1:2])
    one, two = together.memory.members(1), alone.memory.members(1)
    torch.testing.assert_close(one.vectors, two.vectors, rtol=1e-4, atol=1e-5)


def test_what_was_written_is_there_while_the_model_goes_on():
    model = llama()
    kept = memory(model=model)
    counts = []
    model.model.register_forward_pre_hook(lambda *_: counts.append(kept.counts([0]).members[0]))
    with kept.while_generating(every=2):
        generate(model)
    assert [int(count) for count in counts] == [0, 1, 1, 2, 2, 3, 3]
    assert kept.counts().members.tolist() == [4, 2, 1]


def test_labels_and_texts_go_with_rows():
    model = llama()
    kept = memory(model=model, keep_texts=True)
    prompts = Letters()(["abc", "d", "ef"])["input_ids"]
    script = [[*row, EOS] for row in Letters()(["hello", "hi", "x"])["input_ids"]]
    with kept.while_generating(every=3, labels=["a", None, 3]) as written:
        generate(model, script, prompts)
    texts = [[kept.ready.texts.get(at) for at in row] for row in written.ids.tolist()]
    assert texts == [["abc", "he", "llo"], ["d", "hi", None], ["ef", "x", None]]
    found = kept.recall(["abc", "d", "ef"], streams=[0, 1, 2], top_k=1)
    assert found.texts == [["abc"], ["d"], ["ef"]]
    assert found.labels == [["a"], [None], [3]]


@pytest.mark.parametrize("pool", ["mean", "last", "first"])
def test_pooling_step_by_step_asks_for_no_value(pool):
    block = Block(pool)
    for _ in range(3):  # "meta" tensors have none, and raise if asked
        counted = torch.ones(3, 1, dtype=torch.bool, device="meta")
        block.add(torch.ones(3, 1, 8, device="meta"), counted, None)
    states, some = block.pooled()
    assert (states.device.type, some.device.type) == ("meta", "meta")
    assert (states.shape, some.shape) == ((3, 8), (3,))


def test_without_checks_the_result_is_the_same():
    model = llama()
    kept, plain = memory(model=model), memory(model=model)
    with kept.while_generating(every=2, check=False) as written:
        generate(model)
    with plain.while_generating(every=2):
        generate(model)
    torch.testing.assert_close(kept.memory.members(0).vectors, plain.memory.members(0).vectors)
    assert written.ids.tolist() == [[0, 3, 5, 6], [1, 4, -1, -1], [2, -1, -1, -1]]


def test_a_calibrated_memory_does_not_take_finished_rows_for_items():
    # Once the mean is removed, a row of zeros would be one like any other.
    model = llama()
    kept = memory(model=model, config=None)
    kept.calibrate(["ab", "cd ef", "x", "yz", "hello"])
    with kept.while_generating(every=2, check=False):
        generate(model)
    assert kept.counts().members.tolist() == [4, 2, 1]


def test_inference_mode_leaves_a_memory_that_can_be_used_outside():
    model = llama()
    kept = memory(model=model)
    with torch.inference_mode(), kept.while_generating(every=2):
        generate(model)
    kept.write("later")
    with kept.while_generating(every=2):
        generate(model)
    assert kept.counts().members.tolist() == [9, 4, 2]


# What is refused


def test_ends_can_be_named():
    model = llama()
    kept = memory(model=model)
    with kept.while_generating(every=10, ends=[31]):
        generate(model, eos_token_id=None)
    rows = sequence(model, 0)[5:6]
    got = kept.memory.members(0).vectors[1:]
    torch.testing.assert_close(got, normalize(rows), rtol=1e-4, atol=1e-5)


def test_beam_search_is_refused():
    model = llama()
    kept = memory(model=model)
    before, empty = hooks(model), whole(kept)
    with (
        pytest.raises(ValueError, match="generate: beam_search moves sequences between rows"),
        kept.while_generating(streams=[0, 1]),
    ):
        generate(model, SCRIPT[:1], PROMPTS[:1], num_beams=2, logits_processor=None)
    assert hooks(model) == before
    assert same(empty, whole(kept))


def test_an_assistant_model_is_refused():
    model = llama()
    kept = memory(model=model)
    with (
        pytest.raises(ValueError, match="generate: assisted_decoding moves sequences"),
        kept.while_generating(streams=[0]),
    ):
        generate(model, SCRIPT[:1], PROMPTS[:1], assistant_model=llama(1), logits_processor=None)


@pytest.mark.parametrize(
    ("streams", "message"),
    [
        ([0, 1], "streams: 2 for a forward of 3 rows; each row writes to a stream of its own"),
        ([0, 1, 1], "streams: 1 named more than once"),
        ([0, 1, 3], "streams: 3 out of range for 3 streams"),
    ],
)
def test_rows_and_streams_must_be_as_many(streams, message):
    model = llama()
    kept = memory(model=model)
    before, empty = hooks(model), whole(kept)
    with pytest.raises(ValueError, match=message), kept.while_generating(streams=streams):
        generate(model)
    assert hooks(model) == before
    assert same(empty, whole(kept))


def test_rows_that_change_on_the_way_are_refused():
    model = llama()
    kept = memory(model=model)

    def fewer_and_fewer():
        with kept.while_generating(), torch.no_grad():
            model(**batch_of(PROMPTS, "left"))
            model(input_ids=torch.tensor([[1], [2]]))

    with pytest.raises(ValueError, match="streams: 3 for a forward of 2 rows; rows must stay"):
        fewer_and_fewer()


def test_one_call_of_generate_in_a_block():
    model = llama()
    kept = memory(model=model)

    def twice():
        with kept.while_generating():
            generate(model)
            generate(model)

    with pytest.raises(ValueError, match="a block follows one call of generate"):
        twice()
    assert kept.counts().members.tolist() == [1, 1, 1]  # the first call's prompts
    with pytest.raises(ValueError, match="without prefill_chunk_size"), kept.while_generating():
        generate(model, prefill_chunk_size=2)
    block = kept.while_generating()
    with block:
        generate(model)
    with pytest.raises(RuntimeError, match="this block was used already"), block:
        pass


def test_a_block_in_which_nothing_runs_says_so():
    kept = memory()
    with (
        pytest.raises(RuntimeError, match="layer 2 did not run in the block"),
        kept.while_generating(),
    ):
        pass


def test_a_model_in_training_mode_is_refused():
    model = llama()
    kept = memory(model=model)
    model.train()
    with pytest.raises(ValueError, match="in training mode"):
        kept.while_generating()


def test_what_other_threads_run_is_not_written():
    model = llama()
    kept, expected = memory(model=model), memory(model=model)
    prompts = batch_of([[1, 9, 4], [1, 7, 5]])
    length = {"min_new_tokens": 4, "max_new_tokens": 4, "do_sample": False}
    with expected.while_generating(every=2) as written:
        model.generate(**prompts, **length)

    def elsewhere(*_):
        thread = threading.Thread(target=model, kwargs=batch_of([[3, 3]]))
        thread.start()
        thread.join()

    with kept.while_generating(every=2) as seen:
        elsewhere()
        handle = model.lm_head.register_forward_hook(
            lambda *_: (
                None if threading.current_thread() is not threading.main_thread() else elsewhere()
            )
        )
        model.generate(**prompts, **length)
    handle.remove()
    assert torch.equal(seen.ids, written.ids)
    assert same(whole(kept), whole(expected))


def test_arguments_are_checked_before_anything_runs():
    kept = memory()
    for more, message in (
        ({"every": 0}, "every: expected an int of at least 1"),
        ({"streams": [0, 1], "labels": ["a"]}, "labels: expected one for each of 2 rows, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            kept.while_generating(**more)
    with pytest.raises(RuntimeError, match="no threshold yet"):
        memory(config=None).while_generating()
    with (
        pytest.raises(ValueError, match="labels: expected one for each of 3 rows, got 2"),
        kept.while_generating(labels=["a", "b"]),
    ):
        generate(kept._encoder.model)


def test_an_exception_leaves_no_hooks_and_what_was_complete():
    model = llama()
    kept = memory(model=model, keep_texts=True)
    before = hooks(model)

    class Stop(Exception):
        pass

    calls = []

    def fail(module, args, output):
        calls.append(1)
        if len(calls) == 4:
            raise Stop

    handle = model.lm_head.register_forward_hook(fail)
    with pytest.raises(Stop), kept.while_generating(every=2) as written:
        generate(model)
    handle.remove()
    assert hooks(model) == before
    assert kept.counts().members.tolist() == [2, 2, 1]
    assert written.ids.tolist() == [[0, 3], [1, 4], [2, -1]]
    assert set(kept.ready.texts) == {0, 1, 2, 3, 4}


def test_states_that_are_not_finite_are_named_by_layer_and_row():
    model = llama()
    model.model.embed_tokens.weight.data[41] = torch.inf
    kept = memory(model=model)
    with (
        pytest.raises(ValueError, match=r"layer 2: states not finite in rows 1 \(NaN\)"),
        kept.while_generating(every=2),
    ):
        generate(model)
    assert kept.counts().members.tolist() == [1, 1, 1]
    assert VOCABULARY > 41


def test_a_real_model_writes_what_one_forward_gives(smollm2):
    model, tokenizer = smollm2
    prompts = ["Name a colour.", "Count from one to ten, please, and slowly."]
    ids = tokenizer(prompts)["input_ids"]
    kept = HiddenStateMemory(
        model, tokenizer, layer=20, streams=2, keep_texts=True,
        config=memory().memory.config.__class__(dim=576, tau=0.99),
    )  # fmt: skip
    batch = batch_of(ids, "left")
    with kept.while_generating(every=4) as written:
        out = model.generate(**batch, max_new_tokens=9, do_sample=False)
    assert written.ids.shape == (2, 3)
    for row in range(2):
        start = batch["input_ids"].shape[1]
        answer = out[row, start:]
        whole_row = torch.cat([torch.tensor(ids[row]), answer])
        with torch.no_grad(), capture(model, 20, "none") as acts:
            model(input_ids=whole_row[None])
        states, n = acts[20][0], len(ids[row])
        wanted = torch.stack(
            [states[:n].mean(0), states[n : n + 4].mean(0), states[n + 4 : n + 8].mean(0)]
        )
        got = kept.memory.members(row).vectors
        assert cosine_similarity(got, wanted, dim=-1).min() > 0.999
        texts = [kept.ready.texts[at] for at in written.ids[row].tolist()]
        assert texts == [prompts[row], tokenizer.decode(answer[:4]), tokenizer.decode(answer[4:8])]
