"""`ServedStates`: hidden states of a request's tokens, as a serving engine gave them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rsm_torch.checks import as_choice, named, shown
from rsm_torch.hidden.encoding import check_finite
from rsm_torch.hidden.layers import Layer
from rsm_torch.hidden.pooling import POOLED, pool_states


@dataclass(frozen=True, eq=False)
class ServedStates:
    """The states of one request's tokens.

    Attributes:
        request_id: what the engine calls the request.
        token_ids: [T] int64, the tokens that were fed; -1 where the engine does not say which.
        states: [T, L, D], as the engine gave them.
        layers: L layers, counted as `capture` does; "final" is the state after the final norm.
        norm: "pre" or "post" the final norm, for all of them.
        partial: whether tokens before these came from the engine's prefix cache, without states; then
            they can be pooled by "last" alone.
    """

    request_id: str
    token_ids: Tensor
    states: Tensor
    layers: tuple[Layer, ...]
    norm: str
    partial: bool = False

    def pool(self, layer: Layer, pool: str = "mean") -> Tensor:
        """[D], one state of all tokens, as `capture` pools them.

        Raises:
            KeyError: a layer that is not there.
            ValueError: states that are not finite, by layer and token; another pool.
        """
        as_choice(pool, "pool", POOLED)
        if self.partial and pool != "last":
            raise ValueError(
                f"pool: request {self.request_id!r} has no states of what came from the prefix cache, "
                f"so that only 'last' is whole, not {pool!r}; run the engine without that cache"
            )
        states = self.states[:, self.place(layer)]
        try:
            check_finite(states, layer)
        except ValueError as error:
            raise ValueError(f"request {self.request_id!r}: {error}") from None
        everything = torch.ones(1, len(states), dtype=torch.bool, device=states.device)
        return pool_states(states[None], everything, pool)[0]

    def place(self, layer: Layer) -> int:
        """Where along L a layer is. KeyError if it is not there."""
        if not isinstance(layer, (int, str)) or layer not in self.layers:
            raise KeyError(
                f"layer {shown(layer)}: request {self.request_id!r} has layers "
                f"{named(list(self.layers))}"
            )
        return self.layers.index(layer)
