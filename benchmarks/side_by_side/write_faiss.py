"""Online clustering with one faiss index per stream, as a user of faiss writes it."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np

from benchmarks.side_by_side.job import Prepared
from benchmarks.side_by_side.timing import Absent, System

NAMES = ("faiss", "faiss + centroids")


def systems(prepared: Prepared) -> list[System | Absent]:
    """Search for the best member, decide, add, chunk by chunk: by that member alone, and with the
    centroids beside it, which makes it the whole gate."""
    if find_spec("faiss") is None:
        return [Absent(name) for name in NAMES]
    peer = FaissStreams(prepared)
    return [
        System(NAMES[0], peer.by_member, peer.nbytes, peer.back, note="members only"),
        System(NAMES[1], peer.by_both, peer.nbytes + peer.sums_bytes, peer.back,
               note="the whole gate"),
    ]  # fmt: skip


class FaissStreams:
    """An `IndexFlatIP` for each stream, and whose each of its members is."""

    def __init__(self, prepared: Prepared) -> None:
        import faiss

        held, self.new = prepared.held.numpy(), prepared.new.numpy()
        self.tau, self.start = prepared.job.tau, prepared.start
        self.indexes = []
        for rows in held:
            index = faiss.IndexFlatIP(rows.shape[1])
            index.add(rows)
            self.indexes.append(index)
        room = self.new.shape[1]
        self._added = faiss.IDSelectorRange(held.shape[1], held.shape[1] + room)
        self._sums = []
        for rows, start in zip(held, self.start, strict=True):
            sums = np.zeros((start.atoms + room, rows.shape[1]), np.float32)
            np.add.at(sums, start.owner, rows)
            self._sums.append(sums)
        self.nbytes = sum(index.codes.size() for index in self.indexes)
        self.sums_bytes = sum(s.atoms for s in self.start) * held.shape[2] * 4

    def back(self) -> None:
        """Takes out what was added; the room it was given stays."""
        for index in self.indexes:
            index.remove_ids(self._added)
        self.sums = [sums.copy() for sums in self._sums]

    def by_member(self) -> np.ndarray:
        atoms = np.empty(self.new.shape[:2], np.int64)
        for b, index in enumerate(self.indexes):
            live, owner = self.start[b].atoms, self.start[b].owner.tolist()
            for t in range(self.new.shape[1]):
                row = self.new[b, t : t + 1]
                score, at = index.search(row, 1)
                if score[0, 0] >= self.tau:
                    atom = owner[at[0, 0]]
                else:
                    atom, live = live, live + 1
                index.add(row)
                owner.append(atom)
                atoms[b, t] = atom
        return atoms

    def by_both(self) -> np.ndarray:
        atoms = np.empty(self.new.shape[:2], np.int64)
        for b, index in enumerate(self.indexes):
            live, owner, sums = self.start[b].atoms, self.start[b].owner.tolist(), self.sums[b]
            for t in range(self.new.shape[1]):
                row = self.new[b, t : t + 1]
                score, at = index.search(row, 1)
                cosines = sums[:live] @ row[0] / np.linalg.norm(sums[:live], axis=1)
                atom = int(cosines.argmax())
                if cosines[atom] < score[0, 0]:
                    atom = owner[at[0, 0]]
                if max(cosines.max(), score[0, 0]) < self.tau:
                    atom, live = live, live + 1
                sums[atom] += row[0]
                index.add(row)
                owner.append(atom)
                atoms[b, t] = atom
        return atoms
