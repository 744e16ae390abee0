"""A reader from what stands after `--reader`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rsm_torch.eval.readers.protocol import NoReader, Reader

FORMS = "none, openai:MODEL or hf:FOLDER-OR-ID"


def make_reader(
    spec: str,
    *,
    cache: str | Path | None = None,
    base_url: str | None = None,
    prices: Mapping[str, Any] | None = None,
    concurrency: int = 8,
    retries: int = 4,
    timeout: float = 60.0,
    time_limit: float = 300.0,
    temperature: float | None = 0.0,
    params: Mapping[str, Any] | None = None,
    max_tokens: int = 256,
    batch_size: int = 8,
    device: str = "cpu",
    dtype: Any = None,
) -> Reader:
    """The reader that `spec` names.

    Args:
        spec: "none"; "openai:MODEL", any OpenAI-compatible server; "hf:FOLDER-OR-ID", a model in
            this process.
        cache: folder for the answers already given; None keeps them for the reader's life.
        base_url, prices, concurrency, retries, timeout, time_limit, temperature, params: of
            `OpenAIReader`.
        max_tokens: the most tokens of an answer.
        batch_size, device, dtype: of a local model.

    Raises:
        ValueError: an unknown form, no key, a number out of its range.
        ImportError: the openai client is needed and not installed.
        OSError: a local model that cannot be loaded.
    """
    kind, _, name = spec.strip().partition(":")
    if kind == "none" and not name:
        return NoReader()
    kept = None if cache is None else Path(cache) / "replies.jsonl"
    if kind == "openai":
        from rsm_torch.eval.readers.openai_api import OpenAIReader

        return OpenAIReader(
            name, base_url=base_url, concurrency=concurrency, retries=retries, timeout=timeout,
            time_limit=time_limit, temperature=temperature, max_tokens=max_tokens, params=params,
            prices=prices, cache=kept,
        )  # fmt: skip
    if kind == "hf":
        from rsm_torch.eval.readers.local import LocalReader
        from rsm_torch.eval.readers.local_model import load_local

        local = load_local(name, device, dtype)
        return LocalReader(local, batch_size=batch_size, max_tokens=max_tokens, cache=kept)
    raise ValueError(f"reader: expected {FORMS}, got {spec!r}")
