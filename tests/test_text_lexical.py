"""Finding by words: BM25 as the formula has it, fusion by reciprocal rank, and both in a memory."""

from __future__ import annotations

import math
import sys
from collections import Counter

import pytest
from text_support import Clock, Hashed, Placed, texts, words

from rsm_torch import AgentMemory, Item
from rsm_torch.lexical import LexicalIndex, fuse, searchable
from rsm_torch.lexical import words as split
from rsm_torch.text import synced
from rsm_torch.text.ranking import COVERED, reading_order, word_weight

DOCS = [
    "The user moved box 7 to the north room.",
    "box BOX box, and 7 more.",
    "",
    "A quiet evening; nothing happened.",
    "Click on user_id 12 in the north table, then on user_id 7.",
    "7",
]


def plain_bm25(docs: list[str], query: str, k1: float = 1.5, b: float = 0.75) -> list[float]:
    bags = [Counter(split(doc)) for doc in docs]
    average = sum(bag.total() for bag in bags) / len(bags)
    scores = []
    for bag in bags:
        score = 0.0
        for word in split(query):
            n = sum(word in other for other in bags)
            idf = math.log(1 + (len(bags) - n + 0.5) / (n + 0.5))
            score += idf * bag[word] / (bag[word] + k1 * (1 - b + b * bag.total() / average))
        scores.append(score)
    return scores


@pytest.mark.parametrize("query", ["box", "Box 7?", "north user_id", "7 7 box", "absent", "..."])
def test_scores_are_those_of_the_formula(query):
    expected = plain_bm25(DOCS, query)
    index = LexicalIndex(DOCS)
    assert len(index) == len(DOCS)
    assert index.scores(query).tolist() == pytest.approx(expected, abs=1e-6)
    order = sorted((n for n in range(len(DOCS)) if expected[n] > 0), key=lambda n: -expected[n])
    assert [place for place, _ in index.ranking(query)] == order


def test_other_words_for_a_stemmer():
    docs = ["two boxes", "one"]
    assert LexicalIndex(docs).ranking("box") == []
    stemmed = LexicalIndex(docs, split=lambda text: text.removesuffix("es").split())
    assert [place for place, _ in stemmed.ranking("box")] == [0]


@pytest.mark.parametrize("docs", [[], [""], ["...", "!"]])
def test_an_index_without_words(docs):
    assert LexicalIndex(docs).scores("box").tolist() == [0.0] * len(docs)
    assert LexicalIndex(docs).ranking("box") == []


def test_equal_scores_keep_their_order_and_filters_keep_the_statistics():
    index = LexicalIndex(["a b", "a c", "a d", "a e"])
    assert [place for place, _ in index.ranking("a")] == [0, 1, 2, 3]
    assert index.ranking("a", {1, 3}) == [pair for pair in index.ranking("a") if pair[0] in (1, 3)]


@pytest.mark.parametrize("query", ["box", "a box of stones", "stone box unknown", "the the", "zzz"])
def test_coverage_is_the_share_of_the_query_in_its_best_text(query):
    docs = ["a stone box", "the lid of the box", "box box", "an orchid", "rain on the sea today"]
    having = [sum(word in split(doc) for doc in docs) for word in split(query)]
    whole = sum(math.log(1 + (len(docs) - n + 0.5) / (n + 0.5)) for n in having)
    found = LexicalIndex(docs).coverage(query)
    assert found == pytest.approx(max(plain_bm25(docs, query)) / whole, rel=1e-5)
    assert (found == 0) == (query == "zzz")


def test_coverage_by_the_texts_that_may_be_found():
    index = LexicalIndex(["a stone box", "a lid", "rain"])
    assert index.coverage("box lid", {1, 2}) == pytest.approx(index.scores("box lid")[1].item() / (
        2 * math.log(1 + 2.5 / 1.5)))  # fmt: skip
    assert index.coverage("box", {1}) == index.coverage("box", set()) == 0.0


def test_coverage_of_nothing():
    assert LexicalIndex([]).coverage("box") == LexicalIndex(["box"]).coverage("...") == 0.0


def test_words_count_as_far_as_they_cover_the_query():
    assert word_weight(0.0) == 0.0
    assert word_weight(COVERED / 2) == pytest.approx(0.25)
    assert word_weight(COVERED) == word_weight(0.9) == 1.0
    docs = [f"word{n} and some more of it" for n in range(50)]
    assert word_weight(LexicalIndex(docs).coverage("what of word7?")) == 1.0
    stray = "it is one more of those evenings when nobody quite remembers why they came"
    assert word_weight(LexicalIndex(docs).coverage(stray)) < 0.1


def test_reciprocal_rank_fusion():
    assert fuse([["a", "b", "c"], ["c", "d"]]) == [
        ("c", pytest.approx(1 / 63 + 1 / 61)),
        ("a", pytest.approx(1 / 61)),
        ("b", pytest.approx(1 / 62)),
        ("d", pytest.approx(1 / 62)),
    ]
    assert fuse([["a", "a", "b"]], k=0) == [("a", 1.0), ("b", 0.5)]
    assert fuse([]) == fuse([[], []]) == []
    assert fuse([["a"], ["b"]], k=0, weights=[0.5, 2]) == [("b", 2.0), ("a", 0.5)]
    for bad in (-1, 1.5, True):
        with pytest.raises(ValueError, match="k: expected"):
            fuse([["a"]], k=bad)
    with pytest.raises(ValueError, match="weights: expected 1, got 2"):
        fuse([["a"]], weights=[1, 1])


def test_the_reading_rule():
    near = [(1, 0.9), (2, 0.8), (1, 0.9), (3, 0.1)]
    assert reading_order(near) == [(1, 0.9), (2, 0.8), (3, 0.1)]
    named = [(7, 0.2), (3, 0.1), (9, 0.2)]
    assert reading_order(near, named) == [(7, 0.2), (9, 0.2), (3, 0.1), (1, 0.9), (2, 0.8)]
    ranked = reading_order(near, named, {7: 1, 3: 0, 9: 1})
    assert [item for item, _ in ranked] == [3, 7, 9, 1, 2]
    fused = reading_order(near, named, {7: 1, 3: 0, 9: 1}, words=[9, 2])
    assert [item for item, _ in fused] == [3, 9, 7, 2, 1]
    assert fused[3] == (2, pytest.approx(1 / 62 + 1 / 62))
    half = reading_order(near, named, {7: 1, 3: 0, 9: 1}, words=[9, 2], weight=0.5)
    assert half[3] == (2, pytest.approx(1 / 62 + 0.5 / 62))
    none = reading_order(near, named, {7: 1, 3: 0, 9: 1}, words=[9, 2], weight=0.0)
    assert [item for item, _ in none] == [3, 7, 9, 1, 2]


# -- in a memory ----------------------------------------------------------------------------


def test_words_lift_what_embeddings_rank_low(placed):
    placed.add(["0.9 sofa", "0.8 chair", "0.7 table", "0.1 passport"], "a")
    asked = "1 passport?"
    assert texts(placed.search(asked, "a")) == [
        "0.9 sofa",
        "0.8 chair",
        "0.7 table",
        "0.1 passport",
    ]
    fused = placed.search(asked, "a", lexical=True)
    assert texts(fused) == ["0.1 passport", "0.9 sofa", "0.8 chair", "0.7 table"]
    sums = [1 / 64 + 1 / 61, 1 / 61, 1 / 62, 1 / 63]
    assert [hit.score for hit in fused] == pytest.approx(sums)
    assert texts(placed.search(asked, "a", top_k=1, lexical=True)) == ["0.1 passport"]
    few = placed.context(asked, "a", 4, layout="flat", around=0)
    assert "passport" in few.text
    off = placed.context(asked, "a", 4, layout="flat", lexical=False, around=0)
    assert "passport" not in off.text


def test_fusion_is_exact_beyond_top_k(placed):
    # Ranks behind top_k count too: both lists are fused whole.
    placed.add([f"0.{90 - n} item{n % 7} word{n}" for n in range(60)], "a")
    asked = "1 item3 item5"
    dense = [hit.id for hit in placed.search(asked, "a", top_k=60, top_atoms=60)]
    index = LexicalIndex(item.text for item in placed.get_all("a"))
    worded = [str(place + 1) for place, _ in index.ranking(asked)]
    weight = word_weight(index.coverage(asked))
    assert 0.1 < weight < 1
    expected = fuse([dense, worded], weights=[1, weight])[:5]
    found = placed.search(asked, "a", top_k=5, lexical=True)
    assert [hit.id for hit in found] == [id for id, _ in expected]
    assert [hit.score for hit in found] == pytest.approx([score for _, score in expected], rel=1e-5)


def test_streams_do_not_see_each_others_words(placed):
    placed.add(["0.5 rare", "0.4 common", "0.3 common"], "a")
    before = placed.search("1 rare common", "a", lexical=True)
    for name in ("a1", "b"):
        placed.add(["0.9 rare rare", "0.8 rare", "0.7 rare"], name)
    assert placed.search("1 rare common", "a", lexical=True) == before
    assert {hit.stream for hit in placed.search("1 rare", "b", lexical=True)} == {"b"}
    assert "common" not in placed.context("1 common", "b", 100, lexical=True).text


def test_what_was_changed_is_found_by_its_new_words(placed):
    ids = placed.add(["0.9 sofa", "0.8 chair", "0.2 passport"], "a")

    def first():
        return placed.search("1 passport", "a", lexical=True)[0].text

    assert first() == "0.2 passport"
    placed.update(ids[2], text="0.2 visa")
    assert first() == "0.9 sofa"
    placed.update(ids[1], text="0.3 passport")
    assert first() == "0.3 passport"
    placed.delete(ids[1])
    assert texts(placed.search("1 passport", "a", lexical=True)) == ["0.9 sofa", "0.2 visa"]
    placed.add("0.1 passport", "a")
    assert first() == "0.1 passport"
    placed.delete_all("a")
    assert placed.search("1 passport", "a", lexical=True) == []
    assert placed.context("1 passport", "a", 50, lexical=True).text == ""


def test_a_failed_change_leaves_the_words_alone(placed, monkeypatch):
    placed.add(["0.9 sofa", "0.2 passport"], "a")
    before = placed.search("1 passport", "a", lexical=True)
    with monkeypatch.context() as patch:
        patch.setattr(placed.tensors, "plan", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            placed.add("0.5 passport", "a")
    assert placed.search("1 passport", "a", lexical=True) == before
    placed.add("0.5 other", "a")
    assert texts(placed.search("1 passport", "a", lexical=True))[0] == "0.2 passport"


def test_expired_items_have_no_words():
    clock = Clock()
    with AgentMemory(Placed(), tau=0.5, tokenizer=words, clock=clock) as memory:
        memory.add("0.3 passport", "a", ttl=10)
        memory.add(["0.9 sofa", "0.2 other passport"], "a")
        lasting = [item.text for item in memory.get_all("a")][1:]
        assert texts(memory.search("1 passport", "a", lexical=True))[0] == "0.3 passport"
        clock.now += 11
        found = memory.search("1 passport", "a", lexical=True)
        assert texts(found) == ["0.2 other passport", "0.9 sofa"]
        with AgentMemory(Placed(), tau=0.5, tokenizer=words) as fresh:
            fresh.add(lasting, "a")
            again = fresh.search("1 passport", "a", lexical=True)
        assert [hit.score for hit in again] == [hit.score for hit in found]


def test_filters(placed):
    placed.add(
        [
            Item("0.9 passport", time=10, metadata={"kind": "x"}),
            Item("0.5 passport passport", time=20, metadata={"kind": "y"}),
            Item("0.4 sofa", time=30, metadata={"kind": "y"}),
        ],
        "a",
    )

    def found(**chosen):
        return texts(placed.search("1 passport", "a", lexical=True, **chosen))

    assert found(where={"kind": "y"}) == ["0.5 passport passport", "0.4 sofa"]
    assert found(before=20) == ["0.9 passport"]
    assert found(after=20, before=30) == ["0.5 passport passport"]
    assert found(after=31) == []
    packed = placed.context("1 passport", "a", 50, lexical=True, where={"kind": "x"})
    assert packed.ids == ("1",)


def test_named_items_still_come_first(placed):
    placed.add([Item(f"0.{90 - n} item", step=100 + n) for n in range(30)], "a")
    placed.add(Item("0.1 passport", step=130), "a")
    hits = placed.search("1 passport at steps 120 and 121?", "a", top_k=4, lexical=True)
    assert [hit.step for hit in hits] == [120, 121, 130, 100]
    ranged = placed.search("1 passport, steps 125 to 140", "a", top_k=4, lexical=True)
    assert [hit.step for hit in ranged] == [125, 130, 126, 127]
    plain = placed.search("1 passport at box 20?", "a", 1, addressing=False, lexical=True)
    assert [hit.step for hit in plain] == [130]


def test_labels_are_words(placed):
    placed.add(
        [Item(f"0.{90 - n} item", step=100 + n, session="S1_02", role="Ana") for n in range(9)], "a"
    )
    placed.add(Item("0.2 item", step=77, session=3, role="Bo", time=5 * 60), "a")

    def first(query):
        return placed.search(query, "a", addressing=False, lexical=True)[0].text

    assert first("1 nothing") == "0.90 item"
    for query in ("1 what of 77?", "1 what of 3?", "1 what did BO say"):
        assert first(query) == "0.2 item"
    placed.update("10", time=8)  # words stay as they are
    assert first("1 Bo") == "0.2 item"


def test_what_is_searched_by_words():
    assert searchable(Item("box")) == "box"
    assert (
        searchable(Item("box", step=0, session="x", role="Ana", time=3))
        == "step 0 session x Ana box"
    )


def test_top_atoms_limits_the_embeddings_alone():
    with AgentMemory(Placed(), tau=0.999, tokenizer=words) as memory:
        memory.add(["0.9 sofa", "0.5 chair", "0.1 passport"], "a")
        found = memory.search("1 passport", "a", top_atoms=1, lexical=True)
        assert texts(found) == ["0.9 sofa", "0.1 passport"]


def test_more_streams_than_are_cached(placed, monkeypatch):
    monkeypatch.setattr(synced, "MOST", 20)
    for n in range(15):
        placed.add([f"0.5 word{n}", "0.9 other"], f"s{n}")
        placed.search(f"1 word{n}", f"s{n}", lexical=True)
    assert len(placed._state.shelves._held) == 10
    for n in (0, 14):
        assert placed.search(f"1 word{n}", f"s{n}", lexical=True)[0].text == f"0.5 word{n}"


def test_only_what_is_new_is_read_again(placed, monkeypatch):
    placed.add([f"0.{n} word{n}" for n in range(1, 9)], "a")
    placed.search("1 word3", "a", lexical=True)
    read = []
    plain = placed._store.readable

    def counted(*args):
        found = plain(*args)
        read.extend(one.chunk for one in found)
        return found

    monkeypatch.setattr(placed._store, "readable", counted)
    placed.add("0.5 word9", "a")
    found = placed.search("1 word9", "a", top_k=1, lexical=True)
    assert texts(found) == ["0.5 word9"]
    assert read == [9]


def test_searching_by_words_changes_nothing():
    with AgentMemory(Hashed(), tau=0.5, tokenizer=words) as memory:
        memory.add(["one", "two"], "a")
        before = memory.get_all("a"), memory.nbytes(), memory.counts()
        memory.search("one", "a", lexical=True)
        assert (memory.get_all("a"), memory.nbytes(), memory.counts()) == before


def test_without_bm25s(placed, monkeypatch):
    placed.add("0.5 text", "a")
    monkeypatch.setitem(sys.modules, "bm25s", None)
    assert len(placed.search("1 text", "a", lexical=True)) == 1
    with pytest.raises(ImportError, match=r"pip install 'rsm-torch\[text\]'"):
        LexicalIndex(["text"])
