"""Labels of any kind as the small integers a `StreamMemory` holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral

from torch import Tensor

from rsm_torch.checks import as_list, is_dense, shown

Label = str | int


class Labels:
    """Labels and their codes, counted from 1 in the order they first came; 0 is no label."""

    def __init__(self, names: Iterable[Label] = ()):
        self.names: tuple[Label, ...] = tuple(names)
        self._codes = {_key(name): code for code, name in enumerate(self.names, start=1)}

    def encode(self, labels: Sequence[Label | None] | Tensor, n: int) -> tuple[list[int], Labels]:
        """The codes of `n` labels, and the labels with those that are new; this stays as it was.

        Raises:
            TypeError: a label that is neither a string, an integer nor None.
            ValueError: not `n` of them.
        """
        labels = as_list(labels, "labels", "a list of strings or integers")
        if len(labels) != n:
            raise ValueError(f"labels: expected one for each of {n} items, got {len(labels)}")
        fresh = dict.fromkeys(
            _key(_plain(label)) for label in labels if label is not None
        )  # in order
        new = Labels((*self.names, *(name for _, name in fresh if (_, name) not in self._codes)))
        codes = [0 if label is None else new._codes[_key(_plain(label))] for label in labels]
        return codes, new

    def decode(self, codes: Iterable[int]) -> list[Label | None]:
        return [self.names[code - 1] if code > 0 else None for code in codes]


def _key(label: Label) -> tuple[type, Label]:
    return type(label), label


def _plain(label: object) -> Label:
    if isinstance(label, str):
        return str(label)
    if isinstance(label, Tensor) and is_dense(label) and label.dim() == 0:
        label = label.item()
    if isinstance(label, bool) or not isinstance(label, Integral):
        raise TypeError(f"labels: expected strings, integers or None, got {shown(label)}")
    number = int(label)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"labels: expected integers of 64 bits, got {shown(number)}")
    return number
