"""One set of settings for all memories of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

import torch

from rsm_torch.calibrate import Calibration
from rsm_torch.config import Kept, Routing, Scope
from rsm_torch.outputs import AtomScore, ChunkScore

DEFAULT_GROUPS = 32


@dataclass(frozen=True)
class VectorSettings:
    """What `make_vectors` hands to the method it makes.

    A method passes over settings that mean nothing to it (`tau` for k-means, `seed` for what draws
    nothing), so that all can be made with the same ones. Limits are never passed over: a method
    that cannot keep one refuses it.

    Args:
        dim: width D of the embeddings.
        streams: number of slots.
        tau: cosine that decides between joining a group and opening one (RSM, DP-means); None: the
            calibration's.
        seed: of everything drawn. Draws do not depend on the slot: a stream gets the same ones
            alone, among others, and in another order.
        max_bytes: most bytes of a stream, by the rule of `bytes.py`, after every call.
        max_items: most items of a stream.
        max_groups: most groups of a stream (prototypes, clusters, atoms; directions of Oja's).
        rank: directions K of each RSM atom; more than D means D.
        calibration: its transform is applied to all that is written and asked, in every method.
        members: what is kept of an item besides its number: "full" rows, "coefficients" in its
            atom's basis (RSM), or "none"; None: what the method does by default.
        routing, scope: of RSM's gate, as in `RSMConfig`.
        atom_score, chunk_score: of RSM's search, as in `StreamMemory.search`.
        device: where the tensors live.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of range, by name.
    """

    dim: int
    streams: int = 1
    tau: float | None = None
    seed: int = 0
    max_bytes: int | None = None
    max_items: int | None = None
    max_groups: int | None = None
    rank: int = 2
    calibration: Calibration | None = None
    members: Kept | None = None
    routing: Routing = "max"
    scope: Scope = "all"
    atom_score: AtomScore = "v1"
    chunk_score: ChunkScore = "cosine"
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        for name in ("dim", "streams", "seed", "max_bytes", "max_items", "max_groups", "rank"):
            value = getattr(self, name)
            if value is None and name.startswith("max_"):
                continue
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise TypeError(f"{name}: expected an int, got {value!r}")
            object.__setattr__(self, name, int(value))
            if value < (0 if name == "seed" else 1):
                raise ValueError(f"{name}: expected at least {int(name != 'seed')}, got {value}")
        if self.tau is not None and not -1 <= self.tau <= 1:
            raise ValueError(f"tau: expected a cosine in [-1, 1], got {self.tau!r}")
        if self.calibration is not None:
            self.calibration.check_width(self.dim)

    def threshold(self, name: str) -> float:
        """tau, or the calibration's. ValueError if there is neither; `name` needs one."""
        if self.tau is not None:
            return float(self.tau)
        if self.calibration is not None:
            return self.calibration.tau
        raise ValueError(
            f"tau: {name} needs a threshold; give tau= or calibration= (calibrate_tau finds both)"
        )

    def kept(
        self,
        name: str,
        allowed: Sequence[Kept],
    ) -> Kept:
        """`members`, by default the first of `allowed`. ValueError if `name` cannot keep that."""
        if self.members is None:
            return allowed[0]
        if self.members not in allowed:
            raise ValueError(
                f"members: {name} keeps {' or '.join(map(repr, allowed))}, got {self.members!r}"
            )
        return self.members

    def refuse_limits(
        self, name: str, *limits: Literal["max_bytes", "max_items", "max_groups"]
    ) -> None:
        """ValueError if any of these limits is set: `name` cannot keep it."""
        given = [limit for limit in limits if getattr(self, limit) is not None]
        if given:
            raise ValueError(
                f"{', '.join(given)}: {name} keeps everything; budget-rag-recent, -random or "
                "-reservoir keep what fits"
            )
