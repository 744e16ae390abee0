"""A judge from what stands after `--judge`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rsm_torch.eval.judges.model import ModelJudge
from rsm_torch.eval.judges.overlap import OverlapJudge
from rsm_torch.eval.judges.protocol import Judge
from rsm_torch.eval.readers.making import make_reader

FORMS = "exact, f1, likelihood:FOLDER-OR-ID, openai:MODEL or hf:FOLDER-OR-ID"


def make_judge(
    spec: str,
    dataset: str,
    *,
    cache: str | Path | None = None,
    device: str = "cpu",
    dtype: Any = None,
    batch_tokens: int = 8192,
    **reader: Any,
) -> Judge:
    """The judge that `spec` names, for answers of `dataset`.

    Args:
        spec: "exact"; "f1"; "likelihood:FOLDER-OR-ID", a local model's log-probability of the
            reference; "openai:MODEL" or "hf:FOLDER-OR-ID", a model that gives a verdict.
        dataset: its name, with "-" or "_".
        cache: folder for the replies and scores already given.
        device, dtype: of a local model.
        batch_tokens: of `LikelihoodJudge`.
        reader: further options of `make_reader`, for a model that gives a verdict.

    Raises:
        ValueError: an unknown form; and what `make_reader` raises.
    """
    kind, _, name = spec.strip().partition(":")
    if kind == "exact" and not name:
        return OverlapJudge("exact", dataset)
    if kind == "f1" and not name:
        return OverlapJudge("f1", dataset)
    if kind == "likelihood" and name:
        from rsm_torch.eval.judges.likelihood import LikelihoodJudge
        from rsm_torch.eval.readers.local_model import load_local

        local = load_local(name, device, dtype)
        kept = None if cache is None else Path(cache) / "likelihoods.rows"
        return LikelihoodJudge(local, dataset, batch_tokens=batch_tokens, cache=kept)
    if kind in ("openai", "hf"):
        made = make_reader(spec, cache=cache, device=device, dtype=dtype, **reader)
        return ModelJudge(made, dataset)
    raise ValueError(f"judge: expected {FORMS}, got {spec!r}")
