"""The write rule's settings, as every backend takes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """`tau`, `routing`, `scope` and `gate` as in `RSMConfig`."""

    tau: float
    routing: str = "max"
    scope: str = "all"
    gate: str = "max_member"

    @property
    def members(self) -> str:
        """Whose members count: of "all" atoms, of the "nearest" one, or of "none"."""
        return "none" if self.gate == "centroid" else self.scope
