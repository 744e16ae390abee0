"""Serving engines' hidden states: read as they are written, or refused by name."""

from __future__ import annotations

import fcntl
import re
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hidden_memory_support import TEXTS, Letters, memory, pooled, same, whole
from hidden_support import LAYERS, WIDTH, llama, real_model  # noqa: F401 - the fixture smollm2
from paths import ROOT
from safetensors.torch import save_file
from torch.nn.functional import normalize

from rsm_torch.hidden import HiddenStateMemory, ServedStates, capture
from rsm_torch.integrations.engines import match_requests, read_sglang, read_vllm

IDS = [1, 40, 41, 42]
LAYER_IDS = [1, 3, LAYERS]


def vllm_file(path, ids=IDS, layer_ids=LAYER_IDS, model=None, **replaced):
    """What the connector writes: [tokens, layers, hidden] and the token ids, side by side."""
    model = model or llama()
    with torch.no_grad():
        states = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
        # transformers norms its last entry; the engine does not
        with capture(model, -1, "none") as last:
            model(input_ids=torch.tensor([ids]))
    by_id = {**dict(enumerate(states[:-1])), LAYERS: last[-1]}
    tensors = {
        "hidden_states": torch.stack([by_id[k][0] for k in layer_ids], 1),
        "token_ids": torch.tensor(ids),
    }
    tensors |= {name: value for name, value in replaced.items() if value is not None}
    for name in [name for name, value in replaced.items() if value is None]:
        del tensors[name]
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    return path


def vllm_output(path, prompt=IDS, answer=(50, 51), request_id="7"):
    return SimpleNamespace(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        outputs=[SimpleNamespace(token_ids=list(answer))],
        kv_transfer_params={"hidden_states_path": str(path)},
    )


# vLLM


def test_a_vllm_file_holds_the_layers_that_capture_counts(tmp_path):
    model = llama()
    file = vllm_file(tmp_path / "req-3.safetensors", layer_ids=[0, 1, 3, LAYERS], model=model)
    served = read_vllm(file, layer_ids=[0, 1, 3, LAYERS])
    assert served.request_id == "req-3"
    assert served.token_ids.tolist() == IDS
    assert (served.layers, served.norm) == (("embeddings", 0, 2, 3), "pre")
    assert served.states.shape == (4, 4, WIDTH)
    for layer in (0, 2, 3):
        for pool in ("mean", "last", "first"):
            with torch.no_grad(), capture(model, layer, pool) as acts:
                model(input_ids=torch.tensor([IDS]))
            torch.testing.assert_close(served.pool(layer, pool), acts[layer][0])
    embedded = model.model.embed_tokens(torch.tensor(IDS)).mean(0)
    torch.testing.assert_close(served.pool("embeddings"), embedded)
    with pytest.raises(KeyError, match="layer 1: request 'req-3' has layers embeddings, 0, 2, 3"):
        served.pool(1)
    with pytest.raises(ValueError, match="pool: expected one of mean, last, first"):
        served.pool(0, "none")


def test_an_output_names_its_file_and_is_checked_against_it(tmp_path):
    file = vllm_file(tmp_path / "7-0123abcd.safetensors")
    assert read_vllm(vllm_output(file), LAYER_IDS).request_id == "7"
    answer = {"id": "cmpl-9", "kv_transfer_params": {"hidden_states_path": str(file)}}
    assert read_vllm(answer, LAYER_IDS).request_id == "cmpl-9"
    # with include_output_tokens, all but the last generated token are there too
    longer = vllm_file(tmp_path / "8.safetensors", ids=[*IDS, 50, 51])
    served = read_vllm(vllm_output(longer, answer=(50, 51, 52)), LAYER_IDS)
    assert served.token_ids.tolist() == [*IDS, 50, 51]
    for output, message in (
        (vllm_output(file, prompt=[*IDS, 1], answer=()), "holds 4 tokens, expected 5 or 5"),
        (vllm_output(file, prompt=[1, 40, 9, 42]), "token 2 is 41, expected 9: another request's"),
        (vllm_output(longer, answer=(50,)), "holds 6 tokens, expected 4 or 4"),
    ):
        with pytest.raises(ValueError, match=message):
            read_vllm(output, LAYER_IDS)
    with pytest.raises(ValueError, match="holds 4 tokens, expected 3"):
        read_vllm(file, LAYER_IDS, tokens=[1, 40, 41])
    with pytest.raises(ValueError, match="name no hidden_states_path; start the engine with"):
        read_vllm(SimpleNamespace(request_id="1", kv_transfer_params=None), LAYER_IDS)


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"token_ids": torch.arange(6)}, "hidden_states of 4 tokens, token_ids of 6; run the engine"
         " with enable_prefix_caching=False"),
        ({"token_ids": None}, "no token_ids in it, but hidden_states"),
        ({"hidden_states": torch.zeros(4, WIDTH)}, r"torch.float32 \(4, 32\), expected floating"),
        ({"hidden_states": torch.zeros(4, 2, WIDTH)}, r"layer_ids: 3 \(1, 3, 4\), but .* 2 layers"),
    ],
)  # fmt: skip
def test_vllm_files_that_do_not_fit_are_refused(tmp_path, replaced, message):
    file = vllm_file(tmp_path / "1.safetensors", **replaced)
    with pytest.raises(ValueError, match=message):
        read_vllm(file, LAYER_IDS)


@pytest.mark.parametrize(
    ("layer_ids", "error", "message"),
    [
        (3, TypeError, "layer_ids: expected a list of integers, got 3"),
        ([1, 1.5, 4], TypeError, "layer_ids: expected an int of at least 0, got 1.5"),
        ([-1, 3, 4], ValueError, "layer_ids: expected an int of at least 0, got -1"),
    ],
    ids=str,
)
def test_layer_ids_are_vllms(tmp_path, layer_ids, error, message):
    with pytest.raises(error, match=message):
        read_vllm(vllm_file(tmp_path / "a.safetensors"), layer_ids)


def test_truncated_and_missing_files_raise(tmp_path):
    file = vllm_file(tmp_path / "1.safetensors")
    good = file.read_bytes()
    for length in (0, 7, 60, len(good) - 1):
        file.write_bytes(good[:length])
        with pytest.raises(ValueError, match=r"1\.safetensors: not a whole safetensors file"):
            read_vllm(file, LAYER_IDS)
    with pytest.raises(FileNotFoundError, match=r"2\.safetensors: no such file"):
        read_vllm(tmp_path / "2.safetensors", LAYER_IDS)


def test_a_file_is_waited_for_while_the_engine_holds_its_lock(tmp_path):
    file = tmp_path / "1.safetensors"
    with open(tmp_path / "1.safetensors.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = []
        reader = threading.Thread(target=lambda: found.append(read_vllm(file, LAYER_IDS)))
        reader.start()
        time.sleep(0.05)
        assert found == []
        vllm_file(file)
        fcntl.flock(lock, fcntl.LOCK_UN)
    reader.join(10)
    assert found[0].token_ids.tolist() == IDS


def test_states_that_are_not_finite_are_named_by_layer_and_row(tmp_path):
    states = torch.zeros(4, 3, WIDTH, dtype=torch.float16)
    states[2, 1, 0] = torch.nan
    states[3, 1, 5] = torch.inf
    served = read_vllm(vllm_file(tmp_path / "1.safetensors", hidden_states=states), LAYER_IDS)
    with pytest.raises(
        ValueError, match=r"request '1': layer 2: states not finite in rows 2 \(NaN\), 3 \(inf\)"
    ):
        served.pool(2)
    assert served.pool(0).abs().sum() == 0


# SGLang


def sglang_answer(model=None, prompt=IDS, answer=(50, 51, 52), kind=list, name="a1", **meta):
    """What `/generate` gives: a block for the prompt, and a state for each token fed after it."""
    model = model or llama()
    with torch.no_grad(), capture(model, "final", "none") as acts:
        model(input_ids=torch.tensor([[*prompt, *answer[:-1]]]))
    states = acts["final"][0]
    blocks = [states[: len(prompt)], *states[len(prompt) :]]
    form = {list: lambda x: x.tolist(), np.ndarray: lambda x: x.numpy(), torch.Tensor: lambda x: x}
    return {
        "text": "…",
        "output_ids": list(answer),
        "meta_info": {
            "id": name, "prompt_tokens": len(prompt), "completion_tokens": len(answer),
            "cached_tokens": 0, "hidden_states": [form[kind](block) for block in blocks], **meta,
        },
    }  # fmt: skip


@pytest.mark.parametrize("kind", [list, np.ndarray, torch.Tensor])
def test_an_sglang_answer_is_the_final_states_of_all_tokens_that_were_fed(kind):
    model = llama()
    served = read_sglang(sglang_answer(model, kind=kind), prompt_ids=IDS)
    assert (served.request_id, served.layers, served.norm) == ("a1", ("final",), "post")
    assert served.token_ids.tolist() == [*IDS, 50, 51]
    assert served.states.shape == (6, 1, WIDTH)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[*IDS, 50, 51]]), output_hidden_states=True)
    last = expected.hidden_states[-1][0]
    torch.testing.assert_close(served.states[:, 0], last)
    torch.testing.assert_close(served.pool("final", "mean"), last.mean(0))
    assert read_sglang(sglang_answer(model)).token_ids.tolist() == [-1] * 4 + [50, 51]


def test_several_answers_at_once_and_blocks_of_several_tokens():
    answers = [sglang_answer(name="a"), sglang_answer(name="b", prompt=[1, 9], answer=(60,))]
    one, two = read_sglang(answers, prompt_ids=[IDS, [1, 9]])
    assert (one.request_id, two.request_id) == ("a", "b")
    assert two.token_ids.tolist() == [1, 9]
    meta = answers[0]["meta_info"]
    prompt, *rest = meta["hidden_states"]
    meta["hidden_states"] = [prompt, rest]  # speculative decoding accepts several at once
    assert torch.equal(read_sglang(answers[0]).states, one.states)
    with pytest.raises(ValueError, match="prompt_ids: 1 for 2 answers"):
        read_sglang(answers, prompt_ids=[IDS])


def test_the_last_state_alone_is_one_token():
    whole_answer = sglang_answer()
    last = whole_answer["meta_info"]["hidden_states"][-1]
    served = read_sglang(sglang_answer(hidden_states=[last]), prompt_ids=IDS)
    assert served.token_ids.tolist() == [51]
    torch.testing.assert_close(served.pool("final", "last"), torch.tensor(last))


def short(answer):
    answer["meta_info"]["hidden_states"][0] = answer["meta_info"]["hidden_states"][0][1:]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (short, r"request 'a1': states of 5 tokens, expected 6 \(4 of the prompt and 2 generated\): "
         "run the engine with disable_radix_cache=True"),
        (lambda a: (short(a), a["meta_info"].update(cached_tokens=2)), "; 2 came from the prefix"),
        (lambda a: a["meta_info"]["hidden_states"].pop(), "states of 5 tokens, expected 6"),
        (lambda a: a["meta_info"].pop("hidden_states"), "no hidden_states in its meta_info; start"),
        (lambda a: a["output_ids"].append(1), "4 output_ids, but its meta_info counts 3 tokens"),
        (lambda a: a["meta_info"]["hidden_states"][1].pop(), "states of different widths, 31, 32"),
        (lambda a: a["meta_info"]["hidden_states"][0][2].pop(), "block 0 .* is not numbers"),
        (lambda a: a["meta_info"]["hidden_states"].__setitem__(1, "AAAA"), "block 1 .* not numbers"),
        (lambda a: a["meta_info"].pop("id"), "no request_id or id"),
        (lambda a: a["meta_info"].pop("prompt_tokens"), "'a1': .* no number of prompt_tokens"),
        (lambda a: a["meta_info"].update(completion_tokens=None), "no number of completion_tokens"),
    ],
)  # fmt: skip
def test_sglang_answers_that_do_not_fit_are_refused(spoil, message):
    answer = sglang_answer()
    spoil(answer)
    with pytest.raises(ValueError, match=message):
        read_sglang(answer)


def test_a_prefix_cache_leaves_the_last_state(tmp_path):
    whole = read_sglang(sglang_answer())
    answer = sglang_answer()
    short(answer)
    answer["meta_info"]["cached_tokens"] = 1
    part = read_sglang(answer, prompt_ids=IDS)
    assert part.partial
    assert part.token_ids.tolist() == [*IDS[1:], 50, 51]
    assert torch.equal(part.pool("final", "last"), whole.pool("final", "last"))
    file = vllm_file(tmp_path / "1.safetensors", token_ids=torch.arange(6))
    cut = read_vllm(file, LAYER_IDS, partial=True)
    assert cut.partial
    assert cut.token_ids.tolist() == [2, 3, 4, 5]
    assert torch.equal(cut.pool(3, "last"), cut.states[-1, -1])
    for one, layer in ((part, "final"), (cut, 3)):
        for pool in ("mean", "first"):
            with pytest.raises(ValueError, match=r"prefix cache.*'last'"):
                one.pool(layer, pool)
    assert not read_vllm(vllm_file(tmp_path / "2.safetensors"), LAYER_IDS, partial=True).partial


def test_states_of_sglang_may_be_one_array():
    blocks = sglang_answer(answer=(50,), kind=np.ndarray)["meta_info"]["hidden_states"]
    served = read_sglang(sglang_answer(answer=(50,), hidden_states=np.stack(blocks)))
    assert torch.equal(served.states, read_sglang(sglang_answer(answer=(50,))).states)


def test_prompt_ids_must_be_as_many_as_were_counted():
    with pytest.raises(ValueError, match="3 prompt_ids, but its meta_info counts 4 tokens"):
        read_sglang(sglang_answer(), prompt_ids=[1, 2, 3])


# Matching


def served_as(*names):
    return [
        ServedStates(name, torch.tensor([1]), torch.zeros(1, 1, 4), (0,), "pre") for name in names
    ]


def test_requests_are_matched_by_id_in_any_order():
    a, b, c = served_as("a", "b", "c")
    assert match_requests(["c", "a", "b"], [a, b, c]) == [c, a, b]
    outputs = [SimpleNamespace(request_id="b"), {"id": "c"}, {"meta_info": {"id": "a"}}]
    assert match_requests(outputs, [a, b, c]) == [b, c, a]


def test_the_suffix_of_vllms_file_names_is_no_part_of_an_id():
    one, two, three = served_as("r-1-0123abcd", "r-1-89ef4567", "r-10-00000000")
    assert match_requests(["r-10", "r-1"], [one, three]) == [three, one]
    assert match_requests(["r-1-89ef4567", "r-1"], [one, two]) == [two, one]
    with pytest.raises(ValueError, match="states: id r-1 more than once"):
        match_requests(["r-1"], [one, two])


@pytest.mark.parametrize(
    ("requests", "names", "message"),
    [
        (["a", "b"], ["a"], "states: none of request b"),
        (["a"], ["a", "b"], "states: of request b, which is not among the requests"),
        (["a", "a"], ["a"], "requests: id a more than once"),
        (["a"], ["a", "a"], "states: id a more than once"),
        ([SimpleNamespace()], ["a"], "no request_id or id in"),
    ],
)
def test_ids_that_are_missing_or_come_twice_raise(requests, names, message):
    with pytest.raises(ValueError, match=message):
        match_requests(requests, served_as(*names))


# Into a memory


def test_served_states_are_written_as_the_texts_would_be(tmp_path):
    model = llama()
    kept = memory(model=model, keep_texts=True)
    served = [
        read_vllm(vllm_file(tmp_path / f"{at}.safetensors", ids, model=model), LAYER_IDS)
        for at, ids in enumerate(Letters()(TEXTS)["input_ids"])
    ]
    written = kept.write_served(served, streams=[0, 1, 0, 1, 1], labels=list("abcde"))
    assert written.ids.shape == (5,)
    expected = normalize(torch.stack([pooled(model, TEXTS[at]) for at in (0, 2)]))
    torch.testing.assert_close(kept.memory.members(0).vectors, expected, rtol=1e-4, atol=1e-5)
    found = kept.recall(TEXTS, streams=[0, 1, 0, 1, 1], top_k=1)
    assert found.labels == [["a"], ["b"], ["c"], ["d"], ["e"]]
    assert found.texts == [[None]] * 5


def test_final_states_of_sglang_go_into_a_memory_of_final_states():
    model = llama()
    kept = HiddenStateMemory(
        model, Letters(), layer="final", config=memory().memory.config, pool="last"
    )
    kept.write_served([read_sglang(sglang_answer(model))])
    with torch.no_grad(), capture(model, "final", "last") as acts:
        model(input_ids=torch.tensor([[*IDS, 50, 51]]))
    torch.testing.assert_close(kept.memory.members(0).vectors, normalize(acts["final"]))


def test_served_states_of_another_layer_or_norm_are_refused(tmp_path):
    vllm = read_vllm(vllm_file(tmp_path / "1.safetensors"), LAYER_IDS)
    sglang = read_sglang(sglang_answer())
    for layer, served, message in (
        (1, vllm, r"of layer 1 \(pre norm\), request '1' has layers 0, 2, 3 \(pre norm\)"),
        (-1, sglang, r"of layer 3 \(pre norm\), request 'a1' has layers final \(post norm\)"),
        ("final", vllm, r"of layer 4 \(post norm\), request '1' has layers 0, 2, 3 \(pre norm\)"),
    ):
        kept = memory(layer=layer)
        before = whole(kept)
        with pytest.raises(ValueError, match=message):
            kept.write_served([served])
        assert same(before, whole(kept))
    with pytest.raises(ValueError, match="served: expected at least one"):
        memory().write_served([])


# The documentation


def test_the_page_on_hidden_memories_runs_as_written(tmp_path, monkeypatch, smollm2):
    model, tokenizer = smollm2
    text = (ROOT / "docs" / "hidden-memory.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rsm_torch.hidden.load_causal_lm", lambda spec: smollm2, raising=False)
    ids = tokenizer(["Water boils.", "A claim was dismissed."])["input_ids"]
    outputs = []
    for at, one in enumerate(ids):
        with torch.no_grad(), capture(model, [12, 24], "none") as acts:
            model(input_ids=torch.tensor([one]))
        tensors = {"hidden_states": torch.stack([acts[12][0], acts[24][0]], 1)}
        save_file({**tensors, "token_ids": torch.tensor(one)}, tmp_path / f"{at}.safetensors")
        outputs.append(vllm_output(tmp_path / f"{at}.safetensors", one, (), str(at)))
    names = {"outputs": outputs, "answer": sglang_answer(model)}
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(code, "hidden-memory.md", "exec"), names)
    assert names["found"].labels == [["law"], ["physics"]]
    assert names["again"].origin == names["memory"].origin
    assert names["written"].ids.shape[0] == 2
    assert names["memory"].counts().members.tolist()[:2] == [5, 3]
    assert names["final"].counts().members.tolist() == [1]
