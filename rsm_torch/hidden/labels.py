"""Labels of any kind as the small integers a `StreamMemory` holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

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
        if isinstance(labels, Tensor):
            labels = labels.tolist()
        if isinstance(labels, str) or not hasattr(labels, "__len__"):
            raise TypeError(f"labels: expected a list of strings or integers, got {labels!r:.80}")
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
    if isinstance(label, bool) or not hasattr(label, "__index__"):
        raise TypeError(f"labels: expected strings, integers or None, got {label!r}")
    return label.__index__()
