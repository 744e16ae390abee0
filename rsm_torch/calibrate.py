"""A threshold for an embedding space, and what to remove from it first."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rsm_torch.checks import (
    as_count,
    as_flag,
    as_integers,
    as_path,
    as_rows,
    is_dense,
    shown,
    unit_rows,
)
from rsm_torch.files import parse_json, read_file, write_whole


@dataclass(frozen=True, eq=False)
class Calibration:
    """A threshold and a transform, found on unlabelled examples of one embedding space.

    Attributes:
        tau: the threshold, a cosine after the transform.
        quantile: of the pairwise cosines, which tau is.
        examples: how many examples it rests on.
        embedder: whose embeddings these are; None when not said.
        mean: [D] float32 subtracted from every embedding before it is normalised, or None.
        directions: [R, D] float32 orthonormal rows projected out after that, or None.
    """

    tau: float
    quantile: float
    examples: int
    embedder: str | None = None
    mean: Tensor | None = None
    directions: Tensor | None = None

    def __post_init__(self) -> None:
        for name, low, high in (("tau", -1, 1), ("quantile", 0, 1), ("examples", 2, 2**62)):
            value = getattr(self, name)
            number = isinstance(value, Real) and not isinstance(value, bool)
            if not (number and low <= value <= high):
                raise ValueError(
                    f"calibration: {name} must be from {low} to {high}, got {shown(value)}"
                )
        if not isinstance(self.embedder, (str, type(None))):
            raise ValueError(f"calibration: embedder must be a name, got {shown(self.embedder)}")
        for name, dims in (("mean", 1), ("directions", 2)):
            value = getattr(self, name)
            if value is None:
                continue
            wanted = f"calibration: {name} must be a floating tensor, {dims}-dimensional and finite"
            if not (isinstance(value, Tensor) and value.is_floating_point()):
                raise ValueError(wanted)
            if not (is_dense(value) and value.dim() == dims and bool(value.isfinite().all())):
                raise ValueError(wanted)

    def check_width(self, dim: int) -> None:
        """Raises ValueError unless the transform is for embeddings of width `dim`."""
        for name in ("mean", "directions"):
            value = getattr(self, name)
            if value is not None and value.shape[-1] != dim:
                raise ValueError(
                    f"calibration: its {name} has width {value.shape[-1]}, not dim={dim}"
                )

    def transform(self, x: Tensor) -> Tensor:
        """x [..., D] with mean and directions removed, in float32 (float64 stays)."""
        return remove(x, self.mean, self.directions)

    def to_dict(self) -> dict[str, Any]:
        out = dict(self.__dict__)
        for name in ("mean", "directions"):
            out[name] = None if out[name] is None else out[name].tolist()
        return out

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Calibration:
        """The inverse of `to_dict`. Raises ValueError on keys that are none of its fields."""
        if not isinstance(values, dict):
            raise ValueError(f"calibration: expected a mapping, got {shown(values)}")
        known = cls.__dataclass_fields__
        unknown = sorted(map(str, values.keys() - known.keys()))
        if unknown:
            raise ValueError(f"calibration: unknown field {', '.join(unknown):.80}")
        missing = [k for k, one in known.items() if one.default is MISSING and k not in values]
        if missing:
            raise ValueError(f"calibration: no {', '.join(missing)}")
        values = dict(values)
        for name in ("mean", "directions"):
            if values.get(name) is not None:
                try:
                    values[name] = torch.tensor(list(values[name]), dtype=torch.float32)
                except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                    raise ValueError(f"calibration: {name} must be numbers ({error})") from error
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write as JSON; a file there is replaced at once."""
        write_whole(as_path(path, "path"), (json.dumps(self.to_dict()) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read what `save` wrote.

        Raises:
            OSError: it cannot be read.
            ValueError: it is something else; the message names the file.
        """
        file = as_path(path, "path")
        try:
            return cls.from_dict(parse_json(file, read_file(file, follow=True)))
        except ValueError as error:
            raise ValueError(f"{file}: not a calibration file ({error})") from error


def remove(x: Tensor, mean: Tensor | None, directions: Tensor | None) -> Tensor:
    """x [..., D] less a mean [D] and its components along directions [R, D], in float32 (float64
    stays)."""
    x = x if x.dtype == torch.float64 else x.float()
    if mean is not None:
        x = x - mean.to(x)
    if directions is not None:
        d = directions.to(x)
        x = x - (x @ d.mT) @ d
    return x


def calibrate_tau(
    x: Tensor,
    quantile: float = 0.70,
    sample: int = 50,
    generator: torch.Generator | None = None,
    remove_mean: bool = False,
    remove_directions: int = 0,
    embedder: str | None = None,
    groups: Tensor | None = None,
) -> Calibration:
    """The `quantile` of pairwise cosines among at most `sample` examples (arXiv:2609.04915, §2).

    Args:
        x: [n, D] embeddings, any floating dtype, n >= 2, without labels.
        quantile: in [0, 1], interpolated linearly.
        sample: most examples to use; more are sampled without replacement.
        generator: decides the sample (on the CPU); None: one seeded with 0, so that the same
            examples give the same tau.
        remove_mean: subtract the mean of the examples first (for anisotropic spaces, such as raw
            hidden states).
        remove_directions: how many leading principal directions of the examples to project out.
        embedder: a name to keep with the result.
        groups: [n] integers, the stream each example is from: then only pairs within a stream
            count, since only those ever meet in a gate. None: all are of one stream.

    Raises:
        TypeError, ValueError: fewer than 2 examples (of one stream), rows that are NaN, infinite or zero, or
            nothing left of some row after removal.
    """
    x = as_rows(x, "x", (2,), None, None)
    if len(x) < 2:
        raise ValueError(f"x: expected at least 2 examples, [n, D], got shape {tuple(x.shape)}")
    if isinstance(quantile, bool) or not isinstance(quantile, Real):
        raise TypeError(f"quantile: expected a number in [0, 1], got {shown(quantile)}")
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile: expected a number in [0, 1], got {shown(quantile)}")
    sample = as_count(sample, "sample", 2)
    most = min(len(x), sample, x.shape[1]) - 1
    remove_directions = as_count(remove_directions, "remove_directions", 0, most)
    remove_mean = as_flag(remove_mean, "remove_mean")
    if not isinstance(generator, (torch.Generator, type(None))):
        raise TypeError(f"generator: expected a torch.Generator, got {shown(generator)}")
    unit_rows(x, None, "x")
    groups = torch.zeros(len(x)) if groups is None else as_integers(groups, "groups", 1)
    if len(groups) != len(x):
        raise ValueError(f"groups: expected one for each of {len(x)} examples, got {len(groups)}")
    pick = choose(groups.tolist(), sample, generator or torch.Generator().manual_seed(0))
    x, groups = x[pick], groups[pick].to(x.device)
    x = x.float()
    mean = x.mean(0) if remove_mean else None
    directions = None
    if remove_directions:
        centred = x - x.mean(0)
        directions = torch.linalg.svd(centred, full_matrices=False).Vh[:remove_directions]
    found = Calibration(0.0, quantile, len(x), embedder, mean, directions)  # tau follows
    unit = unit_rows(found.transform(x), None, "x after removal")
    i, j = torch.triu_indices(len(x), len(x), offset=1, device=x.device)
    same = groups[i] == groups[j]
    i, j = i[same], j[same]
    tau = float((unit[i] * unit[j]).sum(-1).double().quantile(quantile).clamp(-1, 1))
    cpu = {
        k: None if v is None else v.cpu() for k, v in (("mean", mean), ("directions", directions))
    }
    return Calibration(tau, quantile, len(x), embedder, **cpu)


def choose(groups: list[int], sample: int, generator: torch.Generator) -> list[int]:
    """At most `sample` indices, as many from each of the groups that have two or more, drawn
    without replacement and in order."""
    of: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        of.setdefault(group, []).append(index)
    pairs = [indices for indices in of.values() if len(indices) > 1]
    if not pairs:
        raise ValueError("groups: no group has 2 examples, so there is no pair to compare")
    each = max(2, sample // len(pairs))
    picked: list[int] = []
    for g in torch.randperm(len(pairs), generator=generator).tolist():
        if len(picked) + 2 > sample:
            break
        order = torch.randperm(len(pairs[g]), generator=generator).tolist()
        picked += [pairs[g][i] for i in order[: min(each, sample - len(picked))]]
    return sorted(picked)


def same_space(one: Calibration | None, two: Calibration | None) -> bool:
    """Whether two calibrations (or None) remove the same from embeddings."""
    for name in ("mean", "directions"):
        a, b = getattr(one, name, None), getattr(two, name, None)
        if a is None or b is None:
            if a is not b:
                return False
        elif not torch.equal(a.cpu(), b.cpu()):
            return False
    return True
