"""Readers: none, OpenAI-compatible servers and their failures, local models, prompts, caches."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from reader_support import (
    TEMPLATE,
    WINDOW,
    Reply,
    completion,
    stub_server,
    tiny_llama,
    tiny_tokenizer,
)

from rsm_torch.eval.datasets.episode import Question
from rsm_torch.eval.prompts import FORMS, prompts_hash, reader_prompt
from rsm_torch.eval.readers import (
    Answer,
    ChatReader,
    Price,
    Prompt,
    Reader,
    ReaderError,
    as_chat,
    load_prices,
    make_reader,
)
from rsm_torch.eval.readers.local import LocalReader, greedy
from rsm_torch.eval.readers.local_model import LocalModel, plain_text, prompt_ids
from rsm_torch.eval.readers.reply_cache import ReplyCache, content_key


def ask(text: str, limit: int | None = None) -> Prompt:
    return Prompt(({"role": "user", "content": text},), limit)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "test-key")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


# ---- none, and what a reader is made from


def test_none_answers_nothing():
    reader = make_reader("none")
    assert isinstance(reader, Reader)
    assert reader.answer([ask("a"), ask("b")]) == [Answer(None), Answer(None)]


@pytest.mark.parametrize("spec", ["", "gpt-4o", "None:x", "none:x", "openai", "openai:", "hf: "])
def test_an_unknown_reader_is_refused(spec):
    with pytest.raises(ValueError, match="reader: expected"):
        make_reader(spec)


@pytest.mark.parametrize("key", [None, "", "  "])
def test_a_missing_key_is_told_before_any_work(monkeypatch, key):
    monkeypatch.delenv("OPENAI_API_KEY") if key is None else monkeypatch.setenv(
        "OPENAI_API_KEY", key
    )
    with pytest.raises(ValueError, match=r"OPENAI_API_KEY is not set.*--reader none"):
        make_reader("openai:gpt")


@pytest.mark.parametrize(
    "bad", [{"concurrency": 0}, {"concurrency": 2000}, {"retries": -1}, {"timeout": 1e-9}, {"timeout": 0}, {"time_limit": -1.0}, {"max_tokens": 0}]
)  # fmt: skip
def test_numbers_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=f"^{next(iter(bad))}: expected"):
        make_reader("openai:gpt", **bad)


# ---- an OpenAI-compatible server


def remote(url: str, **options):
    return make_reader(
        "openai:stub", base_url=url, **{"timeout": 5.0, "time_limit": 10.0, **options}
    )


def test_answers_come_in_order_with_tokens_and_cost():
    def answer(body, number):
        text = body["messages"][-1]["content"]
        return Reply(completion(text.upper(), 100 * len(text), 7), wait=1.0 / len(text))

    with stub_server(answer) as stub:
        reader = remote(stub.url, prices={"stub": Price(2.0, 10.0), "other": Price(1, 1)})
        answers = reader.answer([ask("a"), ask("bbbb", 9), ask("cc")])
    assert [one.text for one in answers] == ["A", "BBBB", "CC"]
    assert [one.prompt_tokens for one in answers] == [100, 400, 200]
    assert answers[1].cost == pytest.approx((400 * 2 + 7 * 10) / 1e6)
    assert answers[0].seconds >= 1.0 > answers[1].seconds > 0  # each its own
    sent = {body["messages"][0]["content"]: body for body in stub.requests}
    assert sent["a"]["path"] == "/v1/chat/completions"
    assert sent["a"]["authorization"] == "Bearer test-key"
    assert (sent["a"]["model"], sent["a"]["temperature"]) == ("stub", 0.0)
    assert (sent["a"]["max_tokens"], sent["bbbb"]["max_tokens"]) == (256, 9)


def test_the_base_url_may_come_from_the_environment(monkeypatch):
    with stub_server(lambda body, n: Reply(completion("yes"))) as stub:
        monkeypatch.setenv("OPENAI_BASE_URL", stub.url)
        assert make_reader("openai:stub").answer([ask("a")])[0].text == "yes"


def test_concurrency_is_bounded_and_used():
    with stub_server(lambda body, n: Reply(completion("x"), wait=0.05)) as stub:
        remote(stub.url, concurrency=3).answer([ask(str(n)) for n in range(9)])
        assert (len(stub.requests), stub.most_at_once) == (9, 3)


def test_too_many_requests_is_tried_again():
    def answer(body, number):
        if number <= 2:
            return Reply({"error": {"message": "slow down"}}, 429, retry_after_ms="10")
        return Reply(completion("done"))

    with stub_server(answer) as stub:
        assert remote(stub.url, retries=2).answer([ask("a")])[0].text == "done"
        assert len(stub.requests) == 3


def test_what_goes_wrong_with_one_prompt_leaves_the_others_alone():
    replies = {
        "busy": Reply({"error": {"message": "slow down"}}, 429, retry_after_ms="1"),
        "long": Reply({"error": {"message": "context too long"}}, 400),
        "html": Reply(b"<html>gateway</html>"),
        "odd": Reply({"hello": 1}),
        "list": Reply([1, 2]),
        "empty": Reply({**completion("x"), "choices": []}),
        "null": Reply(completion(None)),
        "good": Reply(completion("fine")),
    }
    with stub_server(lambda body, n: replies[body["messages"][0]["content"]]) as stub:
        reader = remote(stub.url, retries=1)
        answers = dict(zip(replies, reader.answer([ask(name) for name in replies]), strict=True))
    assert answers.pop("good").text == "fine"
    assert all(one.text is None and one.error for one in answers.values())
    types = {name: one.error.type for name, one in answers.items()}
    assert types.pop("busy") == "RateLimitError"
    assert types.pop("long") == "BadRequestError"
    assert set(types.values()) == {"UnreadableReply"}
    assert "context too long" in answers["long"].error.message
    assert answers["long"].error.record("reader")["stage"] == "reader"
    assert all("\n" not in one.error.message for one in answers.values())


def test_a_slow_server_times_out():
    with stub_server(lambda body, n: Reply(completion("late"), wait=3)) as stub:
        answer = remote(stub.url, timeout=0.1, retries=0).answer([ask("a")])[0]
    assert (answer.text, answer.error.type) == (None, "APITimeoutError")
    assert 0.1 <= answer.seconds < 2


def test_the_time_limit_holds_for_all_tries_together():
    busy = Reply({"error": {"message": "busy"}}, 503, retry_after_ms="100")
    with stub_server(lambda body, n: busy) as stub:
        answer = remote(stub.url, retries=100, time_limit=0.4).answer([ask("a")])[0]
        assert answer.error.type == "TimeLimit"
        assert 2 <= len(stub.requests) <= 5


def test_a_server_that_is_not_there():
    answer = remote("http://127.0.0.1:9/v1", retries=0).answer([ask("a")])[0]
    assert answer.error.type == "APIConnectionError"
    assert answer.error.message.startswith("http://127.0.0.1:9/v1/: Connection error. (")


def test_what_is_no_url_is_refused_before_any_work(monkeypatch):
    with pytest.raises(ValueError, match=r"reader: expected a base URL .* got 'localhost:9/v1'"):
        remote("localhost:9/v1")
    monkeypatch.setenv("OPENAI_BASE_URL", "127.0.0.1:9")
    with pytest.raises(ValueError, match="OPENAI_BASE_URL"):
        make_reader("openai:stub")


def test_equal_prompts_are_asked_once_and_kept_on_disk(tmp_path):
    def made(url, **options):
        prices = {"stub": Price(1.0, 1.0)}
        return remote(url, cache=tmp_path / "kept", prices=prices, **options)

    with stub_server(lambda body, n: Reply(completion(f"answer {n}"))) as stub:
        first = made(stub.url).answer([ask("a"), ask("a"), ask("b")])
        assert len(stub.requests) == 2
        assert [(one.cached, one.cost) for one in first] == [
            (False, 12e-6), (True, 0.0), (False, 12e-6),
        ]  # fmt: skip
        again = made(stub.url).answer([ask("b"), ask("a")])
        assert len(stub.requests) == 2
        assert [one.text for one in again] == [first[2].text, first[0].text]
        assert all(one.cached and one.seconds == 0 and one.cost == 0 for one in again)
        # What an answer depends on is in the key.
        made(stub.url, temperature=1.0).answer([ask("a")])
        made(stub.url, params={"seed": 1}).answer([ask("a")])
        made(stub.url).answer([ask("a", 5)])
        made(stub.url + "/").answer([ask("a")])
        assert len(stub.requests) == 6


def test_a_lone_surrogate_is_sent_as_a_replacement_character():
    with stub_server(lambda body, n: Reply(completion(body["messages"][0]["content"]))) as stub:
        assert remote(stub.url).answer([ask("a\ud800b")])[0].text == "a\ufffdb"


def test_failures_are_not_kept(tmp_path):
    replies = [Reply({"error": {"message": "no"}}, 400), Reply(completion("yes"))]
    with stub_server(lambda body, n: replies[n - 1]) as stub:
        reader = remote(stub.url, cache=tmp_path)
        assert reader.answer([ask("a")])[0].error.type == "BadRequestError"
        assert reader.answer([ask("a")])[0].text == "yes"


def test_what_is_forgotten_is_asked_anew(tmp_path):
    with stub_server(lambda body, n: Reply(completion(f"answer {n}"))) as stub:
        reader = remote(stub.url, cache=tmp_path / "kept")
        reader.answer([ask("a"), ask("b")])
        reader.forget([ask("a"), ask("never asked")])
        again = remote(stub.url, cache=tmp_path / "kept").answer([ask("a"), ask("b")])
        assert [one.cached for one in again] == [False, True]
        assert again[0].text == "answer 3"
        assert len(ReplyCache(tmp_path / "kept" / "replies.jsonl")) == 2


def test_it_answers_inside_a_running_event_loop():
    async def notebook(url):
        return remote(url).answer([ask("a")])

    with stub_server(lambda body, n: Reply(completion("x"))) as stub:
        assert asyncio.run(notebook(stub.url))[0].text == "x"


def test_the_manifest_holds_no_key():
    about = remote("http://127.0.0.1:9/v1", params={"seed": 3}).describe()
    assert about["request"] == {"model": "stub", "max_tokens": 256, "seed": 3, "temperature": 0.0}
    assert "test-key" not in json.dumps(about)


def test_a_reader_is_a_chat_and_a_chat_a_reader():
    with stub_server(lambda body, n: Reply(completion(body["messages"][0]["role"]))) as stub:
        chat = as_chat(remote(stub.url))
        assert (
            chat([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]) == "system"
        )
    with pytest.raises(ReaderError, match="APIConnectionError"):
        as_chat(remote("http://127.0.0.1:9/v1", retries=0))([{"role": "user", "content": "b"}])
    again = ChatReader(lambda messages: messages[0]["content"] * 2).answer([ask("ab")])[0]
    assert (again.text, again.error) == ("abab", None)


# ---- prices and caches


def test_prices_come_from_a_file_of_the_user(tmp_path):
    file = tmp_path / "prices.json"
    file.write_text('{"m": {"prompt": 0.15, "completion": 0.6}}')
    assert load_prices(file)["m"].of(2_000_000, 1_000_000) == pytest.approx(0.9)
    assert load_prices(file)["m"].of(None, 3) is None
    for bad in (
        '{"m": 3}',
        '{"m": {"prompt": 1}}',
        '{"m": {"prompt": -1, "completion": 1}}',
        "[1]",
        "x",
    ):
        file.write_text(bad)
        with pytest.raises(ValueError, match=r"^prices: "):
            load_prices(file)


def test_a_cache_survives_a_line_cut_short(tmp_path):
    file = tmp_path / "deep" / "kept.jsonl"
    cache = ReplyCache(file)
    assert not file.parent.exists()
    for n in range(3):
        cache.put(f"k{n}", {"text": f"é\n{n}"})
    whole = file.read_bytes()
    for cut in range(len(whole) - 40, len(whole)):
        file.write_bytes(whole[:cut])
        left = ReplyCache(file)
        assert left.get("k1") == {"text": "é\n1"}
        left.put("k3", {"text": "new"})
        again = ReplyCache(file)
        assert (again.get("k3"), again.get("k1")) == ({"text": "new"}, {"text": "é\n1"})
        assert again.get("k2") in (None, {"text": "é\n2"})


def test_a_key_does_not_depend_on_the_order_of_fields():
    assert content_key({"a": 1, "b": [1, 2]}) == content_key({"b": [1, 2], "a": 1})
    assert content_key({"a": 1, "b": [1, 2]}) != content_key({"a": 1, "b": [2, 1]})


# ---- local models


@pytest.fixture
def local():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    return LocalModel(tiny_llama(), tokenizer, "tiny", "tiny-0")


def one_by_one(local: LocalModel, ids: list[int], limit: int) -> list[int]:
    """Greedy decoding, plainly: the whole text again for each token."""
    new: list[int] = []
    for _ in range(limit):
        with torch.no_grad():
            token = int(local.model(torch.tensor([ids + new])).logits[0, -1].argmax())
        if token == local.tokenizer.eos_token_id:
            break
        new.append(token)
    return new


PROMPTS = [ask("the answer"), ask("who is in the memory of the agent? " * 3), ask("x")]


def test_a_batch_gives_the_likeliest_tokens_of_each_prompt(local):
    ids = [prompt_ids(local, prompt) for prompt in PROMPTS]
    expected = [one_by_one(local, row, 12) for row in ids]
    assert greedy(local, ids, 12) == expected
    assert len(set(map(tuple, expected))) == 3
    answers = LocalReader(local, batch_size=2, max_tokens=12).answer(PROMPTS)
    shown = [local.tokenizer.decode(row, skip_special_tokens=True).strip() for row in expected]
    assert [one.text for one in answers] == shown
    assert [one.prompt_tokens for one in answers] == list(map(len, ids))
    assert [one.completion_tokens for one in answers] == list(map(len, expected))


def test_where_memory_is_short_a_batch_is_read_in_halves(local, monkeypatch):
    expected = LocalReader(local, max_tokens=6).answer([*PROMPTS, ask("y"), ask("zz")])
    longest, sizes = len(prompt_ids(local, PROMPTS[1])), []

    def short(local, prompts, limit):
        sizes.append(len(prompts))
        if len(prompts) > 2 or max(map(len, prompts)) == longest:  # which fits not even alone
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return greedy(local, prompts, limit)

    monkeypatch.setattr("rsm_torch.eval.readers.local.greedy", short)
    answers = LocalReader(local, max_tokens=6).answer([*PROMPTS, ask("y"), ask("zz")])
    assert sizes[:7] == [5, 2, 3, 1, 2, 1, 1]
    assert [one.text for one in answers] == [
        None if place == 1 else one.text for place, one in enumerate(expected)
    ]
    assert answers[1].error.type == "OutOfMemoryError"
    twice = LocalReader(local, max_tokens=6).answer([PROMPTS[1], PROMPTS[1], PROMPTS[0]])
    assert [one.error.type if one.error else None for one in twice] == [
        "OutOfMemoryError", "OutOfMemoryError", None,
    ]  # fmt: skip
    assert answers[1].prompt_tokens == expected[1].prompt_tokens


def test_answers_stop_at_the_end_token(local):
    ids = prompt_ids(local, PROMPTS[1])
    end = one_by_one(local, ids, 8)[3]
    local.model.generation_config.eos_token_id, before = (
        [0, end],
        local.model.generation_config.eos_token_id,
    )
    try:
        assert len(greedy(local, [ids], 8)[0]) <= 3
    finally:
        local.model.generation_config.eos_token_id = before


def test_a_prompt_too_long_for_the_window_is_an_error_not_a_cut(local):
    long = ask("memory " * WINDOW)
    tokens = len(prompt_ids(local, long))
    answers = LocalReader(local, max_tokens=4).answer([PROMPTS[0], long, PROMPTS[2]])
    assert answers[1].text is None
    assert answers[1].error.type == "ContextTooLong"
    assert f"{tokens} prompt tokens and 4" in answers[1].error.message
    assert answers[0].text is not None is not answers[2].text
    exactly = ask("z" * (WINDOW - 4 - len(prompt_ids(local, ask(""))) - 1), 4)
    assert len(prompt_ids(local, exactly)) + 4 <= WINDOW
    assert LocalReader(local).answer([exactly])[0].error is None


def test_a_chat_template_is_used_where_there_is_one(local):
    prompt = Prompt(({"role": "system", "content": "s"}, {"role": "user", "content": "u"}))
    assert (
        local.tokenizer.decode(prompt_ids(local, prompt))
        == plain_text(prompt.messages)
        == "s\n\nu\n\nAnswer:"
    )
    local.tokenizer.chat_template = TEMPLATE
    assert (
        local.tokenizer.decode(prompt_ids(local, prompt))
        == "<|system|>s<|end|><|user|>u<|end|><|assistant|>"
    )


def test_local_answers_are_kept_by_model_and_prompt(local, tmp_path, monkeypatch):
    file = tmp_path / "kept"
    first = LocalReader(local, cache=file, max_tokens=5).answer(PROMPTS)
    with monkeypatch.context() as patch:
        patch.setattr("rsm_torch.eval.readers.local.greedy", None)  # cannot be called
        again = LocalReader(local, cache=file, max_tokens=5).answer(PROMPTS[::-1])
    assert [one.text for one in again] == [one.text for one in first][::-1]
    assert all(one.cached for one in again)
    other = LocalModel(tiny_llama(1), local.tokenizer, "tiny", "tiny-1")
    assert not LocalReader(other, cache=file, max_tokens=5).answer(PROMPTS)[0].cached


def test_a_local_reader_from_a_folder(local, tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    reader = make_reader(f"hf:{tmp_path}", max_tokens=6, batch_size=2)
    ids = prompt_ids(local, PROMPTS[0])
    text = local.tokenizer.decode(one_by_one(local, ids, 6), skip_special_tokens=True).strip()
    assert reader.answer(PROMPTS)[0].text == text
    assert reader.describe()["reader"] == f"hf:{tmp_path}"


# ---- prompts


def question(**about) -> Question:
    return Question("Who {called}?", "s", "Ann", time=1_700_000_000.0, **about)


@pytest.mark.parametrize("dataset", FORMS)
def test_every_prompt_shows_context_and_question(dataset):
    prompt = reader_prompt(dataset, question(), "CONTEXT {0} {task}")
    text = prompt.messages[-1]["content"]
    assert "CONTEXT {0} {task}" in text
    assert "Who {called}?" in text
    assert "Ann" not in str(prompt.messages)
    assert "(nothing)" in reader_prompt(dataset, question(), "").messages[-1]["content"]


def test_prompts_show_what_their_dataset_knows():
    about = {"task": "win the game", "task_type": "crafter"}
    prompt = reader_prompt("ama-bench", question(), "c", about)
    assert "(crafter): win the game" in prompt.messages[-1]["content"]
    assert (
        "Tuesday 14 November 2023"
        in reader_prompt("longmemeval", question(), "c").messages[-1]["content"]
    )
    assert (
        "No information available"
        in reader_prompt("locomo", question(), "c").messages[0]["content"]
    )
    own, plain = (reader_prompt(name, question(), "c") for name in ("my-chats", "plain"))
    assert own == plain  # of one's own data


def test_the_hash_follows_the_prompts(monkeypatch):
    before = prompts_hash()
    assert prompts_hash() == before
    monkeypatch.setattr("rsm_torch.eval.prompts.FORMS", {**FORMS, "plain": FORMS["mmlu"]})
    assert prompts_hash() != before


def test_readings_of_a_dataset_share_its_prompt():
    about = {"context": "c"}
    for name, of in (("beam-100k", "beam"), ("locomo_plus_grouped", "locomo_plus")):
        assert reader_prompt(name, question(), **about) == reader_prompt(of, question(), **about)
