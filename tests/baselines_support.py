"""Made-up streams for the memories under test."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from rsm_torch.baselines.methods import Settings
from rsm_torch.baselines.protocol import Chunk, Query

D = 16
WORDS = [
    "amber",
    "basin",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "heath",
    "inlet",
    "knoll",
    "larch",
    "marsh",
]


def tokens(text: str) -> int:
    """A counter whose parts do not add up: a line break counts with what stands before it."""
    return len(re.findall(r"\w+\n?|[^\w\s]+|\s+", text))


def settings(**more) -> Settings:
    return Settings(**({"dim": D, "tokenizer": tokens, "tau": 0.6, "seed": 3} | more))


def vectors(n: int, seed: int, centres: int = 3) -> Tensor:
    """[n, D] around a few centres."""
    g = torch.Generator().manual_seed(seed)
    centre = torch.randn(centres, D, generator=g)
    pick = torch.randint(centres, (n,), generator=g)
    return centre[pick] + 0.7 * torch.randn(n, D, generator=g)


def stream(name: str, n: int, seed: int, centres: int = 3) -> list[Chunk]:
    """Chunks that say which stream and step they are of, in a few words more."""
    return [
        Chunk(
            id=f"{name}/{step}",
            text=f"{name} saw {WORDS[step % 12]} and {WORDS[(step * step) % 11]} in round {step}. " * 2,
            vector=vector,
            time=1.7e9 + 60 * step,
            step=step,
            role="user",
        )
        for step, vector in enumerate(vectors(n, seed, centres))
    ]  # fmt: skip


def queries(name: str, n: int = 3, seed: int = 9) -> list[Query]:
    texts = ("where was cedar in round 4?", "what happened at step 7?", "ember, steps 3 to 6")
    return [
        Query(texts[k % 3], name, vector, id=f"{name}?{k}")
        for k, vector in enumerate(vectors(n, seed))
    ]


def toy(*rows: tuple[str, list[float]], **fields) -> list[Chunk]:
    """Chunks of given texts and the first numbers of their vectors."""
    out = []
    for place, (text, numbers) in enumerate(rows):
        vector = torch.zeros(D)
        vector[: len(numbers)] = torch.tensor(numbers)
        out.append(Chunk(f"c{place}", text, vector, **{k: v[place] for k, v in fields.items()}))
    return out


def ask(text: str, *numbers: float, stream: str = "a") -> Query:
    vector = torch.zeros(D)
    vector[: len(numbers)] = torch.tensor(numbers)
    return Query(text, stream, vector)
