"""Retrieval figures against values worked by hand, and against scikit-learn's."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from rsm_torch.baselines.protocol import Chunk
from rsm_torch.eval.datasets import Question
from rsm_torch.eval.metrics import (
    carried,
    content_words,
    coverage,
    in_context,
    ndcg,
    of_ranking,
    target,
)


def chunks(*keys: str | None, under: str = "session") -> list[Chunk]:
    return [
        Chunk(str(n), "text", torch.ones(1), metadata={} if key is None else {under: key})
        for n, key in enumerate(keys)
    ]


def needed(keys, evidence, metadata=None, written=None, reference="yes"):
    stream = chunks(*keys)
    question = Question("q", "s", reference, evidence=tuple(evidence), metadata=metadata or {})
    return target(question, stream[:written], carried(stream, "session"))


def test_recall_share_and_span_of_a_context():
    wanted = needed("aabbcd", "abc", {"span": ["a", "b", "c", "d"]})
    # a: both chunks; b: one of two; c and d: none; "9" is no chunk of the stream
    figures = in_context(wanted, ["3", "0", "1", "9"])
    assert figures == {
        "evidence_recall": pytest.approx(2 / 3),
        "evidence_share": pytest.approx((1 + 1 / 2 + 0) / 3),
        "span_recall": pytest.approx(2 / 4),
    }
    assert set(in_context(wanted, ["0", "1", "2", "3", "4", "5"]).values()) == {1.0}
    assert set(in_context(wanted, []).values()) == {0.0}


def test_evidence_not_yet_written_is_nobodys_to_find():
    early = needed("abcd", "ad", written=2)
    assert set(early.wanted) == {"a"}
    assert in_context(early, ["0"])["evidence_recall"] == 1.0
    assert needed("abcd", "d", written=2) is None


@pytest.mark.parametrize(
    ("evidence", "metadata"),
    [
        ("", {}),
        ("z", {}),
        ("a", {"abstention": True}),
        ("a", {"adversarial_answer": "Pixel"}),
    ],
    ids=["no evidence", "unknown evidence", "abstention", "adversarial"],
)
def test_no_evidence_and_abstentions_are_null(evidence, metadata):
    wanted = needed("ab", evidence, metadata)
    assert wanted is None
    assert set(in_context(wanted, ["0"]).values()) == {None}
    assert set(of_ranking(wanted, ["0", "1"]).values()) == {None}


def test_a_stream_without_an_evidence_key_has_no_targets():
    assert carried(chunks("a", "b"), None) == {}


def test_recall_any_all_and_ndcg_count_sessions_not_chunks():
    # sessions in the order of their best chunk: a, b, c, (a chunk of no session), d
    wanted = needed(["a", "b", "a", "c", None, "d"], "bd")
    figures = of_ranking(wanted, ["0", "2", "1", "3", "4", "5"], ranks=(1, 2, 3, 5))
    assert [figures[f"recall_any@{k}"] for k in (1, 2, 3, 5)] == [0, 1, 1, 1]
    assert [figures[f"recall_all@{k}"] for k in (1, 2, 3, 5)] == [0, 0, 0, 1]
    best = 1 + 1 / math.log2(3)
    assert figures["ndcg@1"] == 0
    assert figures["ndcg@2"] == pytest.approx((1 / math.log2(3)) / best)
    assert figures["ndcg@5"] == pytest.approx((1 / math.log2(3) + 1 / math.log2(6)) / best)
    assert set(of_ranking(wanted, None).values()) == {None}
    assert of_ranking(wanted, [])["ndcg@5"] == 0.0


def test_ndcg_of_one_relevant_id_needs_only_its_place():
    assert ndcg(["x", "y", "z"], {"z"}, 3) == pytest.approx(1 / 2)
    assert ndcg(["x", "y", "z"], {"z"}, 2) == 0
    # more relevant ids than places: the best order still fills all k places
    assert ndcg(["x", "y"], {"x", "y", "z"}, 2) == 1
    with pytest.raises(ValueError, match="at least one id"):
        ndcg(["x"], set(), 1)


@pytest.mark.parametrize("k", [1, 3, 5, 10])
def test_ndcg_is_scikit_learns(k):
    from sklearn.metrics import ndcg_score

    draw = random.Random(k)
    for _ in range(20):
        ids = [str(n) for n in range(12)]
        draw.shuffle(ids)
        relevant = set(draw.sample(ids, draw.randint(1, 6)))
        truth = np.array([[float(id in relevant) for id in ids]])
        scores = np.array([[-float(place) for place in range(12)]])
        assert ndcg(ids, relevant, k) == pytest.approx(ndcg_score(truth, scores, k=k))


def test_coverage_counts_whole_distinct_content_words():
    reference = "The agent moved the red hammer, then the RED hammer again to Bench-3."
    assert content_words(reference) == {"agent", "moved", "red", "hammer", "bench", "3"}
    context = "[step 3] Action: move hammers and red HAMMER\nto bench."
    assert coverage(reference, context) == pytest.approx(4 / 6)  # red, hammer, bench, 3
    assert coverage("café Zürich", "zürich CAFÉ") == 1.0
    assert coverage(reference, "") == 0.0


@pytest.mark.parametrize("reference", [None, "", "No.", "It is not."])
def test_coverage_without_content_words_is_null(reference):
    assert coverage(reference, "anything at all") is None
