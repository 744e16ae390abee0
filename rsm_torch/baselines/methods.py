"""All memories under test, by name.

A name may say how its hits are packed: "rsm-full@timeline" or "rsm-full@grouped:best_last", a layout
and an order of `pack`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, get_args

from rsm_torch.baselines import clusterers, rag, rsm
from rsm_torch.baselines.bm25_rag import BM25RAG
from rsm_torch.baselines.full_context import FullContext
from rsm_torch.baselines.no_memory import NoMemory
from rsm_torch.baselines.protocol import Memory
from rsm_torch.baselines.settings import Chat, Embed, Settings
from rsm_torch.layout import Layout, Order

__all__ = ["GROUPS", "METHODS", "Chat", "Embed", "Settings", "make_memory", "method_names"]

Maker = Callable[[Settings], Memory]


def _a_mem(settings: Settings) -> Memory:
    from rsm_torch.baselines.agentic import make_a_mem

    return make_a_mem(settings)


def _memory_bank(settings: Settings) -> Memory:
    from rsm_torch.baselines.agentic import make_memory_bank

    return make_memory_bank(settings)


def _mem_gpt(settings: Settings) -> Memory:
    from rsm_torch.baselines.agentic import make_mem_gpt

    return make_mem_gpt(settings)


_RIVALS: dict[str, Maker] = {
    "no-memory": NoMemory,
    "full-context": FullContext,
    "full-rag": rag.full_rag,
    "budget-rag": rag.budget_rag,
    "bm25-rag": BM25RAG,
    "hybrid-rag": rag.hybrid_rag,
    "rag-context": rag.rag_context,
    "rag-kmeans": clusterers.rag_kmeans,
    "streaming-proto": clusterers.streaming_proto,
    "online-kmeans": clusterers.online_kmeans,
    "dp-means": clusterers.dp_means,
    "oja": clusterers.oja,
}
_RSM: dict[str, Maker] = {
    "rsm-full": rsm.rsm_full,
    "rsm-full-int8": rsm.rsm_full_int8,
    "rsm-pq": rsm.rsm_pq,
    "rsm-centroid": rsm.rsm_centroid,
    "rsm-cent-merge": rsm.rsm_cent_merge,
    "rsm-cent-retr": rsm.rsm_cent_retr,
    "rsm-algorithm-e": rsm.rsm_algorithm_e,
    "rsm-around": rsm.rsm_around,
    "rsm-lexical": rsm.rsm_lexical,
    "rsm-addressing": rsm.rsm_addressing,
    "rsm-addressing-lexical": rsm.rsm_addressing_lexical,
    "rsm-addressing-lexical-around": rsm.rsm_addressing_lexical_around,
    "rsm-context": rsm.rsm_context,
}
_LLM: dict[str, Maker] = {"a-mem": _a_mem, "memory-bank": _memory_bank, "mem-gpt": _mem_gpt}

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


def make_memory(name: str, settings: Settings) -> Memory:
    """A new, empty memory of a method.

    Raises:
        TypeError: settings of another kind.
        ValueError: an unknown name, with those that are close; or a method that is run by a
            language model, without `settings.chat`.
    """
    method, packing = _parts(name, list(METHODS))
    if not isinstance(settings, Settings):
        raise TypeError(f"settings: expected Settings, got {type(settings).__name__}")
    if method in _LLM and settings.chat is None:
        raise ValueError(f"chat: {method} is run by a language model; give Settings(chat=...)")
    memory = METHODS[method](replace(settings, **packing))
    memory.name = name
    return memory


def _parts(name: str, known: list[str]) -> tuple[str, dict[str, Any]]:
    """The method and the settings of its packing in a name like "rsm-full@grouped:best_last"."""
    method, at, packing = name.partition("@") if isinstance(name, str) else (name, "", "")
    if method not in METHODS:
        raise ValueError(_unknown(method, known))
    if not at:
        return method, {}
    if method in _UNPACKED:
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
