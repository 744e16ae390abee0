"""`rsm inspect --web`: a memory as one page for a browser, which loads nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from rsm_torch.cli.errors import CommandError

if TYPE_CHECKING:
    from rsm_torch.hits import Hit
    from rsm_torch.memory import StreamMemory
    from rsm_torch.text.memory import AgentMemory

    Members = Callable[[Sequence[int]], Mapping[int, Any]]

MOST_TEXTS = 5_000  # of a page; about 2 MB
MOST_ATOMS = 2_000  # of a stream's map
LETTERS = 400  # of a text


def page(
    name: str,
    kind: str,
    memory: StreamMemory,
    streams: Mapping[int, Any],
    members: Members | None = None,
    answers: Sequence[Mapping[str, Any]] = (),
    texts: int = MOST_TEXTS,
) -> str:
    """The page of a memory, with what `answers_of` says of questions.

    Args:
        name, kind: of the memory, as shown.
        streams: what the slots that may hold something are called.
        members: items by the ids of members; None: they have no texts.
        texts: most texts in it, shared out over the streams, the largest atoms first; what is left out is
            counted there.
    """
    counts = memory.counts().atoms
    each = max(1, texts // max(1, len(streams)))
    data = {
        "path": name, "kind": kind, "dim": memory.config.dim, "tau": memory.config.tau,
        "answers": list(answers),
        "streams": [
            _stream(memory, slot, str(called), members, each)
            for slot, called in sorted(streams.items()) if int(counts[slot])
        ],
    }  # fmt: skip
    template = files("rsm_torch.cli").joinpath("inspect.html").read_text("utf-8")
    script = template.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Nothing in a text can end the element it stands in: "<" is never written as itself.
    safe = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return template.replace("{script-hash}", digest).replace("{data}", safe)


def _stream(
    memory: StreamMemory, slot: int, called: str, members: Members | None, texts: int
) -> dict[str, Any]:
    atoms = memory.atoms(slot)
    order = atoms.counts.argsort(descending=True, stable=True)[:MOST_ATOMS]
    spots = _map(atoms.sums[order].numpy())
    held = memory.members(slot)
    of: dict[int, list[int]] = defaultdict(list)
    for id, atom in zip(held.ids.tolist(), held.atoms.tolist(), strict=True):
        of[atom].append(id)
    chosen, room = {}, texts
    for handle in atoms.handles[order].tolist():
        chosen[handle] = of[handle][:room]
        room -= len(chosen[handle])
    last = int(held.ids.max()) if len(held.ids) else -1
    shown = {last, *(id for some in chosen.values() for id in some)}
    items = members(sorted(shown)) if members else {}
    return {
        "name": called,
        "members": int(atoms.counts.sum()),
        "atoms": len(atoms.handles),
        "written": getattr(items.get(last), "created", None),
        "map": [
            {
                "atom": name, "members": count, "x": round(float(x), 4), "y": round(float(y), 4),
                "texts": [_text(id, items.get(id)) for id in chosen[handle]],
            }
            for handle, name, count, (x, y) in zip(
                chosen, atoms.names[order].tolist(), atoms.counts[order].tolist(), spots, strict=True
            )
        ],
    }  # fmt: skip


def _map(sums: Any) -> Any:
    """[M, 2] in [-1, 1]: the first two principal axes of the centroids [M, D]."""
    import numpy as np

    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    x = np.divide(sums, norms, out=np.zeros_like(sums), where=norms > 0)
    x = x - x.mean(0)
    axes = np.linalg.svd(x, full_matrices=False)[2][:2]
    out = np.zeros((len(x), 2))
    out[:, : len(axes)] = x @ axes.T
    return out / max(1e-9, float(np.abs(out).max(initial=0)))


def _text(id: int, item: Any) -> dict[str, Any]:
    if item is None:
        return {"id": str(id)}
    about = {"time": item.time, "role": item.role, "step": item.step, "session": item.session}
    known = {key: value for key, value in about.items() if value is not None}
    return {"id": item.id, "text": _cut(item.text), **known}


def _cut(text: str) -> str:
    return text if len(text) <= LETTERS else f"{text[:LETTERS]} …"


def answers_of(
    memory: AgentMemory, questions: Sequence[str], stream: str | None, max_tokens: int
) -> list[dict[str, Any]]:
    """What each question would get of a stream, and why: for each item of its context its score and
    place by each rule alone, and whether the question names it.

    Raises:
        CommandError: no such stream, or several and none was named.
    """
    streams = memory.streams()
    if stream is None and len(streams) > 1:
        some = ", ".join(map(repr, streams[:8]))
        raise CommandError(f"--stream: there are {len(streams)}; choose one, such as {some}")
    name = streams[0] if stream is None and streams else (stream or "").strip()
    if name not in streams:
        raise CommandError(f"--stream: no stream {name!r}; there are {', '.join(streams[:8])}")
    return [_answer(memory, question, name, max_tokens) for question in questions]


def _answer(memory: AgentMemory, question: str, stream: str, max_tokens: int) -> dict[str, Any]:
    from rsm_torch.text.ranking import AROUND

    every = memory.counts()[stream].items
    context = memory.context(question, stream, max_tokens=max_tokens)
    plain: dict[str, Any] = {"addressing": False}
    rules: dict[str, dict[str, Any]] = {
        "embedding": plain,
        "with words": {**plain, "lexical": True},
        "with surroundings": {**plain, "around": AROUND},
    }
    found = {
        rule: memory.search(question, stream, top_k=every, **how) for rule, how in rules.items()
    }
    named = _named(memory, question, found["embedding"])
    place = {rule: {hit.id: n for n, hit in enumerate(hits, 1)} for rule, hits in found.items()}
    score = {rule: {hit.id: hit.score for hit in hits} for rule, hits in found.items()}
    items = {hit.id: hit for hit in found["embedding"]}
    return {
        "question": question, "stream": stream, "tokens": context.tokens, "budget": max_tokens,
        "text": context.text, "skipped": len(context.skipped), "items": every,
        "rules": list(rules),
        "hits": [
            {
                "id": id, "text": _cut(items[id].text), "atom": items[id].atom, "named": id in named,
                "scores": {r: [round(score[r][id], 4), place[r][id]] for r in rules if id in place[r]},
            }
            for id in context.ids if id in items
        ],
    }  # fmt: skip


def _named(memory: AgentMemory, question: str, hits: Sequence[Hit]) -> set[str]:
    """The ids of those of these items whose step, session or time a question names."""
    from rsm_torch.text import addresses
    from rsm_torch.text.items import Key

    keys = sorted(  # in the order in which they came, by which sessions are counted
        (Key(int(hit.id), hit.step, hit.session, hit.time, hit.created) for hit in hits),
        key=lambda key: key.id,
    )
    return {str(id) for _, id in addresses(question, memory._clock()).select(keys)}
