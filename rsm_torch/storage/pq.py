"""Product quantiser: a row is cut into sub-vectors, each held as the number of a codeword.

Letters: m sub-vectors of d numbers each, m·d >= D.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rsm_torch.storage.floats import ROUNDING
from rsm_torch.storage.int8 import Int8Codec, one_over_norm
from rsm_torch.storage.kmeans import kmeans, nearest
from rsm_torch.storage.protocol import Parts, Unrotated, check_width

CODEWORDS = 256  # what a byte can name
SUBVECTOR = 4  # numbers a byte stands for by default
SAMPLE = 32 * CODEWORDS  # rows looked at in training


class PQCodec(Unrotated):
    """`⌈D / d⌉ + 4` bytes a row, and 4 · 256 · m · d once for the codebook: as much as 256 rows of
    float32, so that it pays from a few hundred rows on.

    Each sub-vector becomes its nearest codeword (Euclidean); the scale makes the row a unit row
    again. Where d does not divide D the last sub-vector is filled up with zeros. A row whose nearest
    codewords are all zero decodes to zero: rows trained on and rows held should be alike.

    Args:
        codebook: [m, 256, d] float32, on the device of the rows.
        width: D, with m = ⌈D / d⌉.
    """

    name = "pq"

    def __init__(self, codebook: Tensor, width: int) -> None:
        if codebook.dim() != 3 or codebook.shape[1] != CODEWORDS:
            raise ValueError(
                f"codebook: expected shape (m, {CODEWORDS}, d), got {tuple(codebook.shape)}"
            )
        m, _, d = codebook.shape
        if d < 1 or m != -(-width // d):
            raise ValueError(
                f"codebook: {m} sub-vectors of {d} do not hold width {width}; train one for it"
            )
        self.codebook = codebook.float()
        self.width = width

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], width: int) -> PQCodec:
        """The inverse of `state`. Raises ValueError if there is no codebook or of another width."""
        if set(state) != {"codebook"}:
            raise ValueError(
                f"state: expected 'codebook', got {sorted(state)}; train_pq makes a codebook"
            )
        return cls(state["codebook"], width)

    def state(self) -> dict[str, Tensor]:
        return {"codebook": self.codebook}

    def layout(self, width: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"codes": ((self.subvectors(width),), torch.uint8), "scale": ((), torch.float32)}

    def subvectors(self, width: int) -> int:
        """m. Raises ValueError for a width that the codebook was not trained for."""
        if width != self.width:
            raise ValueError(f"width: the codebook is of width {self.width}, got {width}")
        return self.codebook.shape[0]

    def encode(self, rows: Tensor) -> Parts:
        check_width(rows, self.width)
        flat = rows.float().reshape(-1, self.width)
        codes = nearest(split(flat, self.codebook.shape[2]), self.codebook).mT
        held = ~(flat == 0).all(-1)
        codes = torch.where(held[:, None], codes, 0)
        scale = torch.where(held, one_over_norm(self._look_up(codes)), 0)
        return {
            "codes": codes.to(torch.uint8).view(*rows.shape[:-1], len(self.codebook)),
            "scale": scale.view(rows.shape[:-1]),
        }

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        return self._look_up(parts["codes"]) * parts["scale"][..., None]

    def floats(self, codes: np.ndarray, scale: Any) -> np.ndarray:
        return self.numbers(codes) * scale[..., None]

    def numbers(self, codes: np.ndarray) -> np.ndarray:
        book = self.codebook.numpy()
        m, _, d = book.shape
        return book[np.arange(m), codes].reshape(*codes.shape[:-1], m * d)[..., : self.width]

    def _look_up(self, codes: Tensor) -> Tensor:
        """The codewords of codes [..., m], side by side: [..., D]."""
        m, k, d = self.codebook.shape
        at = codes.to(torch.int32) + torch.arange(m, dtype=torch.int32, device=codes.device) * k
        rows = self.codebook.view(m * k, d).index_select(0, at.flatten())
        return rows.view(*codes.shape[:-1], m * d)[..., : self.width]

    def scores(self, x: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        # Tables of x · codeword, the usual way, were up to twice as fast for one long stream on a
        # CPU and up to ten times slower for many short ones.
        return (x @ self._look_up(parts["codes"]).mT) * parts["scale"][..., None, :]

    def nbytes(self, rows: int, width: int) -> int:
        return rows * (self.subvectors(width) + 4)

    def shared_nbytes(self) -> int:
        return 4 * self.codebook.numel()

    def rounding(self, width: int) -> float:
        return ROUNDING["float32"]


def train_pq(rows: Tensor, subvector: int = SUBVECTOR, seed: int = 0) -> PQCodec | Int8Codec:
    """A product quantiser for rows like these, or int8 where they are too few.

    Args:
        rows: [n, D] float, finite; zero rows are passed over. At most 8,192, drawn by the seed,
            are looked at. A few thousand train well; near 256, rows seen later fit less.
        subvector: numbers d that one byte stands for, 1 <= d; more than D means D.
        seed: the same rows and seed give the same codebook.

    Warns:
        UserWarning: fewer than 256 rows, the codewords to be found; int8 comes back then.

    Raises:
        ValueError: rows not of two dimensions, or `subvector` below 1.
    """
    if rows.dim() != 2 or rows.shape[1] == 0:
        raise ValueError(f"rows: expected shape (n, D), got {tuple(rows.shape)}")
    if subvector < 1:
        raise ValueError(f"subvector: expected at least 1, got {subvector}")
    rows = rows.float()[~(rows == 0).all(-1)]
    if len(rows) < CODEWORDS:
        warnings.warn(
            f"a product quantiser needs at least {CODEWORDS} rows to train on, got {len(rows)}: "
            "stored as int8",
            stacklevel=2,
        )
        return Int8Codec()
    width = rows.shape[1]
    some = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:SAMPLE]
    # On the CPU, since sums by index come in any order on a GPU and would differ from run to run.
    parts = split(rows[some.to(rows.device)].cpu(), min(subvector, width))
    return PQCodec(kmeans(parts, CODEWORDS, seed).to(rows.device), width)


def split(rows: Tensor, d: int) -> Tensor:
    """Rows [n, D] cut into sub-vectors of d, the last filled up with zeros: [m, n, d]."""
    n, width = rows.shape
    m = -(-width // d)
    return pad(rows, (0, m * d - width)).view(n, m, d).transpose(0, 1).contiguous()
