"""`evaluate`: memories over episodes, from a program."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rsm_torch.baselines.methods import make_memory
from rsm_torch.baselines.protocol import Memory
from rsm_torch.baselines.settings import Chat, Settings
from rsm_torch.embedders import Embedder, default_embedder, load_embedder
from rsm_torch.eval.counting import CachedCounter
from rsm_torch.eval.datasets import Episode
from rsm_torch.eval.judges.protocol import Judge
from rsm_torch.eval.manifest import describe, settle
from rsm_torch.eval.prepared import Prepared
from rsm_torch.eval.preparing import Report, Rows, calibrate, embed_all, prepare, quiet, window
from rsm_torch.eval.readers.protocol import NoReader, Reader
from rsm_torch.eval.run import Plan, run
from rsm_torch.eval.run_folder import RESULTS, Row, RunFolder, read_last
from rsm_torch.eval.sources import content_hash
from rsm_torch.provenance import provenance

Maker = Callable[[Settings], Memory]


@dataclass(frozen=True)
class Ready:
    """A run that can start. `settings`: what decides its results."""

    plan: Plan
    prepared: Prepared
    settings: dict[str, Any]


def evaluate(
    episodes: Sequence[Episode],
    methods: Sequence[str | Maker],
    *,
    budgets: Sequence[int] = (4000,),
    seeds: Sequence[int] = (0,),
    tau: float | None = None,
    embedder: Any = None,
    tokenizer: Any = None,
    reader: Reader | None = None,
    judges: Sequence[Judge] = (),
    dataset: str = "turns",
    out: str | Path | None = None,
    progress: Report = quiet,
) -> list[Row]:
    """What the contexts of memories hold of what each question needs, and what a reader does with them.

    Args:
        episodes: streams of items, and questions asked of them; see `rsm_torch.eval.datasets`.
        methods: names as `rsm eval --methods` takes them, also "package.module:Class"; or classes and
            functions that make a `rsm_torch.baselines.protocol.Memory` of `Settings`.
        budgets: tokens of a context.
        seeds: each gives every method a memory of its own.
        tau: threshold of the memories that have one; None: calibrated on at most 50 chunks.
        embedder: as for `AgentMemory`; it embeds for all memories.
        tokenizer: counts contexts; None: the embedder's.
        reader, judges: as `rsm_torch.eval.readers.make_reader` and `rsm_torch.eval.judges.make_judge` make
            them; without them contexts alone are judged.
        dataset: a name of `rsm_torch.eval.datasets.FORMATS`, which decides prompts.
        out: a folder to keep the run in, which `rsm report` reads; the same call goes on where it was
            stopped.
        progress: called with (step, done, of how many).

    Returns:
        A line for each question, method, budget and seed, as docs/evaluation.md has them: "method",
        "budget", "seed", "episode", "question", "tokens", "metrics" ("evidence_recall" and others; None
        where the evidence is not known), "answer", "scores", "error" and others.

    Raises:
        ValueError: no episode has a question; a method that cannot be loaded or lacks a verb; `out` holds
            another run.
    """
    if not any(episode.questions for episode in episodes):
        raise ValueError("episodes: none of them has a question")
    model = load_embedder(default_embedder() if embedder is None else embedder)
    own = getattr(model, "tokenizer", None) or tokenizer
    if own is None:
        raise ValueError(f"tokenizer: {model.name} has none; give the one that counts contexts")
    makers = {one if isinstance(one, str) else _name(one): one for one in methods}
    threshold = {"tau": tau, "from": "given"}
    if tau is None:
        threshold = {"tau": calibrate(episodes, model, own).tau, "from": "the evaluated episodes"}
    ready = get_ready(
        dataset, episodes, list(makers), embedder=model, own=own, tokenizer=tokenizer or own,
        threshold=threshold, budgets=budgets, seeds=seeds, reader=reader or NoReader(), judges=judges,
        data={"data_sha256": content_hash(episodes), "files": {}}, report=progress,
        makers={name: one for name, one in makers.items() if not isinstance(one, str)},
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        place = Path(folder if out is None else out)
        settle(place, ready.settings, provenance(), shlex.join(sys.argv))
        with RunFolder(place) as lines:
            run(ready.plan, ready.prepared, lines, progress)
        return read_last(place / RESULTS)


def get_ready(
    dataset: str,
    episodes: Sequence[Episode],
    methods: Sequence[str],
    *,
    embedder: Embedder,
    own: Any,
    tokenizer: Any,
    threshold: Mapping[str, Any],
    budgets: Sequence[int],
    seeds: Sequence[int],
    reader: Reader,
    judges: Sequence[Judge],
    data: Mapping[str, Any],
    rows: Rows | None = None,
    chat: Chat | None = None,
    talks: Mapping[str, Any] | None = None,
    limit: int | None = None,
    sample: int | None = None,
    report: Report = quiet,
    makers: Mapping[str, Maker] | None = None,
) -> Ready:
    """Cut and embed episodes, and say what a run of them depends on.

    Args:
        own: the embedder's tokenizer, which chunks are measured by; `tokenizer` counts contexts.
        threshold: tau and where it is from; `data`: hashes of the files and of what was read.
        rows: where embeddings are kept.
        chat, talks: what memories talk to, and what describes it.
        makers: of methods that are no names of ours.
    """
    prepared = prepare(dataset, episodes, embedder, own, rows, report)
    count = CachedCounter(tokenizer)

    def make(name: str, seed: int) -> Memory:
        settings = Settings(
            dim=prepared.dim, tokenizer=count, tau=threshold["tau"], seed=seed, chat=chat,
            embed=lambda texts: embed_all(texts, embedder, rows),
        )  # fmt: skip
        return make_memory(name, settings, (makers or {}).get(name))

    settings = describe(
        prepared, data=data, embedder=embedder, tokenizer=tokenizer, chunk_tokens=window(embedder),
        threshold=threshold, methods=methods, budgets=budgets, seeds=seeds, limit=limit, sample=sample,
        reader=reader, judges=judges, chat=talks,
    )  # fmt: skip
    return Ready(Plan(methods, budgets, seeds, make, count, reader, judges), prepared, settings)


def _name(maker: Maker) -> str:
    if not callable(maker):
        raise TypeError(f"methods: expected a name, a class or a function, got {maker!r:.80}")
    return str(getattr(maker, "__name__", type(maker).__name__))
