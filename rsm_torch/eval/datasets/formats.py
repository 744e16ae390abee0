"""The datasets there are: how each is recognised and read, and where its files stand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rsm_torch.eval.datasets import (
    ama_bench,
    beam,
    locomo,
    locomo_plus,
    longmemeval,
    memory_agent_bench,
    mmlu,
    plain,
    realmem,
    toolbench,
)
from rsm_torch.eval.datasets.episode import DatasetError, Episode


@dataclass(frozen=True, slots=True)
class Format:
    """One dataset.

    Args:
        recognises: whether a file's first record is one of it.
        episodes: reads a file (`mmlu`: a folder); the second argument is the id of the only
            episode wanted, or None.
        home: the dataset's folder in a folder of many datasets.
        files: patterns of its files in its own folder; the first that matches anything counts.
        any_json: where no pattern matches, all JSON files of the folder are read.
        stitched: `episodes` takes a third argument, the LoCoMo file.
    """

    recognises: Callable[[Any], bool]
    episodes: Callable[..., Iterator[Episode]]
    home: str = ""
    files: tuple[str, ...] = ()
    any_json: bool = True
    stitched: bool = False


def _by_name_alone(record: Any) -> bool:
    return False


def _chats(size: str) -> tuple[str, ...]:
    """The files of BEAM's chats of a size, "*" for all: in its repository, then on the hub."""
    return (f"chats/{size}/*/chat.json", f"{size}/*/chat.json", f"data/{size}-*.parquet")


_LONGMEMEVAL = {size: f"longmemeval_{size}*.json" for size in ("s", "oracle", "m")}
FORMATS = {
    ama_bench.NAME: Format(
        ama_bench.recognises, ama_bench.episodes, "ama_bench", ("test/*.jsonl", "*.jsonl")
    ),
    realmem.NAME: Format(realmem.recognises, realmem.episodes, "realmem", ("dataset/*.json",)),
    locomo.NAME: Format(
        locomo.recognises, locomo.episodes, "locomo", ("locomo10.json", "data/locomo10.json")
    ),
    locomo_plus.NAME: Format(
        locomo_plus.recognises,
        locomo_plus.episodes,
        "locomo_plus",
        ("locomo_plus.json", "data/locomo_plus.json"),
        stitched=True,
    ),
    locomo_plus.GROUPED: Format(
        _by_name_alone,
        locomo_plus.grouped_episodes,
        "locomo_plus",
        ("locomo_plus.json", "data/locomo_plus.json"),
        any_json=False,
        stitched=True,
    ),
    longmemeval.NAME: Format(
        longmemeval.recognises, longmemeval.episodes, "longmemeval", tuple(_LONGMEMEVAL.values())
    ),
    **{
        f"{longmemeval.NAME}_{size}": Format(
            _by_name_alone, longmemeval.episodes, "longmemeval", (pattern,), any_json=False
        )
        for size, pattern in _LONGMEMEVAL.items()
    },
    beam.NAME: Format(
        beam.recognises, beam.episodes, beam.NAME, (*_chats("*"), "*/chat.json", "chat.json"), False
    ),
    **{
        f"{beam.NAME}_{size}": Format(
            _by_name_alone, beam.episodes, beam.NAME, _chats(size.upper()), any_json=False
        )
        for size in beam.SIZES
    },
    memory_agent_bench.NAME: Format(
        memory_agent_bench.recognises,
        memory_agent_bench.episodes,
        memory_agent_bench.NAME,
        ("data/*.parquet", "*.parquet"),
    ),
    toolbench.NAME: Format(
        toolbench.recognises,
        toolbench.episodes,
        "toolbench",
        ("solvable_queries/test_instruction/*.json", "test_instruction/*.json"),
    ),
    mmlu.NAME: Format(_by_name_alone, mmlu.episodes, "mmlu"),
    plain.TURNS: Format(plain.recognises, plain.turn_episodes),
    plain.TEXT: Format(_by_name_alone, plain.text_episodes),
}


def format_name(dataset: str) -> str:
    """The name in `FORMATS` of a dataset, written with hyphens or underscores.

    Raises:
        DatasetError: there is none; the message lists those there are.
    """
    name = dataset.strip().lower().replace("-", "_")
    if name not in FORMATS:
        raise DatasetError(f"dataset: expected one of {', '.join(FORMATS)}, got {dataset!r}")
    return name


def family(dataset: str) -> str:
    """The dataset that `dataset` is a reading of: `locomo_plus` of `locomo-plus-grouped`,
    `longmemeval` of `longmemeval_s`. What prompts and scores go by."""
    name = format_name(dataset)
    return FORMATS[name].home or name
