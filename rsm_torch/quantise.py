"""Training the product quantiser of a state, once it holds enough rows."""

from __future__ import annotations

import numpy as np
import torch

from rsm_kernels.merge_gate.host import squared_norms
from rsm_torch import basis
from rsm_torch.flat import Flat
from rsm_torch.state import Slots, State, as_numpy
from rsm_torch.storage import Int8Codec, train_pq
from rsm_torch.storage.pq import CODEWORDS, PQCodec


def due(state: State) -> bool:
    """Whether rows wait for a quantiser, and there are as many as codewords."""
    waits = state.config.storage == "pq" and state.config.members == "full"
    return waits and state.codebook is None and int(state.n_live.sum()) >= CODEWORDS


def train(state: State) -> None:
    """Train the product quantiser on the rows held, and hold them by it; sums and bases follow the
    rows as they are then."""
    held = []
    for slot in np.flatnonzero(state.n_live).tolist():
        rows, _ = state.of(slot)
        places = rows.start + np.flatnonzero(state.rows.owner[rows] >= 0)
        places = places[state.rows.ids[places].argsort(kind="stable")]  # however they lie
        state.own_pages(places)
        held.append((slot, places, np.array(state.floats(places, 0))))
    every = np.concatenate([x for _, _, x in held]) if held else np.zeros((0, state.config.dim))
    codec = train_pq(torch.from_numpy(every))
    if isinstance(codec, Int8Codec):
        return  # too few rows, and the warning has been given
    state.changed()
    state.use(codec.codebook)
    for slot, places, x in held:
        stored = state.stored(places)
        for name, values in as_numpy(codec.encode(torch.from_numpy(x))).items():
            state.pages.columns[name].np[stored] = values
        _rebuild(state, slot)


def use(state: Slots, codebook: torch.Tensor) -> None:
    """Hold the rows of an empty state by this codebook from now on."""
    state.use(codebook)


def _rebuild(state: State, slot: int) -> None:
    """Sums of a stream from its rows as they are stored, bases when they are next read."""
    rows, atoms = state.of(slot)
    places = rows.start + np.flatnonzero(state.rows.owner[rows] >= 0)
    entries = np.arange(atoms.start, atoms.stop)
    entries = entries[state.atoms.name[entries] >= 0]
    sums = np.zeros((atoms.stop - atoms.start, state.config.dim), np.float32)
    np.add.at(sums, state.rows.owner[places], state.floats(places, 0))
    slots = state.atoms.sum[entries] = state.sums.own(state.atoms.sum[entries])
    state.sums.columns["sum"].np[slots] = sums[entries - atoms.start]
    state.atoms.norm[entries] = squared_norms(sums[entries - atoms.start])
    basis.forget(state, entries)


def convert(state: Slots, flat: Flat) -> Flat:
    """A flat form whose rows are held as this state holds them; sums follow the rows."""
    mine, theirs = state.codebook, flat.get("codebook")
    same = mine is theirs or (mine is not None and theirs is not None and torch.equal(mine, theirs))
    if same or state.config.members != "full":
        return flat
    source = Int8Codec() if theirs is None else PQCodec(theirs, state.config.dim)
    rows = source.decode({"codes": flat["members"], "scale": flat["members_scale"]})
    parts = state.codec.encode(rows)
    x = torch.from_numpy(state.codec.floats(**as_numpy(parts)))
    stream = torch.arange(len(flat["n_atoms"])) << 32
    held = stream.repeat_interleave(flat["n_atoms"]) + flat["handles"]
    atom = torch.searchsorted(
        held, stream.repeat_interleave(flat["n_members"]) + flat["member_atom"]
    )
    sums = torch.zeros_like(flat["sums"]).index_add_(0, atom, x)
    none = {name: flat[name][:0] for name in ("basis", "basis_scale", "singular")}
    return flat | none | {
        "members": parts["codes"], "members_scale": parts["scale"], "sums": sums,
        "upto": torch.full_like(flat["upto"], -1), "folded": torch.zeros_like(flat["folded"]),
    }  # fmt: skip
