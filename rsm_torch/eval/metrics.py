"""What a context or a ranking holds of what a question needs, told without any model.

Evidence is named by ids: turns (LoCoMo), sessions (RealMem, LongMemEval), APIs (ToolBench), or the
steps that the question itself names (AMA-Bench, which names no evidence: they are read as a memory
with addressing reads them, so that what both misread is not seen). An id is found when a piece of
an item that carries it is found. A question without evidence, and one whose right answer is that
the stream does not say, has no figure: None, never 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rsm_torch.baselines.protocol import Chunk
from rsm_torch.eval.datasets import Question

RANKS = (5, 10, 20)
RANKS_OF = {"toolbench": (1, 3, 5)}

_WORD = re.compile(r"\w+")
# Function words, and what answers are wrapped in: nothing that names a thing, a number or an act.
_STOP = frozenset(
    _WORD.findall(
        """a about above after again against all also am an and any are as at be because been before
    being below between both but by can could did do does doing done down during each few for from
    further had has have having he her here hers herself him himself his how i if in into is it its
    itself just may me might more most must my myself no nor not now of off on once only or other
    our ours out over own per s same shall she should so some such t than that the their theirs
    them themselves then there these they this those through to too under until up upon very was we
    were what when where which while who whom whose why will with would you your yours"""
    )
)


@dataclass(frozen=True, slots=True)
class Target:
    """What a question needs of the chunks written before it.

    Args:
        key_of: the evidence id that a chunk carries, by chunk id; one mapping for all questions
            of a stream.
        wanted: the evidence ids needed and the written chunks that carry each. Ids that no
            written chunk carries are left out, since no memory could find them.
        span: where the question names ranges of steps, every step in them; else as `wanted`.
    """

    key_of: Mapping[str, str] = field(repr=False)
    wanted: Mapping[str, frozenset[str]]
    span: frozenset[str]


def carried(chunks: Sequence[Chunk], evidence_key: str | None) -> dict[str, str]:
    """The evidence id that each chunk of a stream carries in its metadata under `evidence_key`, by
    chunk id. Chunks that carry none are left out."""
    if evidence_key is None:
        return {}
    ids = ((chunk.id, chunk.metadata.get(evidence_key)) for chunk in chunks)
    return {chunk: str(key) for chunk, key in ids if key is not None}


def target(
    question: Question, written: Sequence[Chunk], key_of: Mapping[str, str]
) -> Target | None:
    """What `question` needs of the chunks `written`; None where that is not known, or where it is
    known that the stream does not say.

    Args:
        question: its evidence, and with `metadata["span"]` all ids of the ranges it names.
        written: the chunks before it.
        key_of: what `carried` says of the whole stream.
    """
    if abstains(question) or not question.evidence:
        return None
    wanted: dict[str, set[str]] = {}
    span: set[str] = set()
    named, spanned = set(question.evidence), set(question.metadata.get("span") or ())
    for chunk in written:
        key = key_of.get(chunk.id)
        if key is not None and key in named:
            wanted.setdefault(key, set()).add(chunk.id)
        if key is not None and key in spanned:
            span.add(key)
    if not wanted:
        return None
    by_id = {key: frozenset(chunks) for key, chunks in wanted.items()}
    return Target(key_of, by_id, frozenset(span or wanted))


def abstains(question: Question) -> bool:
    """Whether the right answer is that the stream does not say."""
    return bool(question.metadata.get("abstention")) or "adversarial_answer" in question.metadata


def in_context(needed: Target | None, ids: Iterable[str]) -> dict[str, float | None]:
    """Figures of the chunks `ids` of one context, in any order.

    evidence_recall: the share of wanted evidence ids with a chunk in the context.
    evidence_share: over those ids, the mean share of an id's chunks that are in the context:
        stricter where an item is long or a session has many turns.
    span_recall: as evidence_recall, over every step of the ranges that a question names.
    """
    if needed is None:
        return {"evidence_recall": None, "evidence_share": None, "span_recall": None}
    held = set(ids)
    shares = [len(chunks & held) / len(chunks) for chunks in needed.wanted.values()]
    span = needed.span & {needed.key_of[chunk] for chunk in held if chunk in needed.key_of}
    return {
        "evidence_recall": sum(share > 0 for share in shares) / len(shares),
        "evidence_share": math.fsum(shares) / len(shares),
        "span_recall": len(span) / len(needed.span),
    }


def of_ranking(
    needed: Target | None, ranked: Sequence[str] | None, ranks: Sequence[int] = RANKS
) -> dict[str, float | None]:
    """recall_any@k, recall_all@k and ndcg@k of chunk ids, best first, for each k of `ranks`.

    k counts evidence ids (turns, sessions, steps), each at the place of its best chunk; chunks
    that carry none count for themselves. None of a memory that ranks nothing.
    """
    if needed is None or ranked is None:
        return {f"{name}@{k}": None for k in ranks for name in ("recall_any", "recall_all", "ndcg")}
    keys, wanted = _keys(ranked, needed.key_of), needed.wanted.keys()
    figures: dict[str, float | None] = {}
    for k in ranks:
        top = set(keys[:k])
        figures[f"recall_any@{k}"] = float(bool(wanted & top))
        figures[f"recall_all@{k}"] = float(wanted <= top)
        figures[f"ndcg@{k}"] = ndcg(keys, wanted, k)
    return figures


def ndcg(ranked: Sequence[str], relevant: Collection[str], k: int) -> float:
    """Normalised discounted cumulative gain of the first k, every relevant id gaining 1.

    Gain at place i (from 1) is 1 / log2(i + 1), over that of the best possible order (Järvelin and
    Kekäläinen, 2002), as scikit-learn's `ndcg_score` has it.

    Args:
        ranked: ids, best first, each once.
        relevant: at least one id.
        k: at least 1.
    """
    if not relevant or k < 1:
        raise ValueError(f"relevant: expected at least one id and k >= 1, got {relevant!r}, k={k}")
    gained = math.fsum(1 / math.log2(i + 2) for i, id in enumerate(ranked[:k]) if id in relevant)
    best = math.fsum(1 / math.log2(i + 2) for i in range(min(k, len(relevant))))
    return gained / best


def content_words(text: str) -> frozenset[str]:
    """The distinct words of a text that mean something by themselves: runs of letters and digits,
    in lower case, without function words ("the", "of", "not") and without stemming."""
    return frozenset(_WORD.findall(text.lower())) - _STOP


def coverage(reference: str | None, context: str) -> float | None:
    """The share of the reference answer's content words that stand in the context as whole words.

    None without a reference, or where it has no content words ("No.")."""
    wanted = content_words(reference) if reference else frozenset()
    if not wanted:
        return None
    return len(wanted & set(_WORD.findall(context.lower()))) / len(wanted)


def _keys(ranked: Iterable[str], key_of: Mapping[str, str]) -> list[str]:
    """The evidence ids of ranked chunks, each once; a chunk that carries none stands for itself,
    under a name that no evidence id has."""
    return list(dict.fromkeys(key_of.get(id, f"chunk\0{id}") for id in ranked))
