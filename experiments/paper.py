"""The paper's rows: what each shows, what the paper has, and whether the conditions are the same.

Nothing is loaded here: `experiments.paper_rows` holds the function of each row, by its name with
underscores, from `Given` to a list of parts (`experiments.paper_cells`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Given:
    """What a row is made from: a folder of datasets, whether a quick look is enough, and whom to
    tell "(step, done, total)"."""

    data: Path
    quick: bool
    told: Callable[[str, int, int], None]


@dataclass(frozen=True)
class Row:
    """One experiment.

    Args:
        name: of the command.
        shows: the question it answers.
        takes: the datasets it reads, or what it makes up.
        paper: the paper's figure.
        conditions: how ours differ.
    """

    name: str
    shows: str
    takes: str
    paper: str
    conditions: str


_NO_READER = "No reader and no judge: the share of the evidence in a context stands for the answer's quality. "
_MADE = "MiniLM embeds; the data here are a part of what is published. "

ROWS = (
    Row(
        "operating-point",
        "What does a context of 2,600, 4,000 or 5,000 tokens hold, by memory?",
        "AMA-Bench, 40 episodes (quick: 2)",
        "RSM-full reaches 83 % of Full-Context's quality at 32 % of its tokens, and leads Online K-Means by 3.7, 3.5 and "
        "6.0 points.",
        _NO_READER + _MADE + "Evidence is the steps that questions name.",
    ),
    Row(
        "ablations",
        "What do merge rule, packer and retrieval rule each give? The bridge is offline k-means, packed by groups.",
        "AMA-Bench, 40 episodes, and LoCoMo (quick: 2 of each)",
        "Max-member merging +5.7 points over Online K-Means and +5.5 over DP-means, grouped packing +5.0 over flat, "
        "retrieval rule null, +4.9 over K-Means in the same packer.",
        _NO_READER + _MADE + "Three seeds of the memories.",
    ),
    Row(
        "realmem",
        "What do contexts hold where sessions arrive in another order?",
        "RealMem, 7 personas (quick: the beginning of one), three permutations",
        "RSM-full +0.69 over Budget-RAG, +0.27 (null) to BM25-RAG, +2.97 over Streaming-Proto.",
        _NO_READER + _MADE + "Sessions move between two questions only.",
    ),
    Row(
        "locomo-plus",
        "Are cues found that share no words with the question?",
        "LoCoMo-Plus, flat and grouped by relation",
        "Flat +2.5 points (p 1.00) and grouped +10.0 (p 0.22), 40 questions.",
        _NO_READER + _MADE,
    ),
    Row(
        "boundaries",
        "Where does a compact memory gain nothing?",
        "LoCoMo, and LongMemEval's one sample instance (quick: two short ones)",
        "On raw LoCoMo and LongMemEval the advantage weakens or disappears.",
        _NO_READER + _MADE + "LongMemEval is a sample of one instance here: no result.",
    ),
    Row(
        "toolbench",
        "Which of many APIs serves a request: where does the right one stand?",
        "ToolBench, G1 and G2 queries (quick: one file)",
        "Useful under matched storage (GPT-4o picks and judges; its figures are not in our source).",
        "No reader and no judge: NDCG@5 of each memory's ranking of the APIs. MiniLM embeds; the data here are a part of "
        "what is published.",
    ),
    Row(
        "noise",
        "What is lost where Gaussian noise, σ times as long as the embedding, is added to what is stored?",
        "AMA-Bench, 40 episodes (quick: 2)",
        "RSM-full keeps 101 to 105 % of its quality at σ up to 2, Streaming-Proto and Budget-RAG lose 2 to 4 points.",
        _NO_READER + _MADE + "How the paper scales σ is not known.",
    ),
    Row(
        "injection",
        "What is lost where chunks of other streams are mixed in?",
        "AMA-Bench, 40 episodes (quick: 2)",
        "At 15 foreign chunks RSM-full keeps 88.9 % and leads Streaming-Proto by 5.2 points; at 30, over 60 % of the "
        "chunks, all are alike.",
        _NO_READER + _MADE + "Foreign chunks are counted per 100 of a stream's own, since streams here are long.",
    ),
    Row(
        "seeds",
        "How far do memories vary with the seed?",
        "LoCoMo (quick: 2), seeds of memories and orders of sessions",
        "K-Means and Oja vary 11 to 16 % between seeds, RSM-full 1 to 2 %.",
        _NO_READER + _MADE,
    ),
    Row(
        "growth",
        "How many atoms does a long stitched stream make, with the member fallback and without?",
        "AMA-Bench, 40 episodes one after another (quick: 1,000 chunks)",
        "Sublinear growth to 32,000 chunks; without the fallback 8.84 and 10.56 % more atoms at 16,000 and 32,000.",
        _MADE + "As many chunks as 40 episodes give, not 32,000.",
    ),
    Row(
        "judges",
        "Does the order of the memories depend on who judges?",
        "AMA-Bench, 40 episodes (quick: 2)",
        "The ranking of compact memories is the same under GPT-4o and GPT-5.4 at all three budgets; Full-Context's absolute "
        "score is not.",
        "No reader: three measures of a context stand for judges, the share of the steps that hold the answer, the share of "
        "their text, and of the reference answer's words. " + _MADE,
    ),
    Row(
        "algorithm-e",
        "What do scores by an atom's whole basis cost, beside its first direction and a flat index?",
        "Made-up rows of M directions, rank 8",
        "Full-basis scoring takes longer than Full-RAG from M = 200 on; precomputed bases are 10 to 20 times as fast as "
        "naive ones.",
        "Our own CPU, one thread; ten chunks an atom.",
    ),
)  # fmt: skip
