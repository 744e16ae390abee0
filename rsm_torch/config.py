"""The settings of a memory, validated once."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

Routing = Literal["max", "centroid_first"]
Scope = Literal["all", "nearest"]
Gate = Literal["max_member", "centroid"]
Storage = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True)
class RSMConfig:
    """How a memory clusters and what it keeps.

    Args:
        dim: width D of the embeddings.
        tau: gate threshold, a cosine in [-1, 1]. `calibrate_tau` finds one for an embedder.
        rank: rank K of each atom's basis, 1 <= rank <= dim.
        routing: "max", the atom of the best score of either kind; "centroid_first", the best
            centroid if it passes tau, else the atom of the best member.
        scope: whose members may pass the gate: those of "all" atoms, or of the "nearest" only.
        gate: "max_member", a centroid or a member may pass tau; "centroid", only a centroid.
        storage: dtype of the stored rows and bases. Sums stay float32.

    Raises:
        TypeError: an argument of another type.
        ValueError: an argument outside its range; the message names it.
    """

    dim: int
    tau: float = 0.8
    rank: int = 2
    routing: Routing = "max"
    scope: Scope = "all"
    gate: Gate = "max_member"
    storage: Storage = "float32"

    def __post_init__(self) -> None:
        for name in ("dim", "rank"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}: expected an int, got {value!r}")
        if isinstance(self.tau, bool) or not isinstance(self.tau, (int, float)):
            raise TypeError(f"tau: expected a float, got {self.tau!r}")
        if self.dim < 1:
            raise ValueError(f"dim: expected at least 1, got {self.dim}")
        if not 1 <= self.rank <= self.dim:
            raise ValueError(f"rank: expected 1 <= rank <= dim={self.dim}, got {self.rank}")
        if not -1.0 <= self.tau <= 1.0:
            raise ValueError(f"tau: expected a cosine in [-1, 1], got {self.tau}")
        for name, kind in (
            ("routing", Routing), ("scope", Scope), ("gate", Gate), ("storage", Storage),
        ):  # fmt: skip
            value, allowed = getattr(self, name), get_args(kind)
            if value not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RSMConfig:
        """The inverse of `to_dict`. Raises ValueError on keys that are not settings."""
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            known = ", ".join(f.name for f in fields(cls))
            raise ValueError(
                f"config: unknown setting {', '.join(unknown)}; the settings are {known}"
            )
        return cls(**values)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RSMConfig:
        return cls.from_dict(json.loads(text))
