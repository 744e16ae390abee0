"""What every codec does.

Rows are unit vectors, or zero where a place is empty. Two promises hold for all codecs:

- Inner products with decoded rows are cosines and need no correction. A decoded row is a unit vector
  again (within `rounding`); of "bits1" to "bits4" it is longer, by as much as makes its products
  unbiased estimates of those of the row that was encoded. A zero row decodes to zero, and so do
  parts that are all zero.
- Decoding is exact: what a memory decides by is `decode(encode(rows))`. Encode once and keep those
  parts. Encoding decoded rows again gives the same parts, except from "pq", whose nearest
  codewords may change once a row has been scaled, and from bits in a few numbers a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

Parts = dict[str, Tensor]  # tensors [..., *shape] of the shapes that `Codec.layout` names


class Codec(Protocol):
    """How rows of a width D are held. `name` is the storage it is asked for by."""

    name: str

    def layout(self, width: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The tensors that one row is held as, their shapes and dtypes: always "codes", and
        "scale" (float32, one number) where there is one."""

    def encode(self, rows: Tensor) -> Parts:
        """Rows [..., D], of any floating dtype and finite, as parts [..., *shape]."""

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The rows [..., D] that parts stand for, float32."""

    def floats(self, codes: np.ndarray, scale: Any) -> np.ndarray:
        """`decode` of NumPy arrays on a CPU (bfloat16 as uint16), on the calling thread alone."""

    def rotate(self, x: np.ndarray) -> np.ndarray:
        """Rows x [..., D] float32 in the coordinates of `numbers`: as they are, but for bits."""

    def numbers(self, codes: np.ndarray) -> np.ndarray:
        """What is quickest to multiply, float32 [..., D]: its products with what `rotate` gives,
        times the scale where there is one, are those of `floats` with what `rotate` was given."""

    def scores(self, x: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """Inner products [..., T, n] of x [..., T, D] float32 with the rows of parts [..., n].

        Equal to `x @ decode(parts).mT` up to float32 rounding. What is in between takes the room
        of n decoded rows or of the result, whichever is more: callers tile n.
        """

    def nbytes(self, rows: int, width: int) -> int:
        """Bytes of the parts of that many rows; `shared_nbytes` is not in it."""

    def shared_nbytes(self) -> int:
        """Bytes held once for all rows: the codebook of "pq", else 0."""

    def rounding(self, width: int) -> float:
        """A bound of |‖row‖² - 1| over decoded rows, and so of |‖row‖ - 1|; of bits a bound of
        1 - ‖row‖² alone. No score of a row with itself can be asked to come nearer than this to
        1."""

    def state(self) -> dict[str, Tensor]:
        """What `codec(name, width, state)` needs to make this codec again."""


class Unrotated:
    """Of a codec whose rows are held in the coordinates they came in."""

    def rotate(self, x: np.ndarray) -> np.ndarray:
        return x


def check_width(rows: Tensor, width: int) -> None:
    """Raises ValueError if rows [..., D] are not of that width."""
    if rows.shape[-1] != width:
        raise ValueError(f"rows: expected width {width}, got {rows.shape[-1]}")
