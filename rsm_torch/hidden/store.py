"""A `StreamMemory` with labels of any kind, and with the texts if they are to be kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rsm_torch.checks import as_list
from rsm_torch.hidden.blocks import write_in_blocks
from rsm_torch.hidden.labels import Label, Labels
from rsm_torch.hidden.recalled import Recalled
from rsm_torch.hidden.rows import Rows, per_item
from rsm_torch.memory import StreamMemory
from rsm_torch.outputs import Written

LabelsGiven = Sequence[Label | None] | Tensor | None


class Store:
    """Writes, finds and removes states, their labels and texts together.

    Args:
        memory: the tensors.
        labels: those there are.
        texts: by id; None: texts are not kept.
    """

    def __init__(
        self,
        memory: StreamMemory,
        labels: Iterable[Label] = (),
        texts: dict[int, str] | None = None,
    ):
        self.memory, self.labels, self.texts = memory, Labels(labels), texts

    def write_items(
        self,
        states: Tensor,
        rows: Rows,
        labels: LabelsGiven = None,
        times: Any = None,
        ids: Any = None,
        texts: Sequence[str] | None = None,
    ) -> Written:
        """Write n states [n, D], each to its place in `rows`."""
        n = len(states)
        codes, known = self.encode(labels, n)
        given = {"times": per_item(times, "times", n, torch.float64), "labels": codes}
        given["ids"] = per_item(ids, "ids", n, torch.int64)
        spread: dict[str, Any] = {k: v if v is None else rows.spread(v) for k, v in given.items()}
        written = write_in_blocks(
            self.memory, rows.spread(states), rows.slots, rows.lengths, **spread
        )
        self.labels = known
        out = replace(
            written, atoms=rows.collect(written.atoms), opened=rows.collect(written.opened),
            ids=rows.collect(written.ids),
        )  # fmt: skip
        if texts is not None and self.texts is not None:
            self.texts.update(zip(out.ids.tolist(), texts, strict=True))
        self.prune()
        return out

    def write_batch(
        self,
        states: Tensor,
        streams: Sequence[int] | Tensor | None,
        lengths: Sequence[int] | Tensor | None,
        labels: Sequence[Sequence[Label | None]] | None = None,
        times: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Written:
        """Write states [B, T, D], as `StreamMemory.write` with labels [B][T]."""
        codes, known = None, self.labels
        if labels is not None:
            shape = tuple(states.shape[:2])
            wanted = f"{shape[0]} lists of {shape[1]}"
            labels = [as_list(row, "labels", wanted) for row in as_list(labels, "labels", wanted)]
            got = [len(row) for row in labels]
            if got != [shape[1]] * shape[0]:
                raise ValueError(f"labels: expected {wanted}, got {got!r:.80}")
            codes, known = self.encode([one for row in labels for one in row], shape[0] * shape[1])
            codes = None if codes is None else codes.view(shape)
        written = write_in_blocks(self.memory, states, streams, lengths, times, codes, ids)
        self.labels = known
        self.prune()
        return written

    def encode(self, labels: LabelsGiven, n: int) -> tuple[Tensor | None, Labels]:
        """Codes [n], and the labels to hold once they are written."""
        if labels is None:
            return None, self.labels
        codes, known = self.labels.encode(labels, n)
        return torch.tensor(codes, dtype=torch.int64), known

    def recall(self, states: Tensor, rows: Rows, *how: Any) -> Recalled:
        """What `StreamMemory.search(…, *how)` finds for n states [n, D]."""
        memory = self.memory
        hits = memory.search(rows.spread(states), rows.slots, *how)
        codes = memory.labels_of(hits.ids, rows.slots)
        ids, scores, atoms, codes = map(rows.collect, (hits.ids, hits.scores, hits.atoms, codes))
        texts = None
        if self.texts is not None:
            texts = [[self.texts.get(at) for at in row] for row in ids.tolist()]
        return Recalled(ids, scores, atoms, codes, self.labels, texts)

    def forget(
        self, ids: Sequence[int] | Tensor, streams: Sequence[int] | Tensor | None = None
    ) -> None:
        self.memory.forget(ids, streams)
        self.prune(True)

    def reset(self, streams: Sequence[int] | Tensor | None = None) -> None:
        self.memory.reset(streams)
        self.prune(True)

    def nbytes(self) -> dict[str, int]:
        """As `StreamMemory`, with "texts" and "label_names" in UTF-8."""
        size = self.memory.nbytes()
        size["texts"] = (
            sum(len(text.encode("utf-8", "replace")) for text in self.texts.values())
            if self.texts
            else 0
        )
        size["label_names"] = sum(
            len(str(name).encode("utf-8", "replace")) for name in self.labels.names
        )
        size["total"] = size["reserved"] + size["texts"] + size["label_names"]
        return size

    def keep(self, texts: Mapping[int, str]) -> None:
        """Keep texts by id, if texts are kept."""
        if self.texts is not None:
            self.texts.update(texts)
            self.prune()

    def prune(self, removed: bool = False) -> None:
        """Drop texts of items that are gone. Limits make items go too."""
        if self.texts and (removed or self.memory.config.capped):
            held = set(self.memory.ids().tolist())
            self.texts = {at: text for at, text in self.texts.items() if at in held}
