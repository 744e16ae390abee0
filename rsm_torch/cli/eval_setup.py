"""From the options of `rsm eval` to a run that can start."""

from __future__ import annotations

import hashlib
import json
import random
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rsm_torch.cli import embedding
from rsm_torch.cli.errors import CommandError
from rsm_torch.cli.eval_models import Asked, make_models
from rsm_torch.eval.datasets import Episode
from rsm_torch.eval.judges.protocol import Judge
from rsm_torch.eval.preparing import QUANTILE, Report, Rows
from rsm_torch.eval.readers.protocol import Reader

if TYPE_CHECKING:
    from rsm_torch.eval.comparing import Ready

HELD_OUT = 10  # episodes after the limit that the threshold is calibrated on
RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options, parsed but not yet checked against anything; named as on the command line."""

    dataset: str
    data: Path | None
    methods: str
    budgets: Sequence[int]
    seeds: Sequence[int]
    limit: int | None
    sample: int | None
    models: Asked
    tau: str | None
    embedder: str | None
    tokenizer: str | None


def set_up(request: Request, out: Path | None, report: Report) -> tuple[Ready, Path]:
    """Load, cut and embed the data, make reader and judges, settle the folder.

    What is quick to find wrong is found first. Without `out` the folder is named by the settings,
    so that the same command finds it again.
    """
    from rsm_torch.baselines.methods import GROUPS, method_names
    from rsm_torch.eval.comparing import get_ready
    from rsm_torch.eval.manifest import settle
    from rsm_torch.eval.readers import as_chat
    from rsm_torch.provenance import provenance

    request, dataset = _of_file(request)
    if ":" in request.methods and "" not in sys.path:
        sys.path.insert(0, "")  # memories of yours stand in this folder
    methods = method_names(request.methods)
    talking = [name for name in methods if name in GROUPS["all-llm"]]
    if talking and request.models.chat.strip() == "none":
        raise CommandError(
            f"--chat: {', '.join(talking)}: run by a language model; name one, as openai:MODEL"
        )
    episodes, beyond = _episodes(dataset, request)
    reader, judges, chat = make_models(dataset, request.models)
    embedder = embedding.open_embedder(request.embedder)
    own = embedding.tokenizer_of(embedder)
    tokenizer = _counting(request, reader, judges, own)
    rows = _rows(embedder)
    threshold = _threshold(request, episodes, beyond, embedder, own, rows)
    ready = get_ready(
        dataset, episodes, methods, embedder=embedder, own=own, tokenizer=tokenizer, threshold=threshold,
        budgets=request.budgets, seeds=request.seeds, reader=reader, judges=judges,
        data=_hashes(dataset, request, episodes), rows=rows, chat=None if chat is None else as_chat(chat),
        talks=None if chat is None else chat.describe(), limit=request.limit, sample=request.sample,
        report=report,
    )  # fmt: skip
    folder = out or RUNS / f"{dataset}-{_digest(ready.settings)}"
    settle(folder, ready.settings, provenance(), shlex.join(["rsm", *sys.argv[1:]]))
    return ready, folder


def _of_file(request: Request) -> tuple[Request, str]:
    """The request with its data, and the dataset's name, where that is a file of one."""
    from rsm_torch.eval.datasets import detect, format_name

    file = Path(request.dataset)
    if request.data is None and file.is_file():
        return replace(request, data=file), detect(file)
    return request, format_name(request.dataset)


def _episodes(dataset: str, request: Request) -> tuple[list[Episode], list[Episode]]:
    """The episodes to evaluate, and some that come after them."""
    from rsm_torch.eval.datasets import at_session_level, load

    every = load(request.data, dataset)
    if dataset.startswith("longmemeval"):
        every = map(at_session_level, every)
    most = None if request.limit is None else request.limit + HELD_OUT
    found = list(islice(every, most))
    if not any(episode.questions for episode in found[: request.limit]):
        raise CommandError(f"--data: {request.data} holds no questions of {dataset}")
    chosen, beyond = found[: request.limit], found[len(found[: request.limit]) :]
    return chosen if request.sample is None else sampled(chosen, request.sample), beyond


def sampled(episodes: list[Episode], most: int) -> list[Episode]:
    """The same with at most so many questions in all, always the same ones, and without the
    episodes that none is asked of."""
    places = [(e, q) for e, episode in enumerate(episodes) for q in range(len(episode.questions))]
    kept = set(random.Random(0).sample(places, min(most, len(places))))
    asked = [
        replace(episode, questions=[q for at, q in enumerate(episode.questions) if (e, at) in kept])
        for e, episode in enumerate(episodes)
    ]
    return [episode for episode in asked if episode.questions]


def _counting(request: Request, reader: Reader, judges: Sequence[Judge], own: Any) -> Any:
    """The tokenizer that budgets are meant in: the one named, else that of the local model that
    reads the contexts, else the embedder's."""
    if request.tokenizer is not None:
        return embedding.load_tokenizer(request.tokenizer)
    for model in (reader, *judges):
        local = getattr(model, "local", None)
        if local is not None:
            return local.tokenizer
    return own


def _rows(embedder: Any) -> Rows:
    """Where embeddings of this space are kept."""
    from rsm_torch.cache import RowCache, cache_folder

    name = _digest([embedder.name, embedder.dim])
    return RowCache(cache_folder("embeddings") / f"{name}.rows")


def _threshold(
    request: Request,
    episodes: list[Episode],
    beyond: list[Episode],
    embedder: Any,
    tokenizer: Any,
    rows: Rows,
) -> dict[str, Any]:
    """tau, and where it is from."""
    from rsm_torch.eval.preparing import calibrate

    given = embedding.given_tau(request.tau, embedder.name)
    if given is not None:
        return {"tau": given, "from": "given"}
    apart = any(episode.streams for episode in beyond)
    chosen = beyond if apart else episodes
    try:
        found = calibrate(chosen, embedder, tokenizer, rows)
    except ValueError as error:
        raise CommandError(f"--tau: cannot be calibrated here ({error}); give one") from error
    return {
        "tau": found.tau,
        "from": "episodes beyond the limit" if apart else "the evaluated episodes",
        "episodes": [episode.id for episode in chosen],
        "examples": found.examples,
        "quantile": QUANTILE,
    }


def _hashes(dataset: str, request: Request, episodes: list[Episode]) -> dict[str, Any]:
    from rsm_torch.eval.datasets.places import files_of
    from rsm_torch.eval.sources import content_hash, file_hashes

    files = {}
    if request.data is not None and request.data.exists():  # else they are the hub's
        files = file_hashes(files_of(request.data, dataset))
    return {"data_sha256": content_hash(episodes), "files": files}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
