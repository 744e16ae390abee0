"""What is done to a memory besides writing and searching: forgetting, limits, room, branching."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from rsm_torch import compact, join
from rsm_torch.bank import Bank
from rsm_torch.checks import as_integers, as_slots, named
from rsm_torch.compact import Compacted
from rsm_torch.config import Kept, Policy, RSMConfig
from rsm_torch.modes import plainly


class Upkeep(nn.Module):
    """The part of `StreamMemory` that neither writes nor searches."""

    config: RSMConfig
    bank: Bank
    backend: str
    calibration: Any
    from_pretrained: Any  # of StreamMemory

    @property
    def streams(self) -> int:
        """Number of slots."""
        return self.bank.streams

    @property
    def device(self) -> torch.device:
        return self.bank.device

    # -- removing and merging -----------------------------------------------------------------

    @plainly
    def forget(
        self, ids: Sequence[int] | Tensor, streams: Sequence[int] | Tensor | None = None
    ) -> None:
        """Remove chunks: counts, ids, sums and bases become those of the members that are left.

        Exact while rows are kept. With members="coefficients" counts and ids are exact, and sums
        and bases as good as the coefficients: what is subtracted is Σ_k a_k u_k, not the row.

        Args:
            ids: ids to remove; one named twice counts once.
            streams: slots to look in; None: all.

        Raises:
            KeyError: ids that are not stored there; nothing is removed then.
        """
        for slot, found in self._find(ids, streams):
            compact.keep_only(self.bank, slot, ~found)

    @plainly
    def touch(
        self, ids: Sequence[int] | Tensor, streams: Sequence[int] | Tensor | None = None
    ) -> None:
        """Count one more use of these members, for policy="least_used". KeyError as `forget`."""
        found = self._find(ids, streams)
        uses = self.bank.provide("uses")
        for slot, picked in found:
            uses[slot, : len(picked)] += picked.to(torch.int32)

    def _find(
        self, ids: Sequence[int] | Tensor, streams: Sequence[int] | Tensor | None
    ) -> list[tuple[int, Tensor]]:
        """(slot, which of its members [n]) of ids, for slots that have any."""
        if self.bank.config.members == "none":
            raise ValueError("ids: with members='none' nothing is kept of a single chunk")
        wanted = as_integers(ids, "ids", 1).unique().to(self.device)
        slots = as_slots(streams, None, self.streams).to(self.device)
        held = self.bank.ids if streams is None else self.bank.ids[slots]
        found = torch.isin(held, wanted) & (held >= 0)
        missing = wanted[~torch.isin(wanted, held[found])]
        if len(missing):
            raise KeyError(f"ids: {named(missing.tolist())} not stored; nothing was changed")
        rows = found.any(1).nonzero().flatten().tolist()
        return [
            (slot, found[row, : int(self.bank.n_members[slot])])
            for row, slot in ((row, int(slots[row])) for row in rows)
        ]

    @plainly
    def compact(
        self,
        streams: Sequence[int] | Tensor | None = None,
        *,
        max_atoms: int | None = None,
        max_members: int | None = None,
        ttl: float | None = None,
        policy: Policy | None = None,
        members: Kept | None = None,
    ) -> Compacted:
        """Bring streams within limits now, or keep less of every member from now on.

        Args:
            streams: None: all.
            max_atoms, max_members, ttl, policy: as in `RSMConfig`, for this call; None: the
                config's own.
            members: "coefficients" or "none": for all streams, and for good.

        Raises:
            ValueError: a limit out of range, or `members` that would need what is gone.
        """
        slots = as_slots(streams, None, self.streams).tolist()
        given = {"max_atoms": max_atoms, "max_members": max_members, "ttl": ttl, "policy": policy}
        limits = RSMConfig.from_dict(
            self.config.to_dict() | {k: v for k, v in given.items() if v is not None}
        )
        if members is not None:
            compact.convert(self.bank, members)
            self.config = self.bank.config
        return compact.compact(self.bank, slots, limits)

    @plainly
    def retrain(self) -> None:
        """Train the product quantiser of storage="pq" anew on the rows held."""
        if self.config.storage != "pq" or self.bank.members is None:
            raise ValueError("retrain: only rows held by storage='pq' have a quantiser to train")
        join.train(self.bank)

    @plainly
    def reset(self, streams: Sequence[int] | Tensor | None = None) -> None:
        """Empty these streams; None: all. Ids and `events` go on counting."""
        self.bank.clear(as_slots(streams, None, self.streams).to(self.device))

    @plainly
    def reserve(
        self, chunks: int = 0, atoms: int | None = None, streams: int | None = None
    ) -> None:
        """Make room beforehand: `chunks` more members and `atoms` more atoms (default: as many)
        in every stream, and `streams` slots in all. Never shrinks.

        Within that room `write(check=False)` and `search(check=False)` never wait for a GPU, and
        can be captured in a CUDA graph, if what they are given lies there, rows are held as
        floating point numbers, there are no limits, and there is room for as many atoms as
        chunks: with less, the GPU is asked for its true count whenever the count that is possible
        has outgrown it. A graph's replays are not counted here: reserve for all
        of them, and call `reserve` again after them, which reads the true counts.
        """
        for name, value in (("chunks", chunks), ("atoms", atoms), ("streams", streams)):
            number = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (number and value >= 0):
                raise ValueError(f"{name}: expected an int of at least 0, got {value!r}")
        self.bank.measure()
        self.bank.make_room(chunks, chunks if atoms is None else atoms)
        if streams is not None:
            self.bank.add_streams(streams)

    # -- branching ----------------------------------------------------------------------------

    @plainly
    def fork(self, src: int, dst: int) -> dict[int, int]:
        """Copy stream `src` into the empty stream `dst`, independent from then on.

        Returns:
            The new id of each id copied. Atoms keep their names.

        Raises:
            ValueError: `dst` holds something, or is `src`.
        """
        if src == dst:
            raise ValueError(f"dst: {dst} is the stream to be copied; name an empty one")
        return self.absorb(self.extract([src]), [dst])

    @plainly
    def extract(self, streams: Sequence[int] | Tensor) -> Self:
        """A memory of these streams alone, to save or send; ids and names are kept."""
        slots = as_slots(streams, None, self.streams)
        if len(slots) == 0:
            raise ValueError("streams: expected at least one")
        out = type(self)(self.config, len(slots), self.device, self.backend, self.calibration)
        out.bank.load_flat(self.bank.flat(slots))
        return out

    @plainly
    def absorb(
        self, source: Self | str | Path, into: Sequence[int] | Tensor | None = None
    ) -> dict[int, int]:
        """Take in all streams of another memory, or of a directory that `save_pretrained` wrote.

        Args:
            into: an empty slot for each of its streams; None: new slots behind those there are.

        Returns:
            The new id of each id taken in. Atoms keep their names.

        Raises:
            ValueError: slots that hold something, or a memory of another width, rank, storage,
                `members` or transform; nothing is taken in then. Limits act at the next write.
        """
        other: Any = source
        if isinstance(source, (str, Path)):
            other = self.from_pretrained(source, self.device)
        elif not isinstance(source, Upkeep):
            raise TypeError(f"source: expected a memory or a path, got {type(source).__name__}")
        for name in ("dim", "rank", "members", "storage"):
            mine, theirs = getattr(self.config, name), getattr(other.config, name)
            if mine != theirs:
                raise ValueError(f"source: its {name} is {theirs!r}, this memory's {mine!r}")
        if not same_space(self.calibration, other.calibration):
            raise ValueError("source: its calibration removes something else than this memory's")
        tensors, have = other.bank.flat(), self.streams
        if into is None:
            slots = torch.arange(have, have + other.streams)
        else:
            slots = as_slots(into, other.streams, have, "into")
            taken = slots[(self.bank.n_atoms[slots.to(self.device)] > 0).cpu()].tolist()
            if taken:
                raise ValueError(
                    f"into: {named(taken)} not empty; reset them first, or choose others"
                )
        self.bank.add_streams(have + other.streams if into is None else have)
        return join.take_in(self.bank, other.bank, tensors, slots.to(self.device))


def same_space(one: Any, two: Any) -> bool:
    """Whether two calibrations (or None) remove the same from embeddings."""
    for name in ("mean", "directions"):
        a, b = getattr(one, name, None), getattr(two, name, None)
        if a is None or b is None:
            if a is not b:
                return False
        elif not torch.equal(a.cpu(), b.cpu()):
            return False
    return True
