"""Where stored hidden states come from, so that no others are compared with them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import nn

from rsm_torch.checks import as_choice, as_count, shown
from rsm_torch.hidden.layers import FINAL, Layer, find_sites
from rsm_torch.hidden.models import model_name, weights_hash
from rsm_torch.hidden.pooling import POOLED


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
        if self.pool != other.pool:
            raise ValueError(
                f"pool: this memory holds the {self.pool!r} of tokens, not the {other.pool!r}"
            )

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
