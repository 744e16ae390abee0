"""All memories under test, by name.

| name | what it is |
|---|---|
| no-memory, full-context | nothing; the whole stream, or its beginning and its end |
| full-rag | every embedding, the nearest first |
| budget-rag | a reservoir of `Settings.budget_items` chunks of each stream: a uniform sample of what was observed so far |
| bm25-rag, hybrid-rag | words alone; full-rag fused with them |
| rag-kmeans, streaming-proto, online-kmeans, dp-means, oja | rival clusterings (see `vectors`) |
| rag-context | `AgentMemory` without atoms: what is due to its reading |
| rsm-full | `AgentMemory` by embeddings alone: max-member gate, float32 rows, v1 atom scores |
| rsm-full-int8, rsm-pq | how rows and bases are held |
| rsm-centroid | centroids alone, nothing of single chunks (control) |
| rsm-cent-merge, rsm-cent-retr | a gate by centroids only; atoms scored by their centroids |
| rsm-algorithm-e | rank 8, chunks scored in the atom's subspace (Algorithm E) |
| rsm-around | scores averaged over the text around each chunk |
| rsm-lexical | fused with BM25 by reciprocal rank, as far as words cover the question |
| rsm-addressing | steps, sessions and dates that the question names come first |
| rsm-addressing-lexical(-around) | these two; and around, no atom before another |
| rsm-context | `AgentMemory.context` as it is by default |
| a-mem, memory-bank, mem-gpt | run by a language model |

rsm-pq and rsm-centroid are read by `VectorRanked`, as the rivals are: `AgentMemory` keeps one codebook for
all its streams, and no memory without rows.

`package.module:Class` names a memory of yours: anything that, called with `Settings`, gives a
`rsm_torch.baselines.protocol.Memory`. So does a name of the entry points `rsm_torch.methods` of an installed
package.

A name may say how its hits are packed: "rsm-full@timeline" or "rsm-full@grouped:best_last", a layout
and an order of `pack`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, get_args

from rsm_torch.baselines.agent import AgentRow
from rsm_torch.baselines.bm25_rag import BM25RAG
from rsm_torch.baselines.full_context import FullContext
from rsm_torch.baselines.no_memory import NoMemory
from rsm_torch.baselines.protocol import Memory
from rsm_torch.baselines.settings import Chat, Embed, Settings
from rsm_torch.baselines.vector_ranked import HybridRAG, VectorRanked
from rsm_torch.layout import Layout, Order
from rsm_torch.text.ranking import AROUND

__all__ = ["GROUPS", "METHODS", "Chat", "Embed", "Settings", "make_memory", "method_names"]

Maker = Callable[[Settings], Memory]


def _vectors(name: str, **more: Any) -> Maker:
    return partial(VectorRanked, name, **more)


def _budget_rag(settings: Settings) -> Memory:
    return VectorRanked(
        "budget-rag", settings, "flat", "budget-rag-reservoir", max_items=settings.budget_items
    )


def _rsm(name: str, config: Mapping[str, Any] | None = None, **reading: Any) -> Maker:
    """`AgentMemory` by embeddings alone, atom by atom, but for what `reading` says."""
    plain = {"addressing": False, "lexical": False, "around": 0, "beside": 0, "brief": None}
    made = {"best_first": True, **plain, **reading}
    return lambda settings: AgentRow(name, settings, config, **made)


def _agentic(name: str) -> Maker:
    def make(settings: Settings) -> Memory:
        module = import_module("rsm_torch.baselines.agentic")
        return getattr(module, f"make_{name.replace('-', '_')}")(settings)

    return make


_RIVALS: dict[str, Maker] = {
    "no-memory": NoMemory,
    "full-context": FullContext,
    "full-rag": _vectors("full-rag", layout="flat"),
    "budget-rag": _budget_rag,
    "bm25-rag": BM25RAG,
    "hybrid-rag": partial(HybridRAG, "hybrid-rag"),
    "rag-context": lambda settings: AgentRow("rag-context", settings, atoms=False),
    **{
        name: _vectors(name)
        for name in ("rag-kmeans", "streaming-proto", "online-kmeans", "dp-means", "oja")
    },
}
_BOTH: dict[str, Any] = {"addressing": True, "lexical": True}
_RSM: dict[str, Maker] = {
    "rsm-full": _rsm("rsm-full"),
    "rsm-full-int8": _rsm("rsm-full-int8", {"storage": "int8"}),
    "rsm-pq": _vectors("rsm-pq"),
    "rsm-centroid": _vectors("rsm-centroid"),
    "rsm-cent-merge": _rsm("rsm-cent-merge", {"gate": "centroid"}),
    "rsm-cent-retr": _rsm("rsm-cent-retr", atom_score="centroid"),
    "rsm-algorithm-e": _rsm("rsm-algorithm-e", {"rank": 8}, chunk_score="subspace"),
    "rsm-around": _rsm("rsm-around", around=AROUND),
    "rsm-lexical": _rsm("rsm-lexical", lexical=True),
    "rsm-addressing": _rsm("rsm-addressing", addressing=True),
    "rsm-addressing-lexical": _rsm("rsm-addressing-lexical", **_BOTH),
    "rsm-addressing-lexical-around": _rsm(
        "rsm-addressing-lexical-around", **_BOTH, around=AROUND, best_first=False
    ),
    "rsm-context": lambda settings: AgentRow("rsm-context", settings),
}
_LLM = {name: _agentic(name) for name in ("a-mem", "memory-bank", "mem-gpt")}

_VERBS = ("observe", "context", "nbytes", "counts")
_UNPACKED = {"no-memory", "full-context", *_LLM}  # their contexts are not made by `pack`

METHODS: Mapping[str, Maker] = MappingProxyType(_RIVALS | _RSM | _LLM)

GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "all": tuple(METHODS),
        "all-offline": (*_RIVALS, *_RSM),  # no language model runs them
        "all-llm": tuple(_LLM),
        "rsm": tuple(_RSM),
        "baselines": (*_RIVALS, *_LLM),
    }
)


def method_names(spec: str) -> list[str]:
    """Names of methods, each once, from a list like "all-offline,a-mem" of names and groups.

    Raises:
        ValueError: an empty list, a name that is neither, with those that are close, or a packing
            that there is not.
    """
    if not isinstance(spec, str):
        raise TypeError(f"methods: expected names with commas between, got {spec!r}")
    asked = [name.strip() for name in spec.split(",") if name.strip()]
    if not asked:
        raise ValueError(f"methods: expected at least one name; groups are {', '.join(GROUPS)}")
    found: dict[str, None] = {}
    for name in asked:
        if name not in GROUPS:
            _parts(name, [*GROUPS, *METHODS])
        found |= dict.fromkeys(GROUPS.get(name, (name,)))
    return list(found)


def make_memory(name: str, settings: Settings, maker: Maker | None = None) -> Memory:
    """A new, empty memory of a method; of `maker`, if the name is not one of ours.

    Raises:
        TypeError: settings of another kind.
        ValueError: an unknown name, with those that are close; or a method that is run by a
            language model, without `settings.chat`.
    """
    method, packing = (name, {}) if maker else _parts(name, list(METHODS))
    if not isinstance(settings, Settings):
        raise TypeError(f"settings: expected Settings, got {type(settings).__name__}")
    if method in _LLM and settings.chat is None:
        raise ValueError(f"chat: {method} is run by a language model; give Settings(chat=...)")
    maker = maker or METHODS.get(method) or _of_others(method)
    memory = maker(replace(settings, **packing))
    if missing := [verb for verb in _VERBS if not callable(getattr(memory, verb, None))]:
        raise ValueError(
            f"methods: {method!r} gives a {type(memory).__name__}, which has no {', '.join(missing)}; "
            "rsm_torch.baselines.protocol.Memory says what a memory needs"
        )
    memory.name = name
    return memory


def _of_others(name: str) -> Maker:
    """What makes a memory that is none of ours: of a name "package.module:Class", or an entry point."""
    own = next(iter(entry_points(group="rsm_torch.methods", name=name)), None)
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute) if own is None else own.load()
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"methods: cannot load {name!r} ({error}); expected package.module:Class of a module that can "
            "be imported here"
        ) from error
    if not callable(found):
        raise TypeError(
            f"methods: {name!r} is a {type(found).__name__}, expected a class or function"
        )
    return found


def _is_of_others(name: str) -> bool:
    return ":" in name or any(entry_points(group="rsm_torch.methods", name=name))


def _parts(name: str, known: list[str]) -> tuple[str, dict[str, Any]]:
    """The method and the settings of its packing in a name like "rsm-full@grouped:best_last"."""
    method, at, packing = name.partition("@") if isinstance(name, str) else (name, "", "")
    if method not in METHODS and not (isinstance(name, str) and _is_of_others(method)):
        raise ValueError(_unknown(method, known))
    if not at:
        return method, {}
    if method in _UNPACKED or method not in METHODS:
        raise ValueError(f"methods: {name!r}: {method} has a form of its own; write {method!r}")
    layout, _, order = packing.partition(":")
    for what, value, kind in (
        ("a layout", layout, Layout),
        ("an order", order or "best_first", Order),
    ):
        if value not in get_args(kind):
            allowed = ", ".join(get_args(kind))
            raise ValueError(f"methods: {name!r}: expected {what} of {allowed}, got {value!r}")
    return method, {"layout": layout, "order": order or "best_first"}


def _unknown(name: object, known: list[str]) -> str:
    close = difflib.get_close_matches(str(name), known, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
    return f"methods: no method {name!r}; {hint}"
