"""What the tests of experiments share: made-up hidden states in clusters, and tiny MMLU files."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.mmlu_data import FORMS, Pools, Split, deal
from experiments.mmlu_states import Captured, States
from experiments.tasks import Task, make_task
from rsm_torch.eval.datasets import MMLUQuestion

# More subjects than directions removed, so that something is left to tell them apart by.
DIM, SUBJECTS, STORED, ASKED = 24, 8, 6, 3
MODEL = {"name": "made up", "weights": "0" * 32, "dtype": "float32", "max_tokens": 8}


def question(subject: str, number: int, split: str = "test") -> MMLUQuestion:
    choices = tuple(f"{subject} {letter} {number}" for letter in "wxyz")
    return MMLUQuestion(subject, split, f"What of {subject} is {number}?", choices, "A")


def made_pools(subjects: int = SUBJECTS, stored: int = STORED, asked: int = ASKED) -> Pools:
    names = tuple(f"s{at}" for at in range(subjects))
    questions = tuple(question(name, n) for name in names for n in range(stored + asked))
    spare = tuple(question(name, n, "val") for name in names for n in range(500, 505))
    labels = torch.arange(subjects).repeat_interleave(stored + asked)
    return Pools(names, questions, labels, spare, stored, asked)


def made_states(pools: Pools, splits: list[Split], spread: float = 0.35, seed: int = 0) -> States:
    """Gaussian clusters about a centre for each subject, all far from the origin."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(len(pools.subjects), DIM, generator=generator)

    def about(labels: Tensor) -> Tensor:
        return 3 + centres[labels] + spread * torch.randn(len(labels), DIM, generator=generator)

    questions = about(pools.labels)
    spare = about(torch.arange(len(pools.subjects)).repeat_interleave(5))
    again = torch.cat([split.recalled for split in splits]).unique()
    close = {
        name: questions[again] + 0.05 * torch.randn(len(again), DIM, generator=generator)
        for name in FORMS
    }
    return States(questions, spare, close, again)


def made(seeds: int = 2, **sizes: int) -> tuple[Captured, Pools, list[Split]]:
    pools = made_pools(**sizes)
    splits = [deal(pools, seed, recalled=4) for seed in range(seeds)]
    return Captured({(1, "mean"): made_states(pools, splits)}, MODEL, "made"), pools, splits


def made_task(order: str = "shuffled", seed: int = 0) -> tuple[Task, Pools, Split]:
    captured, pools, splits = made(seed + 1)
    states = captured.spaces[1, "mean"]
    return make_task(states, pools, splits[seed], "transformed", order), pools, splits[seed]


def quietly(step: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def write_mmlu(folder: Path, subjects: tuple[str, ...], test: int, val: int = 2) -> Path:
    """MMLU's files, with `test` and `val` questions of each subject, and two of dev."""
    for split, count, first in (("test", test, 0), ("val", val, 500), ("dev", 2, 700)):
        (folder / split).mkdir(parents=True)
        for subject in subjects:
            rows = [question(subject, first + n) for n in range(count)]
            with open(folder / split / f"{subject}_{split}.csv", "w", newline="") as file:
                csv.writer(file).writerows([[r.question, *r.choices, r.answer] for r in rows])
    return folder


class Letters:
    """A token for each character."""

    pad_token = "_"

    def __call__(
        self, texts: list[str], max_length: int | None = None, **_: Any
    ) -> dict[str, list[list[int]]]:
        return {"input_ids": [[1 + ord(c) % 95 for c in text][:max_length] for text in texts]}


def tiny_model(*_: Any, **__: Any) -> tuple[Any, Any]:
    """A random LLaMA of two layers and its tokenizer, in the place of `load_causal_lm`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2, vocab_size=97,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval(), Letters()


def hand_task() -> Any:
    """Six unit rows of three subjects in four dimensions, in the order 0 0 1 1 2 2; each asked
    question is the axis of its subject."""
    axes = torch.eye(4)
    stored = torch.stack([axes[0], axes[0], axes[1], axes[1], axes[2], axes[2]])
    return SimpleNamespace(
        seed=0,
        stored=stored,
        labels=torch.tensor([0, 0, 1, 1, 2, 2]),
        asked=axes[:3],
        wanted=torch.arange(3),
        again={"same": stored[[0, 2]]},
        again_ids=torch.tensor([0, 2]),
        dim=4,
        tau=0.5,
    )
