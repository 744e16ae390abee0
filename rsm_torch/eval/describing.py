"""What decides a run's results, as the manifest has it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rsm_torch.embedders import Embedder
from rsm_torch.eval.judges.protocol import Judge
from rsm_torch.eval.prepared import Prepared
from rsm_torch.eval.prompts import prompts_hash
from rsm_torch.eval.readers.protocol import NoReader, Reader


def settings(
    prepared: Prepared,
    *,
    data: Mapping[str, Any],
    embedder: Embedder,
    tokenizer: Any,
    chunk_tokens: int,
    threshold: Mapping[str, Any],
    methods: Sequence[str],
    budgets: Sequence[int],
    seeds: Sequence[int],
    limit: int | None,
    sample: int | None,
    reader: Reader,
    judges: Sequence[Judge],
    chat: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Everything that another run must share to give the same lines.

    Args:
        prepared: the dataset as it was cut.
        data: hashes of the files and of what was read from them.
        tokenizer: what contexts are counted by.
        chunk_tokens: the most tokens of a chunk.
        threshold: tau and where it is from.
        chat: of the model that runs memories; None without one.
    """
    return {
        "dataset": prepared.dataset,
        "limit": limit,
        "sample": sample,
        "episodes": len(prepared.episodes),
        "questions": len(prepared.questions),
        "chunks": sum(len(stream.chunks) for stream in prepared.streams),
        **data,
        "methods": list(methods),
        "budgets": list(budgets),
        "seeds": list(seeds),
        "embedder": {"name": embedder.name, "dim": embedder.dim, "chunk_tokens": chunk_tokens},
        "tokenizer": tokenizer_name(tokenizer),
        "tau": dict(threshold),
        "reader": dict(reader.describe()),
        "judge": [dict(judge.describe()) for judge in judges],
        "prompts": None if isinstance(reader, NoReader) else prompts_hash(),
        "chat": None if chat is None else dict(chat),
    }


def tokenizer_name(tokenizer: Any) -> str:
    """Names a tokenizer by what it does: the hash of its description, whatever its file is called
    and however texts are padded and cut at the moment; else by its type or function."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(backend, "token_to_id") and hasattr(backend, "to_str"):
        form = {**json.loads(backend.to_str()), "truncation": None, "padding": None}
        text = json.dumps(form, sort_keys=True)
        return f"tokenizer {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    kind = tokenizer if hasattr(tokenizer, "__qualname__") else type(tokenizer)
    return f"{kind.__module__}.{kind.__qualname__}"
