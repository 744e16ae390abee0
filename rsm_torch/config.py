"""The settings of a memory, validated once."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from numbers import Real
from typing import Any, Literal, get_args

from rsm_torch.checks import as_choice, as_count, shown

Routing = Literal["max", "centroid_first"]
Scope = Literal["all", "nearest"]
Gate = Literal["max_member", "centroid"]
Kept = Literal["full", "coefficients", "none"]
Storage = Literal[
    "float32", "float16", "bfloat16", "int8", "bits1", "bits2", "bits3", "bits4", "pq"
]
Policy = Literal["merge", "ward", "oldest", "least_used", "reservoir", "lightest"]
DROPPING = ("oldest", "least_used")  # policies that drop whole atoms; the others merge them
WIDEST = 2**24

CHOICES = {
    "routing": Routing,
    "scope": Scope,
    "gate": Gate,
    "members": Kept,
    "storage": Storage,
    "policy": Policy,
}


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
        members: what is kept of each member: its "full" row; the K "coefficients" of it in its
            atom's basis, from which rows are approximated; or "none", atoms alone.
        storage: how rows and bases are held: "float32", "float16", "bfloat16", "int8" (one scale a
            row), "bits1" to "bits4" (so many bits a number of rotated rows, whose scores are
            unbiased estimates; on a CPU), or "pq" (product-quantised rows). Bases beside bits and
            "pq" are int8. Sums stay float32.
        energy: an atom keeps as few directions (at most `rank`) as hold this share of its members'
            energy, Σ s_j² >= energy · Σ ‖x‖². 1: all `rank` of them.
        max_atoms, max_members: most atoms and members of a stream; None: no limit.
        ttl: seconds after which a member is dropped, counted back from the newest time in its
            stream; None: never.
        policy: what gives way when there are too many. "merge": the two atoms whose bases are
            closest become one, and the oldest members are dropped. "ward": the same, but the two
            whose union spreads its members least, which keeps atoms of like size. "oldest": the atoms longest not written to, and the
            oldest members. "least_used": the atoms and members least often passed to `touch`.
            "reservoir": members so that those left are a uniform sample of all that ever came;
            atoms merge. "lightest": the members of the least `weights`, the oldest of equals;
            atoms merge.

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
    members: Kept = "full"
    storage: Storage = "float32"
    energy: float = 1.0
    max_atoms: int | None = None
    max_members: int | None = None
    ttl: float | None = None
    policy: Policy = "merge"

    def __post_init__(self) -> None:
        for name in ("dim", "rank", "max_atoms", "max_members"):
            value = getattr(self, name)
            if value is None and name.startswith("max_"):
                continue
            most = 2**62 if name.startswith("max_") else WIDEST
            object.__setattr__(self, name, as_count(value, name, 1, most))
        for name in ("tau", "energy", "ttl"):
            value = getattr(self, name)
            if value is None and name == "ttl":
                continue
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"{name}: expected a float, got {shown(value)}")
            try:
                number = float(value)
            except OverflowError:  # of an int or a fraction
                number = math.inf
            if not math.isfinite(number):
                raise ValueError(f"{name}: expected a finite number, got {shown(value)}")
            object.__setattr__(self, name, number)
        if self.rank > self.dim:
            raise ValueError(f"rank: expected 1 <= rank <= dim={self.dim}, got {self.rank}")
        if not -1.0 <= self.tau <= 1.0:
            raise ValueError(f"tau: expected a cosine in [-1, 1], got {self.tau}")
        if not 0.0 < self.energy <= 1.0:
            raise ValueError(f"energy: expected a share in (0, 1], got {self.energy}")
        if self.ttl is not None and not self.ttl > 0:
            raise ValueError(f"ttl: expected seconds above 0, got {self.ttl}")
        for name, kind in CHOICES.items():
            as_choice(getattr(self, name), name, get_args(kind))
        if self.members == "none" and (
            self.max_members or self.ttl or (self.max_atoms and self.policy in DROPPING)
        ):
            raise ValueError(
                "members: 'none' keeps nothing of a single member that max_members, ttl or a "
                f"policy of {self.policy!r} could drop; only max_atoms with a policy that "
                "merges works"
            )

    @property
    def capped(self) -> bool:
        """Whether streams have a limit that a write may have to enforce."""
        return (self.max_atoms, self.max_members, self.ttl) != (None, None, None)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RSMConfig:
        """The inverse of `to_dict`. Raises ValueError on keys that are not settings."""
        if not isinstance(values, dict):
            raise ValueError(f"config: expected a mapping of settings, got {shown(values)}")
        if "dim" not in values:
            raise ValueError("config: no dim, the width of the embeddings; it has no default")
        unknown = sorted(map(str, set(values) - {f.name for f in fields(cls)}))
        if unknown:
            known = ", ".join(f.name for f in fields(cls))
            raise ValueError(
                f"config: unknown setting {', '.join(unknown):.80}; the settings are {known}"
            )
        return cls(**values)
