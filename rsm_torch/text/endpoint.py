"""Embeddings from a server that speaks OpenAI's embeddings API: OpenAI's own, vLLM, Ollama, TEI and
others. Nothing is sent anywhere unless such an embedder is asked for."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

ENDPOINT = "openai:"
KEY_VARIABLE, BASE_VARIABLE = "OPENAI_API_KEY", "OPENAI_BASE_URL"
OPENAI = "https://api.openai.com/v1"
BATCH_TEXTS, BATCH_CHARACTERS = 128, 200_000  # of one request
PASSING = {408, 409, 425, 429, *range(500, 600)}  # statuses worth another try
LONGEST_WAIT = 60.0  # seconds, whatever a server asks for


def endpoint_of(spec: str) -> Endpoint:
    """The endpoint of "openai:MODEL" or "openai:MODEL@https://host/v1"."""
    model, at, host = spec.removeprefix(ENDPOINT).partition("@http")
    return Endpoint(model, at[1:] + host if at else None)


class Endpoint:
    """A function from texts to embeddings, asked of a server.

    Args:
        model: the server's name for the model.
        base_url: of the server, such as "http://127.0.0.1:8000/v1"; by default $OPENAI_BASE_URL,
            else OpenAI's own.
        api_key: by default $OPENAI_API_KEY; a server other than OpenAI's may need none.
        retries: further tries after a connection failure, a time-out, and status 408, 409, 425, 429
            and 5xx, after waits that double, or as long as the server asks for.
        timeout: seconds for one try.

    Raises:
        ValueError: no model, a URL that is none, or no key for OpenAI's own.
        OSError: when it is called: the server refuses, or cannot be reached; the message names it
            and what it said, never the key.
    """

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        retries: int = 5,
        timeout: float = 60.0,
    ):
        if not model.strip():
            raise ValueError("embedder: expected a model after 'openai:', got nothing")
        self.model, self.name = model, ENDPOINT + model
        self.base_url = (base_url or os.environ.get(BASE_VARIABLE) or OPENAI).rstrip("/")
        if not self.base_url.startswith(("http://", "https://")) or "@" in self.base_url:
            raise ValueError(
                "embedder: expected a base URL such as http://127.0.0.1:8000/v1, without user and "
                f"password, got {self.base_url.rpartition('@')[2]!r}"
            )
        self._key = (api_key or os.environ.get(KEY_VARIABLE) or "").strip()
        if not self._key and self.base_url == OPENAI:
            raise ValueError(f"embedder: {self.name} needs a key, and {KEY_VARIABLE} is not set")
        if not (self._key.isascii() and self._key.isprintable()):
            raise ValueError(f"embedder: {KEY_VARIABLE} holds what no key has")
        self.retries, self.timeout = retries, timeout

    def __call__(self, texts: list[str]) -> list[list[float]]:
        return [vector for batch in _batches(texts) for vector in self._embeddings(batch)]

    def _embeddings(self, texts: list[str]) -> list[list[float]]:
        reply = self._ask({"model": self.model, "input": texts, "encoding_format": "float"})
        try:
            data = json.loads(reply)["data"]
            rows = {row.get("index", place): row["embedding"] for place, row in enumerate(data)}
            return [rows[place] for place in range(len(texts))]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            shown = reply[:200].decode(errors="replace")
            raise OSError(
                f"embedder: {self.base_url} gave no embeddings for {len(texts)} texts: {shown!r}"
            ) from None

    def _ask(self, body: dict[str, Any]) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(
            f"{self.base_url}/embeddings", json.dumps(body).encode(), headers
        )
        for tried in range(self.retries + 1):
            try:
                with _OPENER.open(request, timeout=self.timeout) as reply:
                    return reply.read()
            except urllib.error.HTTPError as error:
                said = error.read(2000).decode(errors="replace")
                why, asked = f"status {error.code}: {said!r:.300}", error.headers["Retry-After"]
                passing = error.code in PASSING
            except (OSError, http.client.HTTPException) as error:  # time-outs are of the first
                why, asked, passing = str(error) or type(error).__name__, None, True
            if not passing or tried == self.retries:
                break
            time.sleep(_wait(tried, asked))
        raise OSError(f"embedder: {self.name} at {self.base_url}: {why}")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: the key is for the server that was named."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def _wait(tried: int, asked: str | None) -> float:
    """Seconds before the next try; a Retry-After that is a date is not read."""
    try:
        wanted = float(asked or "")
    except ValueError:
        wanted = 0.5 * 2**tried
    return min(max(wanted, 0.0), LONGEST_WAIT) if wanted == wanted else LONGEST_WAIT


def _batches(texts: list[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and (len(batch) == BATCH_TEXTS or size + len(text) > BATCH_CHARACTERS):
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch
