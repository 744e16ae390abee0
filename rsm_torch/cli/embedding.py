"""Which embedder, tokenizer and threshold a command uses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rsm_torch.cli.errors import CommandError
from rsm_torch.cli.output import stderr

if TYPE_CHECKING:
    from rsm_torch.embedders import Embedder
    from rsm_torch.text.items import Item

EXAMPLES = 50
CHUNK_TOKENS = 256


def open_embedder(spec: str | None) -> Embedder:
    """The embedder named, else the library's default."""
    # Model loading draws its own bar; commands draw theirs, and none in a pipe.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from rsm_torch.embedders import default_embedder, load_embedder

    name = spec or default_embedder()
    stderr().print(f"embedder: {name}", markup=False, soft_wrap=True)
    return load_embedder(name)


def chunks_for(embedder: Embedder, items: list[Item]) -> list[Item]:
    """Items cut to the embedder's window and to 256 tokens."""
    from rsm_torch.embedders import window
    from rsm_torch.text.chunking import chunk

    most = min(window(embedder) or CHUNK_TOKENS - 2, CHUNK_TOKENS)
    return chunk(items, most, tokenizer=tokenizer_of(embedder))


def tokenizer_of(embedder: Embedder, path: str | None = None) -> Any:
    """The tokenizer of `--tokenizer`, else the embedder's own."""
    if path is not None:
        return load_tokenizer(path)
    found = getattr(embedder, "tokenizer", None)
    if found is None:
        raise CommandError(
            f"--tokenizer: embedder {embedder.name!r} has no tokenizer to count with; "
            "give the folder or id of a Hugging Face tokenizer"
        )
    return found


def load_tokenizer(spec: str) -> Any:
    """A Hugging Face tokenizer from a folder, a tokenizer.json or a model id."""
    from tokenizers import Tokenizer

    wanted = "expected a folder that holds a tokenizer.json, such a file, or a model id"
    file = Path(spec) / "tokenizer.json" if Path(spec).is_dir() else Path(spec)
    try:
        text = (file if file.exists() else _downloaded(spec)).read_text(encoding="utf-8")
        known = isinstance(json.loads(text).get("model"), dict)
    except (OSError, ValueError, AttributeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise CommandError(f"--tokenizer: cannot load {spec!r} ({reason}); {wanted}") from error
    if not known:
        raise CommandError(f"--tokenizer: {spec!r} is not a tokenizer.json; {wanted}")
    return Tokenizer.from_str(text)


def _downloaded(model_id: str) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model_id, "tokenizer.json"))


def given_tau(value: str | None, embedder: str) -> float | None:
    """`--tau`: a cosine, or a file that `rsm calibrate --out` wrote for the same embedder."""
    from rsm_torch.calibrate import Calibration

    if value is None:
        return None
    try:
        tau = float(value)
    except ValueError:
        if not Path(value).is_file():
            raise CommandError(
                f"--tau: expected a cosine or a calibration file, got {value!r}"
            ) from None
        saved = Calibration.load(value)
        if saved.embedder not in (None, embedder):
            raise CommandError(
                f"--tau: {value} was calibrated for {saved.embedder!r}, the embedder here is "
                f"{embedder!r}; calibrate again or pass --embedder"
            ) from None
        tau = saved.tau
    if not -1.0 <= tau <= 1.0:
        raise CommandError(f"--tau: expected a cosine in [-1, 1], got {value}")
    return tau
