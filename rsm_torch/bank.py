"""The tensors of all streams on one device: room, rows as they are stored, and whole states.

Letters: S slots (one per stream), N room for members, M room for atoms, K basis rank, D width.
Slot b is live in members[b, :n_members[b]] and sums[b, :n_atoms[b]]; what lies beyond is empty.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rsm_torch import storage
from rsm_torch.config import RSMConfig

At = slice | Tensor

# What an empty place of each tensor holds, by the axis that grows. Those of OPTIONAL are there
# once they are first given.
PER_MEMBER: dict[str, float] = {
    "members": 0, "members_scale": 0, "coefficients": 0, "member_atom": -1, "ids": -1,
    "times": float("nan"), "labels": -1, "uses": 0,
}  # fmt: skip
PER_ATOM: dict[str, float] = {
    "sums": 0, "counts": 0, "basis": 0, "basis_scale": 0, "singular": 0, "atom_labels": -1,
}  # fmt: skip
EMPTY = PER_MEMBER | PER_ATOM
OPTIONAL = {"times": torch.float64, "labels": torch.int64, "uses": torch.int32}
EVENTS = ("merged", "dropped", "expired")


class Bank(nn.Module):
    """Buffers [S, N, …] and [S, M, …] with room that grows by doubling.

    `.to(dtype)` and `.half()` leave dtypes as they are: `RSMConfig.storage` decides those, and
    sums must stay float32.
    """

    members: Tensor | None  # [S, N, C] codes of rows, with members="full"
    members_scale: Tensor | None  # [S, N] float32, where the storage has scales
    coefficients: Tensor | None  # [S, N, K] float32, with members="coefficients"
    member_atom: Tensor  # [S, N] int32
    ids: Tensor  # [S, N] int64
    times: Tensor | None  # [S, N] float64
    labels: Tensor | None  # [S, N] int64
    uses: Tensor | None  # [S, N] int32
    sums: Tensor  # [S, M, D] float32
    counts: Tensor  # [S, M] int32
    basis: Tensor  # [S, M, K, C] codes
    basis_scale: Tensor | None  # [S, M, K] float32
    singular: Tensor  # [S, M, K] float32
    atom_labels: Tensor  # [S, M] int64
    n_members: Tensor  # [S] int64
    n_atoms: Tensor  # [S] int64
    events: Tensor  # [S, 3] int64, how often each of EVENTS happened
    next_id: Tensor  # [] int64
    codebook: Tensor | None  # [m, 256, D/m] float32, of a trained product quantiser

    def __init__(self, config: RSMConfig, streams: int, device: torch.device | str) -> None:
        super().__init__()
        self.config = config
        # Rows wait as int8 until there are enough of them to train a product quantiser.
        self.codec = storage.codec("int8" if config.storage == "pq" else config.storage, config.dim)
        self.basis_codec = self.codec
        for name, (shape, dtype) in self._layout(streams).items():
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device))
        for name in (
            "members",
            "members_scale",
            "coefficients",
            "basis_scale",
            "codebook",
            *OPTIONAL,
        ):
            if name not in self._buffers:
                self.register_buffer(name, None)
        self.version = object()  # another one after every change, to tell stale plans by
        # Upper bounds of n_members and n_atoms, known without asking the device.
        self._most_members = self._most_atoms = 0

    def _layout(self, streams: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape without room, and dtype, of every tensor that is always there."""
        D, K = self.config.dim, self.config.rank
        row = self.codec.layout(D)
        out: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if self.config.members == "full":
            out["members"] = ((streams, 0, *row["codes"][0]), row["codes"][1])
            if "scale" in row:
                out["members_scale"] = ((streams, 0), torch.float32)
        elif self.config.members == "coefficients":
            out["coefficients"] = ((streams, 0, K), torch.float32)
        row = self.basis_codec.layout(D)
        out["basis"] = ((streams, 0, K, *row["codes"][0]), row["codes"][1])
        if "scale" in row:
            out["basis_scale"] = ((streams, 0, K), torch.float32)
        return out | {
            "member_atom": ((streams, 0), torch.int32),
            "ids": ((streams, 0), torch.int64),
            "sums": ((streams, 0, D), torch.float32),
            "counts": ((streams, 0), torch.int32),
            "singular": ((streams, 0, K), torch.float32),
            "atom_labels": ((streams, 0), torch.int64),
            "n_members": ((streams,), torch.int64),
            "n_atoms": ((streams,), torch.int64),
            "events": ((streams, len(EVENTS)), torch.int64),
            "next_id": ((), torch.int64),
        }

    @property
    def streams(self) -> int:
        return self.n_members.shape[0]

    @property
    def device(self) -> torch.device:
        return self.sums.device

    @property
    def rounding(self) -> float:
        """How far from 1 the score of a row with itself can be."""
        return self.codec.rounding(self.config.dim)

    def present(self, names: dict[str, float]) -> list[str]:
        """Those of the tensors named that there are."""
        return [name for name in names if self._buffers[name] is not None]

    # -- room ---------------------------------------------------------------------------------

    def make_room(self, chunks: int, atoms: int) -> None:
        """Room for `chunks` more members and `atoms` more atoms in every slot.

        Reads the true counts from the device only when the bounds kept here are used up.
        """
        room_n, room_m = self.ids.shape[1], self.sums.shape[1]
        if self._most_members + chunks > room_n or self._most_atoms + atoms > room_m:
            self.measure()
        need_n, need_m = self._most_members + chunks, self._most_atoms + atoms
        new: dict[str, Tensor] = {}
        for names, room, need in ((PER_MEMBER, room_n, need_n), (PER_ATOM, room_m, need_m)):
            if need > room:
                shape = (self.streams, double(room, need))
                new |= {name: self._padded(name, shape) for name in self.present(names)}
        self._swap(new)

    def add_streams(self, streams: int) -> None:
        """Grow to `streams` slots; fewer than there are changes nothing."""
        if streams <= self.streams:
            return
        new = {k: self._padded(k, (streams, self.ids.shape[1])) for k in self.present(PER_MEMBER)}
        new |= {k: self._padded(k, (streams, self.sums.shape[1])) for k in self.present(PER_ATOM)}
        new |= {k: self._padded(k, (streams,)) for k in ("n_members", "n_atoms", "events")}
        self._swap(new)

    def measure(self) -> None:
        """Bring the host's bounds down to the true counts. Synchronises with the device."""
        self._most_members = int(self.n_members.max()) if self.streams else 0
        self._most_atoms = int(self.n_atoms.max()) if self.streams else 0

    def took(self, members: int, atoms: int) -> None:
        """Raise the host's bounds by what a slot may have been given at the most."""
        self._most_members += members
        self._most_atoms += atoms

    def provide(self, name: str) -> Tensor:
        """The optional tensor of that name, allocated if it is first asked for."""
        tensor = self._buffers[name]
        if tensor is None:
            tensor = self.ids.new_full(self.ids.shape, EMPTY[name], dtype=OPTIONAL[name])
            setattr(self, name, tensor)
        return tensor

    def changed(self) -> None:
        """Plans made before this are stale."""
        self.version = object()

    def _padded(self, name: str, shape: tuple[int, ...]) -> Tensor:
        old = getattr(self, name)
        new = old.new_full((*shape, *old.shape[len(shape) :]), EMPTY.get(name, 0))
        new[tuple(slice(0, n) for n in old.shape)] = old
        return new

    def _swap(self, new: dict[str, Tensor]) -> None:
        # All were allocated before the first is put in place: running out of memory loses nothing.
        for name, tensor in new.items():
            setattr(self, name, tensor)

    # -- rows as they are stored --------------------------------------------------------------

    def rows(self, at: At, n: At) -> Tensor:
        """Members `n` of the slots `at`, float32 [b, n, D]: decoded, or approximated from their
        coefficients, Σ_k a_k u_k."""
        if self.members is not None:
            return self.codec.decode(self._parts("members", (at, n)))
        if self.coefficients is None:
            raise ValueError("members='none': this memory keeps no rows")
        owner = self.member_atom[at, n].clamp(min=0).to(torch.int64)
        u = self.basis_rows((at,))
        mine = u.gather(1, owner[..., None, None].expand(-1, -1, *u.shape[2:]))
        return torch.einsum("bnk,bnkd->bnd", self.coefficients[at, n], mine)

    def plain_rows(self) -> Tensor | None:
        """The rows [S, N, D] if they are held as floating point numbers, else None."""
        return self.members if self.members_scale is None else None

    def basis_rows(self, at: tuple) -> Tensor:
        """Bases at an index of [S, M], float32 [..., K, D]."""
        return self.basis_codec.decode(self._parts("basis", at))

    def _parts(self, name: str, at: tuple) -> storage.Parts:
        scale = self._buffers[f"{name}_scale"]
        parts = {"codes": getattr(self, name)[at]}
        return parts if scale is None else parts | {"scale": scale[at]}

    def put(self, name: str, at: tuple, parts: storage.Parts) -> None:
        """Store encoded rows as "members" or "basis" at an index of [S, N] or [S, M]."""
        getattr(self, name)[at] = parts["codes"]
        if "scale" in parts:
            getattr(self, f"{name}_scale")[at] = parts["scale"]

    # -- whole states -------------------------------------------------------------------------

    def clear(self, slots: Tensor) -> None:
        """Empty these slots, nothing of them left in memory."""
        self.changed()
        for name in (*self.present(PER_MEMBER), *self.present(PER_ATOM)):
            getattr(self, name)[slots] = EMPTY[name]
        self.n_members[slots] = 0
        self.n_atoms[slots] = 0

    def flat(self, slots: Tensor | None = None) -> dict[str, Tensor]:
        """Live rows of these slots (None: all), one slot after another: [ΣN, …] and [ΣM, …], on
        the CPU."""
        every = slice(None) if slots is None else slots.to(self.device)
        out = {k: getattr(self, k)[every].cpu() for k in ("n_members", "n_atoms", "events")}
        out["next_id"] = self.next_id.cpu()
        if self.codebook is not None:
            out["codebook"] = self.codebook.cpu()
        for names, n in ((PER_MEMBER, self.n_members[every]), (PER_ATOM, self.n_atoms[every])):
            for name in self.present(names):
                tensor = getattr(self, name)
                live = torch.arange(tensor.shape[1], device=self.device) < n[:, None]
                out[name] = tensor[every][live].cpu()
        return out

    def load_flat(self, tensors: dict[str, Tensor], slots: Tensor | None = None) -> None:
        """The inverse of `flat`: into these empty slots, or into an empty bank of as many."""
        if slots is None:
            slots = torch.arange(self.streams, device=self.device)
            self.next_id.copy_(tensors["next_id"])
            if "codebook" in tensors:
                self.use_codebook(tensors["codebook"])
        for name in OPTIONAL.keys() & tensors.keys():
            self.provide(name)
        here = {k: tensors[k].to(self.device) for k in ("n_members", "n_atoms", "events")}
        self.measure()
        most = [int(here[k].max()) if len(slots) else 0 for k in ("n_members", "n_atoms")]
        # The slots are empty: room for the fullest of both is enough.
        have = (self._most_members, self._most_atoms)
        self.make_room(*(max(0, need - held) for need, held in zip(most, have, strict=True)))
        for names, n in ((PER_MEMBER, here["n_members"]), (PER_ATOM, here["n_atoms"])):
            start = n.cumsum(0) - n
            place = torch.arange(int(n.sum()), device=self.device) - start.repeat_interleave(n)
            row = slots.repeat_interleave(n)
            for name in self.present(names):
                if name in tensors:
                    getattr(self, name)[row, place] = tensors[name].to(self.device)
        for name, value in here.items():
            getattr(self, name)[slots] = value
        self.measure()

    def scores(self, x: Tensor, at: At, n: At) -> Tensor:
        """Inner products [b, T, n] of x [b, T, D] with members `n` of the slots `at`, from what is
        stored of them."""
        if self.members is not None:
            return self.codec.scores(x, self._parts("members", (at, n)))
        if self.coefficients is None:
            return x.new_zeros(*x.shape[:2], 0)
        # a·(Ux): the chunks in every basis once, then K numbers a member.
        own = torch.einsum("btd,bmkd->btmk", x, self.basis_rows((at,)))
        owner = self.member_atom[at, n].clamp(min=0).to(torch.int64)
        mine = own.gather(2, owner[:, None, :, None].expand(-1, x.shape[1], -1, own.shape[3]))
        return torch.einsum("btnk,bnk->btn", mine, self.coefficients[at, n])

    def use_codebook(self, codebook: Tensor) -> None:
        """Hold the rows of a bank that has none yet by this codebook from now on."""
        self.codebook = codebook.to(self.device)
        self.codec = storage.codec("pq", self.config.dim, {"codebook": self.codebook})
        shape, dtype = self.codec.layout(self.config.dim)["codes"]
        if self.members is not None:
            self.members = torch.zeros(
                (*self.members.shape[:2], *shape), dtype=dtype, device=self.device
            )

    # -- nn.Module ----------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Bank:
        with torch.inference_mode(False):
            for name, old in self._buffers.items():
                if old is not None:
                    new = fn(old)
                    setattr(self, name, new if new.dtype == old.dtype else old.to(new.device))
        if self.codebook is not None:
            self.codec = storage.codec("pq", self.config.dim, {"codebook": self.codebook})
        return self

    def _load_from_state_dict(
        self, state_dict: dict, prefix: str, metadata: dict, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        # Room and optional tensors are not part of what a state means: those of the incoming one
        # are taken. Everything is looked at before anything is changed.
        new = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        like = Bank(self.config, self.streams, "meta")
        if "codebook" in new and self.config.storage == "pq":
            like.use_codebook(new["codebook"])
        for name in OPTIONAL.keys() & new.keys():
            like.provide(name)
        problems = [
            f"size mismatch for {prefix}{name}: {tuple(new[name].shape)} {new[name].dtype} does not "
            f"fit a memory of {self.streams} streams and {self.config}"
            for name, want in like.named_buffers()
            if name in new and not fits(name, new[name], want)
        ]
        missing = [prefix + k for k, _ in like.named_buffers() if k not in new]
        unexpected = [prefix + k for k in new.keys() - dict(like.named_buffers()).keys()]
        if not problems and not missing:
            problems = room_problems(new)
        missing_keys += missing
        unexpected_keys += unexpected
        error_msgs += problems
        if problems or missing or unexpected:
            return
        with torch.inference_mode(False), torch.no_grad():
            copies = {k: v.detach().to(self.device, copy=True) for k, v in new.items()}
            for name in OPTIONAL.keys() - new.keys():
                setattr(self, name, None)
            self.codebook, self.codec = None, self.basis_codec
            if "codebook" in copies:
                self.use_codebook(copies["codebook"])
            self._swap(copies)
            self.changed()
            self.measure()


def fits(name: str, tensor: Tensor, want: Tensor) -> bool:
    """Whether a tensor can be the one of that name, whatever room it has."""
    same = tensor.dtype == want.dtype and tensor.dim() == want.dim()
    if not same or name not in EMPTY:
        return same and tensor.shape == want.shape
    return tensor.shape[:1] == want.shape[:1] and tensor.shape[2:] == want.shape[2:]


def room_problems(tensors: dict[str, Tensor]) -> list[str]:
    """Counts in a state that its own tensors have no room for."""
    room = {"n_members": tensors["ids"].shape[1], "n_atoms": tensors["sums"].shape[1]}
    return [
        f"{name} of up to {int(tensors[name].max())} for room of {most}"
        for name, most in room.items()
        if tensors[name].numel() and not 0 <= int(tensors[name].max()) <= most
    ]


def nbytes(
    config: RSMConfig, streams: int, members: int, atoms: int, codec: storage.Codec | None = None
) -> int:
    """Bytes of a bank with room for so many members and atoms in each stream, without times,
    labels and uses (8, 8 and 4 more a member once they are given).

    Args:
        codec: a trained product quantiser, its codebook then counted too; None: the storage's own
            (int8 for a "pq" not trained yet).
    """
    D, K = config.dim, config.rank
    own = storage.codec("int8" if config.storage == "pq" else config.storage, D)
    row = (codec or own).nbytes(1, D)
    per_member = {"full": row, "coefficients": 4 * K, "none": 0}[config.members] + 4 + 8
    per_atom = 4 * D + 4 + own.nbytes(K, D) + 4 * K + 8
    shared = 8 + (codec.shared_nbytes() if codec else 0)
    return streams * (members * per_member + atoms * per_atom + 2 * 8 + len(EVENTS) * 8) + shared


def double(room: int, need: int) -> int:
    """The next room of at least `need`: twice as much each time, 8 at the least."""
    room = max(room, 8)
    while room < need:
        room *= 2
    return room
