"""Many streams, one memory, one packed context each: `python examples/demo.py`, or `rsm demo`.

Sixteen agents read the documentation of one module of Python's library each and write down what they
read, a few pieces a round. Then each is asked a question. The demo shows what a reader would be sent.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rsm_torch import AgentMemory, calibrate_tau
from rsm_torch.embedders import default_embedder, load_embedder
from rsm_torch.eval.datasets import load
from rsm_torch.files import write_whole
from rsm_torch.provenance import provenance
from rsm_torch.text import Item, chunk
from rsm_torch.tokens import token_counter

# Of each module: what is asked, and which object's documentation answers it.
QUESTIONS = {
    "re": ("Can the replacement given to re.sub be a function?", "sub"),
    "logging": ("How do I log an error together with its exception?", "Logger.exception"),
    "threading": ("Can a thread acquire a reentrant lock it already holds?", "RLock"),
    "statistics": ("Which mean is right for averaging rates such as speeds?", "harmonic_mean"),
    "decimal": ("How do I round a number to a fixed exponent?", "Decimal.quantize"),
    "pathlib": ("How do I recursively list all files matching a pattern?", "Path.rglob"),
    "unittest": ("How do I check that code raises an exception?", "TestCase.assertRaises"),
    "difflib": ("How do I find close matches for a misspelled word?", "get_close_matches"),
    "tarfile": ("How do I read one member as a file object?", "TarFile.extractfile"),
    "socket": ("How is the timeout used when connecting to an address?", "create_connection"),
    "inspect": ("Where do I get the comments that precede a function?", "getcomments"),
    "typing": ("How do I tell the type checker that a value has some type?", "cast"),
    "configparser": ("How do I read settings from a dictionary?", "RawConfigParser.read_dict"),
    "io": ("What does closing a file twice do?", "FileIO.close"),
    "smtplib": ("How do I put the connection into TLS mode?", "SMTP.starttls"),
    "collections": ("How do I list the most common elements?", "Counter.most_common"),
}
CHUNK_TOKENS = 80  # longer than most paragraphs of docstrings
PER_ROUND = 6  # chunks of each stream that are written at once
QUANTILE = 0.70  # of the cosines between a stream's first chunks: the threshold tau


def pages(name: str) -> list[Item]:
    """The documentation of a module, one item for each documented object, each text once."""
    module = importlib.import_module(name)
    found = {"": module.__doc__}
    for symbol in getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]:
        value = vars(module).get(symbol)
        own = (getattr(value, "__module__", None) or "").split(".")[0].lstrip("_")
        if own == name and (inspect.isclass(value) or inspect.isroutine(value)):
            found[symbol] = value.__doc__
            members = vars(value).items() if inspect.isclass(value) else ()
            for attribute, member in members:
                member = getattr(member, "__func__", member)
                told = inspect.isroutine(member) or inspect.isclass(member)
                if attribute[0] != "_" and (told or isinstance(member, property)):
                    found[f"{symbol}.{attribute}"] = member.__doc__
    first: dict[str, str] = {}
    for symbol, text in found.items():
        first.setdefault(inspect.cleandoc(text or ""), symbol)
    texts = [(symbol, text) for text, symbol in first.items() if text]
    return [
        Item(f"{symbol or name}: {text}", step=step, metadata={"symbol": symbol})
        for step, (symbol, text) in enumerate(texts)
    ]


def streams_of(data: Path | None) -> Iterator[tuple[str, list[Item], str, str | None]]:
    """Name, items, question and the object that answers it, if known, of each stream."""
    if data is None:
        yield from ((name, pages(name), *asked) for name, asked in QUESTIONS.items())
        return
    for episode in load(data):
        for name, items in episode.streams.items():
            asked = [question.text for question in episode.questions if question.stream == name]
            yield name, items, (asked or ["What happened, and what is the current state?"])[0], None


def run(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Write the streams, ask each its question; the report, and the context to show."""
    embedder = load_embedder(options.embedder or default_embedder())
    count = token_counter(embedder.tokenizer)
    asked, chunks = {}, {}
    for name, items, *question in islice(streams_of(options.data), options.streams):
        some = islice(items, options.chunks)
        chunks[name] = chunk(some, CHUNK_TOKENS, tokenizer=embedder.tokenizer)[: options.chunks]
        asked[name] = question
    # The threshold of the gate, from the first chunks of every stream.
    firsts = [item.text for some in chunks.values() for item in some[:PER_ROUND]]
    groups = [n for n, some in enumerate(chunks.values()) for _ in some[:PER_ROUND]]
    tau = calibrate_tau(embedder.encode(firsts), QUANTILE, groups=torch.tensor(groups)).tau

    with AgentMemory(embedder, tau=tau) as memory:
        began = time.perf_counter()
        for start in range(0, options.chunks, PER_ROUND):
            memory.add_many(
                {name: some[start : start + PER_ROUND] for name, some in chunks.items()}
            )
        written = time.perf_counter()
        contexts = memory.context_many(
            [question for question, _ in asked.values()], list(asked), options.max_tokens
        )
        read = time.perf_counter()
        rows = []
        for (name, (question, symbol)), context in zip(asked.items(), contexts, strict=True):
            sent = {memory.get(id).metadata.get("symbol") for id in context.ids}
            rows.append({
                "stream": name, "question": question, "chunks": len(chunks[name]),
                "atoms": memory.counts()[name].atoms,
                "tokens_written": sum(count(item.text) for item in chunks[name]),
                "tokens_sent": context.tokens, "answer_sent": symbol and symbol in sent,
            })  # fmt: skip
        draw(memory, list(chunks), options.out / "memory.png")
        nbytes = memory.nbytes()
    totals = {
        name: sum(row[name] for row in rows)
        for name in ("chunks", "atoms", "tokens_written", "tokens_sent")
    }
    known = [row["answer_sent"] for row in rows if row["answer_sent"] is not None]
    totals |= {"bytes": nbytes["total"], "answers_sent": sum(known) if known else None}
    totals |= {"write_seconds": written - began, "read_seconds": read - written}
    settings = {"embedder": embedder.name, "tau": tau, "max_tokens": options.max_tokens}
    report = {"settings": settings, **provenance(), "streams": rows, "totals": totals}
    return report, contexts[0].text


def draw(memory: AgentMemory, names: Sequence[str], file: Path) -> None:
    """The first stream's chunks by atom, and how slowly atoms grow with chunks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 5.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    held = {name: memory.tensors.members(memory.slot(name)) for name in names}
    first = held[names[0]]
    x = first.vectors.cpu().numpy()
    points = np.linalg.svd(x - x.mean(0), full_matrices=False)
    points = points[0][:, :2] * points[1][:2]
    left.scatter(*points.T, c=first.atoms.cpu().numpy(), cmap="tab20", s=46, edgecolors="white")
    left.set_title(f"Chunks of stream “{names[0]}” by atom, first two principal components")
    for name, members in held.items():
        _, opened = np.unique(members.atoms.cpu().numpy(), return_index=True)
        grown = np.isin(np.arange(len(members.atoms)), opened).cumsum()
        right.plot([0, *grown], label=f"{name} ({grown[-1]})")
    longest = max(len(members.atoms) for members in held.values())
    right.plot([0, longest], [0, longest], "k--", label="an atom per chunk")
    right.set(xlabel="chunks written", ylabel="atoms", title="Atoms grow more slowly than chunks")
    right.legend(fontsize=7.5, ncols=2, loc="upper left")
    figure.savefig(file, format="png")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--data", type=Path, help="a dataset file instead of Python's own docs")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--chunks", type=int, default=72, help="most of each stream")
    parser.add_argument("--max-tokens", type=int, default=500, help="of each context")
    parser.add_argument("--out", type=Path, default=Path("rsm-demo"))
    parser.add_argument("--embedder", help="model id or folder")
    parser.add_argument("--json", action="store_true", help="the report on standard output")
    options = parser.parse_args(arguments)
    for name, least in (("streams", 1), ("chunks", 2), ("max_tokens", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')}: expected at least {least}")
    options.out.mkdir(parents=True, exist_ok=True)
    report, context = run(options)
    text = json.dumps(report, indent=2, ensure_ascii=False)
    write_whole(options.out / "results.json", f"{text}\n".encode())
    write_whole(options.out / "context.txt", f"{context}\n".encode())
    if options.json:
        print(text)
        return
    first, totals = report["streams"][0], report["totals"]
    print(f"{first['stream']}: {first['question']}\n\n{context}\n")
    for row in report["streams"]:
        found = {True: "answer sent", False: "answer not sent", None: ""}[row["answer_sent"]]
        print(f"{row['stream']:16.16} {row['chunks']:4} chunks {row['atoms']:4} atoms "
              f"{row['tokens_written']:7,} tokens {row['tokens_sent']:6,} sent  {found}")  # fmt: skip
    print(
        f"{totals['chunks']:,} chunks in {totals['atoms']:,} atoms, {totals['bytes']:,} bytes; "
        f"{totals['answers_sent']} answers sent; written in {totals['write_seconds']:.1f} s with "
        f"embedding; saved: memory.png, context.txt, results.json in {options.out}"
    )


if __name__ == "__main__":
    main()
