"""What leaves a bank, and what is merged in it: stream by stream, on the host, deterministic."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rsm_torch import basis
from rsm_torch.bank import EMPTY, EVENTS, PER_ATOM, PER_MEMBER, Bank
from rsm_torch.config import MERGING, Kept, RSMConfig

TIE = 1e-6  # of a centroid cosine, beside which bases count as equally close


@dataclass
class Compacted:
    """What went: `removed` ids of members, and for each atom `merged` away (slot, its name, the
    name of the atom that took its members)."""

    removed: list[int] = field(default_factory=list)
    merged: list[tuple[int, int, int]] = field(default_factory=list)


def compact(bank: Bank, slots: list[int], limits: RSMConfig) -> Compacted:
    """Bring each of `slots` within its limits: first by age, then members, then atoms."""
    done = Compacted()
    for slot in slots:
        if limits.ttl is not None:
            drop(bank, slot, expired(bank, slot, limits.ttl), "expired", done)
        if limits.max_members is not None:
            drop(
                bank, slot, surplus(bank, slot, limits.max_members, limits.policy), "dropped", done
            )
        if limits.max_atoms is not None and int(bank.n_atoms[slot]) > limits.max_atoms:
            if limits.policy in MERGING:
                merge_closest(bank, slot, limits.max_atoms, limits.policy, done)
            else:
                gone = surplus_atoms(bank, slot, limits.max_atoms, limits.policy)
                drop(bank, slot, gone, "dropped", done)
    return done


# -- which members go ----------------------------------------------------------------------------


def expired(bank: Bank, slot: int, ttl: float) -> Tensor:
    """Which members [n] are more than `ttl` seconds older than the newest; those without a time
    are not."""
    n = int(bank.n_members[slot])
    if bank.times is None:
        return torch.zeros(n, dtype=torch.bool, device=bank.device)
    times = bank.times[slot, :n]
    newest = times.nan_to_num(float("-inf")).amax() if n else times.new_zeros(())
    return times < newest - ttl


def surplus(bank: Bank, slot: int, most: int, policy: str) -> Tensor:
    """Which members [n] are too many: the least used, or simply the oldest."""
    uses = uses_of(bank, slot, policy)
    gone = torch.zeros(len(uses), dtype=torch.bool, device=bank.device)
    gone[uses.sort(stable=True).indices[: max(0, len(uses) - most)]] = True
    return gone


def surplus_atoms(bank: Bank, slot: int, most: int, policy: str) -> Tensor:
    """Which members [n] are of atoms that are too many: the least used atoms, and among equals
    those not written to for longest."""
    uses, m = uses_of(bank, slot, policy), int(bank.n_atoms[slot])
    owner = bank.member_atom[slot, : len(uses)].to(torch.int64)
    place = torch.arange(len(uses), device=bank.device)
    last = place.new_full((m,), -1).scatter_reduce_(0, owner, place, "amax")
    order = last.sort(stable=True).indices
    used = torch.zeros_like(last).index_add_(0, owner, uses)
    order = order[used[order].sort(stable=True).indices]
    return torch.isin(owner, order[: m - most])


def uses_of(bank: Bank, slot: int, policy: str) -> Tensor:
    """How often each member [n] was used, int64; all zero where that does not matter."""
    n = int(bank.n_members[slot])
    if policy != "least_used" or bank.uses is None:
        return torch.zeros(n, dtype=torch.int64, device=bank.device)
    return bank.uses[slot, :n].to(torch.int64)


def drop(bank: Bank, slot: int, gone: Tensor, event: str, done: Compacted) -> None:
    if bool(gone.any()):
        done.removed += bank.ids[slot, : len(gone)][gone].tolist()
        bank.events[slot, EVENTS.index(event)] += int(gone.sum())
        keep_only(bank, slot, ~gone)


def keep_only(bank: Bank, slot: int, keep: Tensor) -> None:
    """Drop the members of one slot where `keep` [n] is False, and atoms left empty.

    Sums and bases of the atoms that lost members are computed anew from the rows that are left;
    from coefficients, the rows' approximations are subtracted. The others do not change.
    """
    bank.changed()
    n, m = len(keep), int(bank.n_atoms[slot])
    owner = bank.member_atom[slot, :n].to(torch.int64)
    lost = torch.bincount(owner[~keep], minlength=m) > 0
    counts = torch.bincount(owner[keep], minlength=m)
    bank.counts[slot, :m] = counts.to(torch.int32)
    for atom in (lost & (counts > 0)).nonzero().flatten().tolist():
        left, gone = (
            pick.nonzero().flatten() for pick in (keep & (owner == atom), ~keep & (owner == atom))
        )
        rows = bank.rows(slice(slot, slot + 1), left)[0]
        if bank.members is not None:
            bank.sums[slot, atom] = rows.sum(0)
        else:
            bank.sums[slot, atom] -= bank.rows(slice(slot, slot + 1), gone)[0].sum(0)
        set_basis(bank, slot, atom, left, rows, *basis.exact(rows, bank.config.rank))
    live = counts > 0
    bank.member_atom[slot, :n] = (live.cumsum(0) - 1)[owner].to(torch.int32)
    close_up(bank, PER_MEMBER, slot, keep)
    close_up(bank, PER_ATOM, slot, live)
    bank.n_members[slot], bank.n_atoms[slot] = int(keep.sum()), int(live.sum())


def set_basis(
    bank: Bank, slot: int, atom: int, members: Tensor, rows: Tensor | None, u: Tensor, s: Tensor
) -> None:
    """Give an atom a basis u [K, D] of values s [K], and its members [n], where coefficients are
    kept, those of `rows` [n, D] in it."""
    u, s = basis.trim(u, s, bank.config.energy * bank.counts[slot, atom])
    bank.put("basis", (slot, atom), bank.basis_codec.encode(basis.orient(u, bank.sums[slot, atom])))
    bank.singular[slot, atom] = s
    if bank.coefficients is not None and rows is not None:
        stored = bank.basis_rows((slot, atom))
        bank.coefficients[slot, members] = basis.coefficients(stored, rows)


def close_up(bank: Bank, names: dict[str, float], slot: int, keep: Tensor) -> None:
    """Move the places kept [n] of one slot together, in order, and empty those behind them."""
    left = int(keep.sum())
    for name in bank.present(names):
        row = getattr(bank, name)[slot]
        row[:left] = row[: len(keep)][keep]
        row[left : len(keep)] = EMPTY[name]


# -- merging atoms -------------------------------------------------------------------------------


def merge_closest(bank: Bank, slot: int, most: int, policy: str, done: Compacted) -> None:
    """Merge the closest two atoms until `most` are left; the younger goes into the older.

    Each atom knows its nearest, so that a merge looks anew only for atoms that lost theirs: about
    the square of the number of atoms in all, where looking through all pairs would take its cube
    (the generic algorithm of Müllner 2011).
    """
    closeness = {"merge": basis_closeness, "ward": ward_closeness}[policy]
    near = closeness(bank, slot)
    nearest = near.argmax(1)  # the first of equals, here and below
    best = near.gather(1, nearest[:, None])[:, 0]
    live = torch.ones(len(near), dtype=torch.bool, device=near.device)
    for _ in range(len(near) - most):
        first = int(best.argmax())
        keep, gone = sorted((first, int(nearest[first])))
        names = bank.atom_labels[slot]
        done.merged.append((slot, int(names[gone]), int(names[keep])))
        bank.events[slot, EVENTS.index("merged")] += 1
        merge_atoms(bank, slot, keep, gone)
        live[gone] = False
        row = closeness(bank, slot, keep)[0].masked_fill(~live, float("-inf"))
        near[gone] = near[:, gone] = float("-inf")
        near[keep] = near[:, keep] = row
        lost = ((nearest == keep) | (nearest == gone)) & (row < best)
        lost[keep] = True
        closer = (row > best) | ((row == best) & (keep < nearest)) | (nearest == gone)
        nearest = torch.where(closer, keep, nearest)
        best = torch.where(closer | (nearest == keep), row, best)
        again = near[lost]
        nearest[lost] = again.argmax(1)
        best[lost] = again.gather(1, nearest[lost][:, None])[:, 0]
        best[gone] = float("-inf")
    close_atoms(bank, slot, live)


def close_atoms(bank: Bank, slot: int, live: Tensor) -> None:
    """Remove the atoms of a slot that are not `live` [M]; no member may be left in them."""
    n = int(bank.n_members[slot])
    owner = bank.member_atom[slot, :n].to(torch.int64)
    bank.member_atom[slot, :n] = (live.cumsum(0) - 1)[owner].to(torch.int32)
    close_up(bank, PER_ATOM, slot, live)
    bank.n_atoms[slot] = int(live.sum())


def basis_closeness(bank: Bank, slot: int, atom: int | None = None) -> Tensor:
    """How close atoms are: [M, M], or [1, M] of one of them; -inf of an atom to itself.

    ‖U_i U_jᵀ‖ in the Frobenius norm, the projection kernel on the Grassmann manifold (Hamm and Lee
    2008), and a hair of the cosine of the centroids to settle ties.
    """
    m = int(bank.n_atoms[slot])
    some = slice(0, m) if atom is None else slice(atom, atom + 1)
    u = bank.basis_rows((slot, slice(0, m)))
    centre = torch.nn.functional.normalize(bank.sums[slot, :m], dim=-1)
    near = torch.einsum("ikd,jld->ijkl", u[some], u).flatten(2).norm(dim=-1)
    near = near + TIE * (centre[some] @ centre.mT)
    own = torch.arange(m, device=u.device)[some]
    return near.scatter_(1, own[:, None], float("-inf"))


def ward_closeness(bank: Bank, slot: int, atom: int | None = None) -> Tensor:
    """As `basis_closeness`, by what a union adds to the squared distances of members from their
    centroid, negated: n_i n_j / (n_i + n_j) · ‖S_i/n_i - S_j/n_j‖² (Ward 1963)."""
    m = int(bank.n_atoms[slot])
    some = slice(0, m) if atom is None else slice(atom, atom + 1)
    n = bank.counts[slot, :m].to(bank.sums.dtype)
    centre = bank.sums[slot, :m] / n[:, None]
    # Differences, not products: near copies would drown in the rounding of ‖a‖² + ‖b‖² - 2 a·b.
    apart = torch.cdist(centre[some], centre, compute_mode="donot_use_mm_for_euclid_dist")
    near = -apart.square() * (n[some, None] * n) / (n[some, None] + n)
    own = torch.arange(m, device=near.device)[some]
    return near.scatter_(1, own[:, None], float("-inf"))


def merge_atoms(bank: Bank, slot: int, keep: int, gone: int) -> None:
    """Atom `gone` of a slot joins atom `keep`: counts and sums added, bases by `merge_bases`. What
    is left of `gone` is for `close_atoms`."""
    bank.changed()
    owner = bank.member_atom[slot, : int(bank.n_members[slot])]
    both = ((owner == keep) | (owner == gone)).nonzero().flatten()
    rows = None
    if bank.coefficients is not None:
        rows = bank.rows(slice(slot, slot + 1), both)[0]
    pair = bank.basis_rows((slot, torch.tensor([keep, gone], device=bank.device)))
    values = bank.singular[slot, [keep, gone]]
    bank.sums[slot, keep] += bank.sums[slot, gone]
    bank.counts[slot, keep] += bank.counts[slot, gone]
    owner[owner == gone] = keep
    set_basis(bank, slot, keep, both, rows, *merge_bases(pair[0], values[0], pair[1], values[1]))


def merge_bases(u: Tensor, s: Tensor, v: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Basis [K, D] and values [K] of two atoms together: the K leading left singular vectors of
    [Uᵀ diag(s), Vᵀ diag(t)], for u [K, D], s [K], v [L, D], t [L]."""
    return basis.exact(torch.cat([u * s[:, None], v * t[:, None]]), len(u))


def principal_angles(u: Tensor, v: Tensor) -> Tensor:
    """Angles in radians, rising, between the spaces of bases u [K, D] and v [L, D]; [min(K, L)].

    By their sines where they are small, since a cosine loses angles below 1e-4 (Björck and Golub
    1973). Zero rows of a basis do not count.
    """
    u, v = sorted((b[b.any(-1)].double() for b in (u, v)), key=len)
    cosine = torch.linalg.svdvals(u @ v.mT).clamp(0, 1)
    sine = torch.linalg.svdvals(u - u @ v.mT @ v).flip(0).clamp(0, 1)
    return torch.where(cosine**2 < 0.5, cosine.acos(), sine.asin())


# -- keeping less --------------------------------------------------------------------------------

LEANER: dict[Kept, tuple[Kept, ...]] = {
    "full": ("full", "coefficients", "none"),
    "coefficients": ("coefficients", "none"),
    "none": ("none",),
}


def convert(bank: Bank, members: Kept) -> None:
    """Keep less of each member from now on: "coefficients" instead of rows, or "none"."""
    kept = bank.config.members
    if members not in LEANER[kept]:
        raise ValueError(
            f"members: a memory that keeps {kept!r} can be converted to "
            f"{' or '.join(map(repr, LEANER[kept]))}, not to {members!r}"
        )
    if members == kept:
        return
    bank.changed()
    if members == "coefficients":
        owner = bank.member_atom.clamp(min=0).to(torch.int64)
        found = bank.singular.new_zeros(*owner.shape, bank.config.rank)
        for slot, n in enumerate(bank.n_members.tolist()):
            rows = bank.rows(slice(slot, slot + 1), slice(0, n))[0]
            mine = bank.basis_rows((slot,))[owner[slot, :n]]
            found[slot, :n] = basis.coefficients(mine, rows)
        bank.coefficients = found
    else:
        bank.coefficients = None
        for name in bank.present(PER_MEMBER):
            if not name.startswith("members"):
                setattr(bank, name, getattr(bank, name)[:, :0].clone())
        bank.n_members.zero_()
    bank.members = bank.members_scale = bank.codebook = None
    bank.codec = bank.basis_codec
    bank.config = replace(bank.config, members=members)
    bank.measure()
