"""A-MEM, MemoryBank and MemGPT on a scripted model: their loops, their limits, their failures."""

from __future__ import annotations

import json
import math

import pytest
import torch

from rsm_torch.baselines.agentic.a_mem import EVOLVE, NOTE, AMem, make_a_mem
from rsm_torch.baselines.agentic.asking import Asker, Unreadable, json_object, prompt, string_field
from rsm_torch.baselines.agentic.days import Kept
from rsm_torch.baselines.agentic.functions import Functions, function_call
from rsm_torch.baselines.agentic.mem_gpt import PRESSURE, SUMMARISE, MemGPT, make_mem_gpt
from rsm_torch.baselines.agentic.memory_bank import (
    EVENTS,
    GLOBAL_EVENTS,
    PORTRAIT,
    MemoryBank,
    make_memory_bank,
)
from rsm_torch.baselines.agentic.mind import Mind
from rsm_torch.baselines.protocol import Chunk, Memory, Query
from rsm_torch.baselines.settings import Settings

WORDS = ["tea", "coffee", "dog", "walk", "rain", "paris", "flight", "boss"]
DAY = 86_400.0
FIRST_DAY = 1_700_006_400.0  # 2023-11-15 00:00 UTC


def embed(texts: list[str]) -> torch.Tensor:
    """Counts of a few words, and a constant so that no row is zero."""
    return torch.tensor([[*(t.lower().count(w) for w in WORDS), 0.1] for t in texts]).float()


def words(text: str) -> int:
    return len(text.split())


def chunk(name: str, text: str, **about) -> Chunk:
    return Chunk(name, text, embed([text])[0], **about)


def query(text: str, stream: str = "s") -> Query:
    return Query(text, stream, embed([text])[0])


class Script:
    """A model that answers by a function of (system, user) and keeps what it was asked."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def __call__(self, messages):
        self.asked.append(messages)
        return self.answer(messages[0]["content"], messages[-1]["content"])


def note(keywords=(), context="", tags=()):
    return json.dumps({"keywords": list(keywords), "context": context, "tags": list(tags)})


NOTHING = json.dumps({"links": [], "tags": [], "updates": []})


# ---- asking


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1}', {"a": 1}),
        ('Sure!\n```json\n{"a": {"b": "}"}}\n``` done {"c": 2}', {"a": {"b": "}"}}),
        ('set {x} then {"a": "two\nlines"}', {"a": "two\nlines"}),
    ],
)
def test_json_is_found_whatever_stands_around_it(text, found):
    assert json_object(text) == found


@pytest.mark.parametrize("text", ["", "no", "{", '{"a": ', "[1, 2]", '{"a":' * 1500])
def test_what_is_no_json_is_unreadable(text):
    with pytest.raises(Unreadable):
        json_object(text)


def test_an_unreadable_answer_is_asked_once_more_with_the_reason():
    chat = Script(lambda system, user: '{"x": "ok"}' if "could not be read" in user else "hm")
    asker = Asker(chat)
    said = asker.ask(prompt("s", "u"), lambda r: string_field(r, "x"), lambda: "fallback")
    assert (said, asker.failures, len(chat.asked)) == ("ok", 0, 2)
    assert [m["role"] for m in chat.asked[1]] == ["system", "user", "assistant", "user"]
    assert "no JSON object" in chat.asked[1][-1]["content"]


def test_two_unreadable_answers_take_the_fallback_and_count():
    chat = Script(lambda system, user: '{"x": 3}')
    asker = Asker(chat)
    assert asker.ask(prompt("s", "u"), lambda r: string_field(r, "x"), lambda: "f") == "f"
    assert (asker.failures, len(chat.asked)) == (1, 2)


# ---- all three

MAKERS = {"a-mem": make_a_mem, "memory-bank": make_memory_bank, "mem-gpt": make_mem_gpt}


def settings(chat, **more):
    given = {"dim": len(WORDS) + 1, "tokenizer": words, "tau": 0.8, "chat": chat, "embed": embed}
    return Settings(**{**given, **more})


def plain_model(system: str, user: str) -> str:
    """Good enough for every memory: notes without links, summaries, and no further calls."""
    if system == NOTE:
        return note(["k"], "c", ["t"])
    if system == EVOLVE:
        return NOTHING
    if "function call" in system:
        return json.dumps({"function": "send_message", "arguments": {"message": "."}})
    return "A summary."


@pytest.fixture(params=MAKERS)
def memory(request):
    return MAKERS[request.param](settings(Script(plain_model)))


def test_they_are_memories_under_test(memory):
    assert isinstance(memory, Memory)
    assert memory.name in MAKERS
    assert memory.context(query("tea"), 100).text == ""
    assert memory.counts("s") == (0, 0)
    memory.observe({"s": [chunk("1", "tea at noon"), chunk("2", "the dog barks")], "s2": []})
    context = memory.context(query("tea"), 100)
    assert "tea at noon" in context.text
    assert set(context.ids) == {"1", "2"}
    assert memory.counts("s")[0] == 2
    assert memory.context(query("tea", "s2"), 100).ids == ()
    assert memory.failures == 0


def test_contexts_keep_to_the_budget_and_repeat(memory):
    memory.observe({"s": [chunk(str(n), f"tea {n} " + "word " * n) for n in range(12)]})
    for budget in (1, 7, 20, 60, 200):
        context = memory.context(query("tea"), budget)
        assert context == memory.context(query("tea"), budget)
        assert context.tokens == words(context.text) <= budget


def test_streams_never_see_each_other(memory):
    memory.observe({"s": [chunk("1", "tea alice")], "s1": [chunk("1", "tea bob")]})
    assert "bob" not in memory.context(query("tea"), 200).text
    assert "alice" not in memory.context(query("tea", "s1"), 200).text


def test_a_model_that_raises_leaves_the_memory_as_it_was(memory):
    memory.observe({"s": [chunk("1", "tea", session=1)]})
    before = memory.counts("s"), memory.nbytes(), memory.context(query("tea"), 50)
    asker = memory._asker

    def broken(messages):
        raise ConnectionError("down")

    good, asker.chat = asker.chat, broken
    with pytest.raises(ConnectionError):
        memory.observe({"s": [chunk("2", "dog", session=2)], "new": [chunk("1", "x", session=1)]})
    asker.chat = good
    assert (memory.counts("s"), memory.nbytes(), memory.context(query("tea"), 50)) == before
    assert memory.counts("new") == (0, 0)


@pytest.mark.parametrize("name", MAKERS)
def test_without_a_model_or_an_embedder_the_error_says_what_to_give(name):
    with pytest.raises(ValueError, match=r"settings\.chat.*language model.*--chat"):
        MAKERS[name](settings(None))
    with pytest.raises(ValueError, match=r"settings\.embed.*\[n, D\]"):
        MAKERS[name](settings(Script(plain_model), embed=None))


# ---- A-MEM


def test_a_mem_writes_links_and_evolves():
    def model(system, user):
        if system == NOTE:
            return note(["drink"], f"about {user.split()[-1]}", ["food"])
        assert "New note:\ncoffee too" in user
        assert "[1] tea" in user
        update = {"note": 1, "context": "a rainy tea", "tags": ["drinks", "rain"]}
        return json.dumps({"links": [1], "tags": ["hot"], "updates": [update]})

    chat = Script(model)
    memory = AMem(chat, embed, words)
    memory.observe({"s": [chunk("1", "tea now"), chunk("2", "coffee too")]})
    old, new = memory.notes("s")
    assert (old.context, old.tags, old.keywords) == ("a rainy tea", ("drinks", "rain"), ("drink",))
    assert (old.links, new.links) == ({1}, {0})
    assert (new.tags, new.context) == (("hot",), "about too")
    assert len(chat.asked) == 3  # the first note has no neighbours to ask about
    # An evolved note is embedded with what was changed: its two new words "rain" count.
    expected = embed(["tea now\nContext: a rainy tea\nKeywords: drink\nTags: drinks, rain"])[0]
    assert torch.allclose(memory._webs["s"].rows[0], expected / expected.norm())
    assert memory.nbytes() == 2 * 9 * 4 + 2 * 8


def test_a_mem_brings_linked_notes_along():
    links = {"flight": [1]}

    def model(system, user):
        if system == NOTE:
            return note()
        first = user.split("\n")[1].split()[0]
        shown = [part.split("] ")[1].split()[0] for part in user.split("\n\n")[1:]]
        wanted = [n for n, word in enumerate(shown, 1) if word == "boss" and first in links]
        return json.dumps({"links": wanted, "updates": []})

    memory = AMem(Script(model), embed, words, top_k=1)
    memory.observe(
        {"s": [chunk("1", "boss says no"), chunk("2", "dog walk"), chunk("3", "flight")]}
    )
    assert memory.context(query("flight"), 100).ids == ("3", "1")
    assert memory.context(query("walk"), 100).ids == ("2",)


def test_a_mem_counts_what_it_cannot_read_and_files_the_note_bare():
    def model(system, user):
        return "Keywords: tea" if system == NOTE else json.dumps({"links": [7], "updates": []})

    memory = AMem(Script(model), embed, words)
    memory.observe({"s": [chunk("1", "tea"), chunk("2", "tea again")]})
    assert [one.text() for one in memory.notes("s")] == ["tea", "tea again"]
    assert memory.failures == 3  # two notes, one decision
    memory.observe({"s": [chunk("3", "tea")], "other": [chunk("1", "dog")]})
    assert (memory.write_fallbacks("s"), memory.write_fallbacks("other")) == (5, 1)
    assert memory.write_fallbacks("none") == 0


# ---- MemoryBank


def test_memory_bank_sums_up_days_and_merges_them():
    def model(system, user):
        if system == EVENTS:
            return f"events[{user.count(chr(10)) + 1}]"
        if system in (GLOBAL_EVENTS, PORTRAIT):
            return f"merged {user.count('2023-')}"
        return "insight"

    chat = Script(model)
    bank = MemoryBank(chat, embed, words)
    days = [chunk(str(n), f"tea {n}", time=FIRST_DAY + n * DAY / 2) for n in range(5)]
    bank.observe({"s": days})  # days of 2, 2 and 1 chunks; the last one has not ended
    held = bank.bank("s")
    assert [day.events for day in held.days] == ["events[2]", "events[2]", ""]
    assert (held.summary, held.portrait) == ("merged 2", "merged 2")
    assert len(chat.asked) == 2 * 4
    text = bank.context(query("tea"), 200).text
    assert text.startswith("[user portrait] merged 2\n[summary of all days] merged 2\n")
    assert "[summary of 2023-11-15] events[2]" in text
    assert bank.counts("s") == (len(held.kept), 3)


def test_days_are_dates_else_sessions_else_parts():
    bank = MemoryBank(Script(plain_model), embed, words, chunks_per_day=2)
    bank.observe({"parts": [chunk(str(n), "tea") for n in range(5)]})
    bank.observe({"sessions": [chunk(str(n), "tea", session=n // 3) for n in range(5)]})
    assert [d.name for d in bank.bank("parts").days] == ["part 1", "part 2", "part 3"]
    assert [d.name for d in bank.bank("sessions").days] == ["session 0", "session 1"]


def test_the_forgetting_curve_is_that_of_ebbinghaus():
    bank = MemoryBank(Script(plain_model), embed, words, days_per_strength=5.0)
    kept = Kept(chunk("1", "tea"), day=10.0, strength=3)
    assert bank.retention(kept, 10.0) == 1.0
    assert bank.retention(kept, 25.0) == pytest.approx(math.exp(-1))
    # The share that is kept after one fading time is 1/e, and the seed decides which.
    kept_by = []
    for seed in (1, 1, 2):
        bank = MemoryBank(Script(plain_model), embed, words, seed)
        bank.observe({"s": [chunk(str(n), "tea", time=FIRST_DAY) for n in range(400)]})
        bank.observe({"s": [chunk("new", "tea", time=FIRST_DAY + 5 * DAY)]})
        kept_by.append(set(bank.bank("s").kept) - {"new"})
    assert kept_by[0] == kept_by[1] != kept_by[2]
    assert len(kept_by[0]) / 400 == pytest.approx(math.exp(-1), abs=0.08)


def test_recall_strengthens_at_the_next_write_and_once():
    bank = MemoryBank(Script(plain_model), embed, words, top_k=1)
    bank.observe({"s": [chunk("1", "tea", time=FIRST_DAY), chunk("2", "dog", time=FIRST_DAY)]})
    first = bank.context(query("tea"), 100)
    assert bank.context(query("tea"), 40).ids == first.ids == ("1",)
    assert {k: v.strength for k, v in bank.bank("s").kept.items()} == {"1": 1, "2": 1}
    bank.observe({"s": [chunk("3", "rain", time=FIRST_DAY)]})
    assert {k: v.strength for k, v in bank.bank("s").kept.items()} == {"1": 2, "2": 1, "3": 1}
    bank.observe({"s": [chunk("4", "rain", time=FIRST_DAY)]})
    assert bank.bank("s").kept["1"].strength == 2


def test_an_empty_summary_is_asked_again_and_then_the_day_stands_for_it():
    bank = MemoryBank(Script(lambda system, user: " "), embed, words)
    bank.observe({"s": [chunk("1", "tea", session=1), chunk("2", "dog", session=2)]})
    assert bank.bank("s").days[0].events == "[session 1] tea"
    assert bank.failures == bank.write_fallbacks("s") == 4


# ---- MemGPT


def call(name, heartbeat=False, /, **arguments):
    return json.dumps({"function": name, "arguments": arguments, "request_heartbeat": heartbeat})


DONE = call("send_message", message="ok")


def scripted(*answers):
    """A model that gives these answers in turn and then only waits."""
    left = list(answers)
    return Script(lambda system, user: left.pop(0) if left else DONE)


def test_mem_gpt_edits_core_and_archival_memory_and_beats():
    chat = scripted(
        call("core_memory_append", True, name="human", content="Likes tea."),
        call("archival_memory_insert", True, content="The flight to paris is at nine."),
        call("core_memory_replace", name="human", old_content="tea", new_content="coffee"),
    )
    memory = MemGPT(chat, embed, words)
    memory.observe({"s": [chunk("1", "I like tea")]})
    mind = memory.mind("s")
    assert mind.core == {"persona": "", "human": "Likes coffee."}
    assert [p.text for p in mind.archive] == ["The flight to paris is at nine."]
    assert memory.counts("s") == (1, 1)
    assert memory.nbytes() == 9 * 4
    assert len(chat.asked) == 3  # no heartbeat after the last
    assert "Likes tea." in chat.asked[1][0]["content"]  # the edit is in view at once
    assert [m["role"] for m in chat.asked[2]] == ["system", "user", "assistant", "user", "assistant", "user"]  # fmt: skip


def test_a_failed_call_may_try_again_and_heartbeats_are_bounded():
    chat = scripted(call("core_memory_replace", name="human", old_content="x", new_content="y"))
    memory = MemGPT(chat, embed, words)
    memory.observe({"s": [chunk("1", "tea")]})
    assert len(chat.asked) == 2
    assert "Failed: core memory human does not hold" in chat.asked[1][-1]["content"]

    forever = Script(lambda system, user: call("conversation_search", True, query="tea"))
    memory = MemGPT(forever, embed, words, max_steps=3)
    memory.observe({"s": [chunk("1", "tea")]})
    assert len(forever.asked) == 3


def test_searches_are_paged():
    mind, functions = Mind(), Functions(embed, page_size=2)
    mind.recall = {str(n): chunk(str(n), f"Tea time {n}") for n in range(5)}
    for text in ("dog", "rain rain", "rain", "tea", "rain dog"):
        functions.run(mind, function_call(json.loads(call("archival_memory_insert", content=text))))

    def search(name, query, page):
        return functions.run(mind, function_call(json.loads(call(name, query=query, page=page))))

    assert [search("conversation_search", "tea TIME", p).chunks for p in range(4)] == [
        ("4", "3"), ("2", "1"), ("0",), ()
    ]  # fmt: skip
    assert search("conversation_search", "time tea", 0).chunks == ("4", "3")  # its words, apart
    assert search("archival_memory_search", "rain", 0).passages == (2, 1)
    assert search("archival_memory_search", "rain", 1).passages[0] == 4
    assert "5 results, page 1 of 3" in search("archival_memory_search", "rain", 1).text


def test_pressure_warns_once_and_a_full_view_is_summed_up():
    def model(system, user):
        return f"sum of {user.count('word ')} words" if system == SUMMARISE else DONE

    chat = Script(model)
    memory = MemGPT(chat, embed, words, window=600)
    text = "word " * 40
    for n in range(24):
        memory.observe({"s": [chunk(str(n), text)]})
    views = [messages for messages in chat.asked if messages[0]["content"] != SUMMARISE]
    sums = [messages for messages in chat.asked if messages[0]["content"] == SUMMARISE]
    warned = [place for place, messages in enumerate(chat.asked) if PRESSURE in str(messages)]
    assert len(sums) >= 2
    assert warned[0] < chat.asked.index(sums[0])
    assert all(str(messages).count(PRESSURE) <= 1 for messages in views)
    assert "Older summary: sum of" in sums[1][1]["content"]
    size = [sum(words(message["content"]) for message in messages) for messages in views]
    assert max(size) < 600 + 2 * 40
    mind = memory.mind("s")
    assert len(mind.recall) == 24 > len(mind.queue) / 2
    assert mind.summary.startswith("sum of")


def test_a_question_changes_nothing_and_what_it_finds_is_the_context():
    def model(system, user):
        if "A question has come" in user:
            return call("conversation_search", True, query="flight")
        if "conversation_search:" in user:
            return call("core_memory_append", True, name="human", content="Asks about flights.")
        if "core_memory_append: Done." in user:
            return call("archival_memory_search", query="dog")
        return call("archival_memory_insert", content="dog " + user[-7:]) if "dog" in user else DONE

    chat = Script(model)
    memory = MemGPT(chat, embed, words)
    memory.observe({"s": [chunk("1", "flight at nine"), chunk("2", "my dog Bello")]})
    memory.observe({"s": [chunk(str(n), "rain") for n in range(3, 6)]})
    before, asked = memory.mind("s"), len(chat.asked)
    context = memory.context(query("when do I fly?"), 100)
    assert context.ids == ("1", "5", "4", "3", "2")
    assert context.text.index("flight at nine") < context.text.index(
        "[archival memory] dog g Bello"
    )
    assert memory.mind("s") is not before
    assert memory.mind("s").core == before.core
    assert memory.mind("s").queue == before.queue
    assert memory.context(query("when do I fly?"), 100) == context
    assert len(chat.asked) == asked + 3  # the second time it was not asked again


@pytest.mark.parametrize(
    "output",
    [
        "I will remember that.",
        call("rm", content="x"),
        call("core_memory_append", name="other", content="x"),
        call("conversation_search", query="x", page=-1),
        json.dumps({"function": "archival_memory_insert", "arguments": "x"}),
    ],
)
def test_output_that_is_no_call_ends_the_step_and_counts(output):
    chat = Script(lambda system, user: output)
    memory = MemGPT(chat, embed, words)
    memory.observe({"s": [chunk("1", "tea")]})
    assert memory.failures == 1
    assert len(chat.asked) == 2
    assert memory.context(query("tea"), 50).ids == ("1",)


def test_fallbacks_of_writing_and_of_questions_are_told_apart():
    def model(system, user):
        return "hm" if "tea" in user or "could not be read" in user else DONE

    memory = MemGPT(Script(model), embed, words)
    memory.observe({"s": [chunk("1", "dog"), chunk("2", "tea")], "s2": [chunk("1", "dog")]})
    assert (memory.write_fallbacks("s"), memory.write_fallbacks("s2")) == (1, 0)
    for budget in (20, 50):  # asked once
        memory.context(query("more tea?"), budget)
    memory.context(query("a dog?", "s2"), 50)
    asked = [("more tea?", "s"), ("a dog?", "s2"), ("rain?", "s")]
    assert [memory.read_fallbacks(query(*one)) for one in asked] == [1, 0, 0]
    assert memory.write_fallbacks("s") == 1
    assert memory.failures == 2


@pytest.mark.parametrize("name", MAKERS)
def test_fallbacks_of_a_write_that_failed_are_not_those_of_what_is_held(name):
    answers = iter(["", "", ""])  # nothing usable, then nothing at all

    def chat(messages):
        return next(answers)

    memory = MAKERS[name](settings(chat))
    with pytest.raises(StopIteration):
        memory.observe({"s": [chunk(str(n), "tea", session=n) for n in range(3)]})
    assert memory.failures >= 1
    assert memory.write_fallbacks("s") == 0


def test_a_chunk_larger_than_the_view_is_shown_shortened_and_recalled_whole():
    memory = MemGPT(Script(plain_model), embed, words, window=800)
    memory.observe({"s": [chunk("1", "tea " * 5000)]})
    mind = memory.mind("s")
    assert mind.queue[0].tokens <= 101
    assert mind.queue[0].content.endswith("[...]")
    assert len(mind.recall["1"].text.split()) == 5000


@pytest.mark.parametrize("bad", [{"keep": 1.0}, {"warn_at": 0}, {"window": 100}, {"max_steps": 0}])
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        MemGPT(Script(plain_model), embed, words, **bad)
