"""Judges: words that count, verdicts of models, likelihoods."""

from __future__ import annotations

import json
import time

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
from rsm_torch.eval.judges import Case, Judge, ModelJudge, OverlapJudge, make_judge, templates_hash
from rsm_torch.eval.judges.likelihood import LikelihoodJudge, mean_log_probability
from rsm_torch.eval.judges.normalise import ama_bench_words, locomo_words, squad_words
from rsm_torch.eval.judges.parsing import correct_or_wrong, grade, yes_or_no
from rsm_torch.eval.judges.templates import TEMPLATES, asked, template_for
from rsm_torch.eval.readers import Answer, ChatReader, Failure, Price
from rsm_torch.eval.readers.local_model import LocalModel

LOCOMO = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}


def case(answer, reference="ref", category=None, name="q", about=None, **metadata) -> Case:
    question = Question("What?", "s", reference, category, id=name, metadata=metadata)
    return Case(question, answer, about=about or {})


def score(kind: str, dataset: str, answer: str, reference: str | None, **more) -> float | None:
    return OverlapJudge(kind, dataset).judge([case(answer, reference, **more)])[0].score


def locomo(answer, reference, category, kind="f1"):
    more = {"category": LOCOMO[category]}
    question = Question("What?", "s", reference, metadata={"category": category}, **more)
    return OverlapJudge(kind, "locomo").judge([Case(question, answer)])[0].score


# ---- words


def test_each_benchmark_has_its_own_words():
    text = "The DOG's 1,000 bones, and a half-eaten one!"
    assert ama_bench_words(text) == ["dog", "s", "1", "000", "bones", "and", "half", "eaten", "one"]
    assert squad_words(text) == ["dogs", "1000", "bones", "and", "halfeaten", "one"]
    assert locomo_words(text) == ["dog", "1000", "bone", "halfeaten", "one"]


@pytest.mark.parametrize(
    ("word", "stem"),  # from Porter's paper of 1980, one of each step
    [("caresses", "caress"), ("plastered", "plaster"), ("motoring", "motor"), ("hopping", "hop"),
     ("happy", "happi"), ("relational", "relat"), ("triplicate", "triplic"), ("hopeful", "hope"),
     ("adjustment", "adjust"), ("probate", "probat"), ("controll", "control")],
)  # fmt: skip
def test_stems_are_porters(word, stem):
    assert locomo_words(word) == [stem]


def test_f1_by_hand():
    # gold: 4 words, answer: 3, two in common: 2·2/7
    assert score("f1", "ama-bench", "the red fox ran", "red fox sat down") == pytest.approx(4 / 7)
    assert score("f1", "realmem", "no no yes", "no") == pytest.approx(0.5)
    assert score("f1", "longmemeval", "The answer.", "an ANSWER") == 1.0
    assert score("f1", "longmemeval", "", "x") == 0.0
    assert score("f1", "ama_bench", "a", "the") == 0.0  # nothing is left to agree on


def test_exact_match():
    assert score("exact", "ama-bench", "Go-North!", "the go north") == 1.0
    assert score("exact", "ama-bench", "go north now", "go north") == 0.0
    assert score("exact", "mmlu", "A. Because", "A") == 1.0
    assert score("exact", "mmlu", "B", "A") == 0.0


def test_locomo_categories():
    # 1: each part of the reference by its best match: (1 + 2·1/3) / 2
    assert locomo("painting, red cars", "car, painted", 1) == pytest.approx((1 + 2 / 3) / 2)
    assert locomo("painting red cars", "car, painted", 4) == pytest.approx(2 * 2 / 5)
    # 3: what precedes the semicolon
    assert locomo("yes", "Yes; she said so twice", 3) == 1.0
    assert locomo("yes", "Yes; she said so twice", 4) < 0.5
    # 5: an abstention, whatever the reference
    assert locomo("That is not mentioned here.", None, 5) == 1.0
    assert locomo("No information available", "x", 5) == 1.0
    assert locomo("Paris", "Paris", 5) == 0.0
    assert locomo("hiking and cycling", "Hike, cycle", 2) == 1.0
    assert locomo("cycling, hikes", "hike, cycle", 1, "exact") == 1.0


def test_locomos_category_may_come_by_name():
    assert score("f1", "locomo", "not mentioned", None, category="adversarial") == 1.0


def test_what_cannot_be_scored_says_why():
    judge = OverlapJudge("f1", "realmem")
    verdicts = judge.judge([case(None), case("x", None), case("ref")])
    assert [v.error.type if v.error else None for v in verdicts] == [
        "NoAnswer",
        "NoReference",
        None,
    ]
    assert [v.score for v in verdicts] == [None, None, 1.0]


def test_real_references_score_one_against_themselves(data_folder):
    from rsm_torch.eval.datasets import load

    episodes = list(load(data_folder / "locomo" / "locomo10.json"))
    questions = [q for e in episodes for q in e.questions if q.category != "adversarial"]
    verdicts = OverlapJudge("f1", "locomo").judge(
        [Case(q, q.reference) for q in questions if q.reference]
    )
    assert len(verdicts) > 500
    full = [v.score == pytest.approx(1.0) for v in verdicts]
    # The others: an answer such as "x; y" of category 3 is longer than what is asked for.
    assert sum(full) / len(full) > 0.95


# ---- reading verdicts


@pytest.mark.parametrize(
    ("text", "verdict"),
    [("yes", 1), ("No.", 0), ("**Yes**", 1), ("'no'", 0), ("-> no", 0), ("ＹＥＳ", 1),
     ("<answer>yes</answer>", 1), ("<think>no, no</think>yes", 1), (r"\boxed{no}", 0),
     ("Answer: yes", 1), ("Final answer: no", 0), ("My verdict is yes.", 1), ("So: yes", 1),
     ('{"verdict": "no"}', 0),
     # first, with its reasons after it
     ("Yes it does.", 1), ("No it does not", 0), ("No, because it errs", 0), ("Yes — it matches", 1),
     ("Yes, both say the answer is no.", 1), ("No.\nReason: yes was expected.", 0),
     ("no\n\n(Yes would require naming the city.)", 0), ("yes.\n\nThere is no contradiction.", 1),
     ("Yes\nNote: reference = no, given = no", 1),
     # last, on a line of its own
     ("It names no such thing.\nno", 0), ("Is it right, but for one word?\n**Yes.**", 1),
     ("The reference says no. So does this.\nVerdict: yes\n", 1),
     # both, a part, or not said of the answer
     ("No, wait ... YES", None), ("yes\nno", None), ("Yes. No.", None), ("Yes: no", None),
     ("yes? **no**", None), ("yes or no", None), ("yes/no", None), ("no no", None), ("yes & no", None),
     ("not yes", None), ("yes?", None), ("Yes, but only in part", None), ("Yes. However, not all", None),
     ("The reference answer is yes.", None), ("The answer is no", None), ("Is it wrong? Yes.", None),
     ("There is no mention of it", None), ("No mention of it", None), ("Yes would be generous", None),
     ("I know yesterday", None), ("", None), ("...", None), ("nothing to say", None)],
)  # fmt: skip
def test_yes_or_no_only_where_it_is_told_plainly(text, verdict):
    assert yes_or_no(text) == verdict


@pytest.mark.parametrize(
    ("text", "verdict"),
    [("correct", 1), ("Wrong", 0), ("incorrect", 0), ("CORRECT.", 1), ("**Wrong**", 0), ("'correct'", 1),
     ('{"label": "correct"}', 1), ('{"label": "wrong", "why": "the correct date is May"}', 0),
     ("Verdict: **Correct**", 1), ("Final verdict: Incorrect.", 0), ("VERDICT\ncorrect", 1),
     ("The answer is correct", 1), ("The reply is completely wrong", 0), ("It was wrong.", 0),
     ("It is wrong because it only names half of the cue.", 0), ("Correct - it heeds the cue", 1),
     ("correct\n(it mentions sugar)", 1), ("Wrong. The correct reply names it.", 0),
     ("The correct answer names the cue.\nwrong", 0), ("Nothing is wrong.\nThe reply is correct.", 1),
     # what is denied is not correct, and what is not wrong is not said to be correct
     ("not correct", 0), ("not quite correct", 0), ("That isn't correct.", 0),
     ("It isn’t entirely correct", 0), ("The answer is not wrong", None), ("not incorrect", None),
     ("neither correct nor wrong", None), ("I would not call it correct.", None),
     ("anything but correct", None), ("all but correct", None), ("None of the reply is correct", None),
     ("Nobody would say the reply is correct", None), ("Nothing is wrong.", None),
     ("None of it is wrong", None), ("It is false that the answer is correct", None),
     ("I doubt the reply is correct", None), ("far from correct", None),
     # a part of it is neither
     ("partially correct", None), ("The reply is mostly correct.", None), ("nearly correct", None),
     ("Correct, but only in part.", None), ("Correct. However, a part is wrong.", None),
     ("correct in part", None), ("Only half of it is correct", None),
     ("Part of the answer is correct", None), ("correct enough", None), ("Correct, if he meant it", None),
     # both, or not said of the reply
     ("The answer is correct. No, wait, it is wrong.", None), ("correct, not wrong", None),
     ("Correct: no", None), ("Correct? No.", None), ("Correct. No.", None), ("correct or wrong", None),
     ("Is the answer correct: no", None), ("Is it correct? I cannot tell.", None), ("yes", None),
     ("Whether the reply is correct", None), ("This is the correct answer", None),
     ("It lacks the correct cue", None), ("correctly", None), ("maybe", None), ("", None)],
)  # fmt: skip
def test_correct_or_wrong_only_where_it_is_told_plainly(text, verdict):
    assert correct_or_wrong(text) == verdict


@pytest.mark.parametrize(
    "text", ["not " * 9999 + "correct", "'" * 99999 + "no", " " * 99999 + "yes it", "the " * 9999]
)
def test_a_long_reply_is_read_at_once(text):
    began = time.perf_counter()
    yes_or_no(text), correct_or_wrong(text), grade(text)
    assert time.perf_counter() - began < 2


@pytest.mark.parametrize(("name", "template"), TEMPLATES.items())
def test_every_template_asks_for_what_is_read(name, template):
    last = template[template.rindex("End with") :]
    if name == "realmem":
        assert last == "End with a line 'Score: N' with N from 0 to 3."
    else:
        words = "correct or wrong" if name == "locomo_plus" else "yes or no"
        assert last == f"End with one word on a line of its own: {words}."


@pytest.mark.parametrize(
    ("text", "share"),
    [("Score: 3", 1), ("I give it 2 points.\nScore: 1", 1 / 3), ("**Score**: 2", 2 / 3), ("0", 0),
     (' "3" ', 1), ('{"score": 2}', 2 / 3), ("Score: 1 ... Score: 2", 2 / 3), ("score = 2.0", 2 / 3),
     ("Score: 4", None), ("Score: 2.5", None), ("Score: 31", None), ("3 of 5 points", None),
     ("Score: 2/3", 2 / 3), ("Score: 3 / 5", None), ("Score: 2 out of 10", None),
     ("Score: 1-2", None), ("Score: 10-2", None), ("Score: 3\n- natural", 1),
     ("good", None)],
)  # fmt: skip
def test_grades(text, share):
    assert grade(text) == (None if share is None else pytest.approx(share))


# ---- judging models


class Scripted:
    name = "scripted"

    def __init__(self, *texts):
        self.texts, self.prompts = list(texts), []

    def describe(self):
        return {}

    def answer(self, prompts):
        self.prompts += prompts
        return [
            Answer(None, error=t) if isinstance(t, Failure) else Answer(t, 5, 1, 0.1, 0.2)
            for t in self.texts
        ]


def test_a_model_judges_each_answer():
    reader = Scripted("So: yes", "no", "I like turtles", Failure("TimeLimit", "late"))
    judge = ModelJudge(reader, "ama-bench")
    assert isinstance(judge, Judge)
    about = {"task": "win", "task_type": "crafter"}
    cases = [case("a", about=about), case("b"), case(None), case("c"), case("d"), case("e", None)]
    verdicts = judge.judge(cases)
    assert [v.score for v in verdicts] == [1, 0, None, None, None, None]
    errors = [v.error.type if v.error else None for v in verdicts]
    assert errors == [None, None, "NoAnswer", "UnreadableVerdict", "TimeLimit", "NoReference"]
    assert verdicts[3].error.message == "unreadable verdict (ama_bench): 'I like turtles'"
    assert (verdicts[0].raw, verdicts[0].prompt_tokens, verdicts[0].cost) == ("So: yes", 5, 0.2)
    assert len(reader.prompts) == 4  # what cannot be judged is not asked
    text = reader.prompts[0].messages[0]["content"]
    for shown in ("(crafter): win", "What?", "Reference answer: ref", "Given answer: a"):
        assert shown in text


def test_a_reply_without_a_verdict_is_asked_for_anew_the_next_time(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "test-key")
    replies = {"a": ["yes"], "b": ["Hard to say.", "no"]}

    def answer(body, number):
        given = body["messages"][0]["content"].split("Given answer: ")[1][0]
        return Reply(completion(replies[given].pop(0)))

    with stub_server(answer) as stub:
        monkeypatch.setenv("OPENAI_BASE_URL", stub.url)

        def verdicts():  # each time as a new process would
            prices = {"stub": Price(1, 1)}
            judge = make_judge("openai:stub", "ama-bench", cache=tmp_path, prices=prices)
            return judge.judge([case("a"), case("b")])

        first, second, third = verdicts(), verdicts(), verdicts()
        assert len(stub.requests) == 3
    assert [v.score for v in first] == [1, None]
    assert first[1].error.type == "UnreadableVerdict"
    assert [v.score for v in second] == [v.score for v in third] == [1, 0]
    # what is read from the cache costs nothing
    assert [[v.cost for v in some] for some in (first, second, third)] == [
        [12e-6, 12e-6], [0, 12e-6], [0, 0],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dataset", "category", "name", "template"),
    [
        ("ama_bench", "A", "q", "ama_bench"),
        ("realmem", None, "q", "realmem"),
        ("locomo_plus", "causal", "q", "locomo_plus"),
        ("locomo", "temporal", "q", "default"),
        ("locomo", "adversarial", "q", "adversarial"),
        ("longmemeval", "multi-session", "q", "default"),
        ("longmemeval", "single-session-user", "q", "default"),
        ("longmemeval", "temporal-reasoning", "q", "temporal"),
        ("longmemeval", "knowledge-update", "q", "knowledge_update"),
        ("longmemeval", "single-session-preference", "q", "preference"),
        ("longmemeval", "temporal-reasoning", "q_abs", "abstention"),
        ("plain", None, "q", "default"),
    ],
)
def test_each_kind_of_question_has_its_template(dataset, category, name, template):
    assert template_for(dataset, case("a", category=category, name=name)) == template


def test_templates_say_what_the_official_judges_do():
    def text(dataset, category=None, name="q", **metadata):
        return asked(dataset, case("ANSWER", "REF", category, name, **metadata)).text

    assert "off by one" in text("longmemeval", "temporal-reasoning")
    assert "off by one" not in text("longmemeval", "multi-session")
    assert "older state" in text("longmemeval", "knowledge-update")
    assert "cannot be answered" in text("longmemeval", "x", "q_abs")
    assert "A: I gave up sugar" in text("locomo_plus", cue="A: I gave up sugar")
    assert "- owns a cat" in text("realmem", memory_used=[{"content": "owns a cat"}, {"x": 1}])
    assert "REF" not in text("locomo_plus")
    for name, template in TEMPLATES.items():
        assert "{answer}" in template, name


def test_the_cue_judge_and_the_grades():
    cue = ModelJudge(ChatReader(lambda m: "It names it.\nCorrect"), "locomo-plus")
    verdicts = cue.judge([case("a", None, cue="A: x"), case("a", None)])
    assert [v.score for v in verdicts] == [1.0, None]
    assert verdicts[1].error.type == "NoReference"
    graded = ModelJudge(ChatReader(lambda m: "fine\nScore: 2"), "realmem")
    assert graded.judge([case("a")])[0].score == pytest.approx(2 / 3)


def test_the_end_of_an_unreadable_reply_is_shown():
    judge = ModelJudge(
        ChatReader(lambda m: "It hints at it. " * 40 + "Partially correct"), "locomo-plus"
    )
    [verdict] = judge.judge([case("a", None, cue="A: x")])
    assert (verdict.score, verdict.error.type) == (None, "UnreadableVerdict")
    assert verdict.error.message.endswith("Partially correct'")
    assert len(verdict.error.message) < 200


def test_the_hash_follows_the_templates(monkeypatch):
    before = templates_hash()
    monkeypatch.setattr("rsm_torch.eval.judges.templates.TEMPLATES", {**TEMPLATES, "default": "x"})
    assert templates_hash() != before


@pytest.mark.parametrize("spec", ["", "exact:x", "likelihood", "likelihood:", "gpt-4o", "none"])
def test_an_unknown_judge_is_refused(spec):
    with pytest.raises(ValueError, match="judge: expected exact, f1"):
        make_judge(spec, "locomo")


def test_judges_by_name(monkeypatch):
    assert make_judge("f1", "locomo").name == "f1"
    assert make_judge("exact", "locomo").name == "exact"
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ValueError, match="OPENAI_API_KEY"):
        make_judge("openai:gpt", "locomo")


# ---- likelihood


@pytest.fixture
def local():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    return LocalModel(tiny_llama(), tokenizer, "tiny", "tiny-0")


def by_hand(model, prompt: list[int], answer: list[int]) -> float:
    """One token after the other, each from all before it."""
    total = 0.0
    for place, token in enumerate(answer):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer[:place]])).logits[0, -1]
        total += float(logits.log_softmax(-1)[token])
    return total / len(answer)


PAIRS = [
    ([5, 6, 7], [8]),
    (list(range(4, 200)), [9, 10, 11, 12, 13]),
    ([40] * 30, [41, 42, 43]),
    ([5, 6, 7], [8, 9] * 12),
]


def test_batched_equals_one_by_one_equals_by_hand(local):
    batched = mean_log_probability(local, PAIRS)
    alone = torch.stack([mean_log_probability(local, [pair])[0] for pair in PAIRS])
    hand = torch.tensor([by_hand(local.model, *pair) for pair in PAIRS])
    torch.testing.assert_close(batched, alone, atol=1e-3, rtol=0)
    torch.testing.assert_close(batched, hand, atol=1e-3, rtol=0)
    assert hand.std() > 0.1


def test_models_that_cannot_keep_some_logits_alone_give_the_same(local):
    whole = tiny_llama()

    class Plain:
        config, device = whole.config, whole.device

        def forward(self, input_ids, attention_mask, use_cache):
            return whole(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)

        __call__ = forward

    plain = LocalModel(Plain(), local.tokenizer, "plain", "plain")
    same = [mean_log_probability(one, PAIRS[2:3]) for one in (plain, local)]
    torch.testing.assert_close(*same, atol=1e-4, rtol=0)


def scored(context: str, reference: str | None = "the memory", text: str = "Where?") -> Case:
    return Case(Question(text, "s", reference), None, context)


def test_the_scored_tokens_are_the_same_for_every_context(local):
    judge = LikelihoodJudge(local, "plain")
    answers = {tuple(judge._tokens(scored(c))[1]) for c in ("", "in the mem", "x" * 50)}
    assert len(answers) == 1
    assert local.tokenizer.decode(answers.pop()) == " the memory"
    local.tokenizer.chat_template = TEMPLATE
    assert local.tokenizer.decode(judge._tokens(scored("c"))[1]) == "the memory"


def test_verdicts_come_in_order_whatever_the_batches(local):
    cases = [scored("x" * n, "the memory " * (1 + n % 3)) for n in (3, 90, 0, 40, 7)]
    one, many = (LikelihoodJudge(local, "plain", batch_tokens=n) for n in (1, 10_000))
    alone = [v.score for v in one.judge(cases)]
    assert [v.score for v in many.judge(cases)] == pytest.approx(alone, abs=1e-3)
    hand = by_hand(local.model, *one._tokens(cases[1]))
    assert alone[1] == pytest.approx(hand, abs=1e-3)
    assert max(alone) < 0


def test_too_long_and_without_a_reference(local):
    cases = [scored("ok"), scored("word " * WINDOW), scored("ok", None), scored("ok", " ")]
    verdicts = LikelihoodJudge(local, "plain").judge(cases)
    types = [v.error.type if v.error else None for v in verdicts]
    assert types == [None, "ContextTooLong", "NoReference", "NoReference"]
    assert str(WINDOW) in verdicts[1].error.message
    assert LikelihoodJudge(local, "plain").judge([]) == []


def test_a_lone_surrogate_in_a_reference_leaves_the_others_alone(local):
    cases = [scored("ok"), scored("a\ud800", "b\udc80"), scored("a\ufffd", "b\ufffd")]
    fine, odd, same = LikelihoodJudge(local, "plain").judge(cases)
    assert fine.error is None
    assert odd.score == same.score


def test_where_memory_is_short_likelihoods_come_from_smaller_batches(local, tmp_path, monkeypatch):
    cases = [scored("x" * n, "the memory") for n in (3, 90, 0, 40, 150, 7)]
    expected = [v.score for v in LikelihoodJudge(local, "plain").judge(cases)]
    sizes = []

    def short(local, pairs):
        sizes.append(len(pairs))
        if len(pairs) > 2 or max(len(prompt) for prompt, _ in pairs) > longest:
            raise torch.OutOfMemoryError("CUDA out of memory.\n Tried to allocate 2 GiB")
        return mean_log_probability(local, pairs)

    judge = LikelihoodJudge(local, "plain", cache=tmp_path / "scores")
    longest = len(judge._tokens(cases[4])[0]) - 1  # one does not fit even alone
    with monkeypatch.context() as patch:
        patch.setattr("rsm_torch.eval.judges.likelihood.mean_log_probability", short)
        found = judge.judge(cases)
    assert sizes[:2] == [6, 3]
    assert [v.score for v in found] == [
        None if place == 4 else pytest.approx(score, abs=1e-3)
        for place, score in enumerate(expected)
    ]
    assert found[4].error == Failure(
        "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB"
    )
    # what failed is not kept, all else is
    assert judge.judge(cases)[4].score == pytest.approx(expected[4], abs=1e-3)


def test_likelihoods_are_kept_on_disk(local, tmp_path, monkeypatch):
    file = tmp_path / "deep" / "scores"
    cases = [scored("a"), scored("b"), scored("a")]
    first = LikelihoodJudge(local, "plain", cache=file).judge(cases)
    with monkeypatch.context() as patch:
        patch.setattr("rsm_torch.eval.judges.likelihood.mean_log_probability", None)
        again = LikelihoodJudge(local, "plain", cache=file).judge(cases[::-1])
    assert [v.score for v in again] == [v.score for v in first][::-1]
    other = LocalModel(tiny_llama(1), local.tokenizer, "tiny", "tiny-1")
    assert LikelihoodJudge(other, "plain", cache=file).judge(cases)[0].score != first[0].score


def test_a_likelihood_judge_from_a_folder(local, tmp_path):
    local.model.save_pretrained(tmp_path / "m")
    local.tokenizer.save_pretrained(tmp_path / "m")
    judge = make_judge(f"likelihood:{tmp_path / 'm'}", "plain", cache=tmp_path / "c")
    expected = LikelihoodJudge(local, "plain").judge([scored("a")])[0].score
    assert judge.judge([scored("a")])[0].score == pytest.approx(expected, abs=1e-5)
    assert [file.name for file in (tmp_path / "c").iterdir()] == ["likelihoods.rows"]
    assert json.dumps(judge.describe())
