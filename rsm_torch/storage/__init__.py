"""How rows are held: one small codec for each storage, all behind `Codec`.

`codec` gives the codec of a storage by its name; `train_pq` learns a product quantiser from rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rsm_torch.storage.bits import BitsCodec
from rsm_torch.storage.floats import DTYPES, FloatCodec
from rsm_torch.storage.int8 import Int8Codec
from rsm_torch.storage.pq import PQCodec, train_pq
from rsm_torch.storage.protocol import Codec, Parts

__all__ = [
    "BITS",
    "NAMES",
    "BitsCodec",
    "Codec",
    "FloatCodec",
    "Int8Codec",
    "PQCodec",
    "Parts",
    "codec",
    "train_pq",
]

BITS = {"bits1": 1, "bits2": 2, "bits3": 3, "bits4": 4}
NAMES = ("float32", "float16", "bfloat16", "int8", *BITS, "pq")


def codec(name: str, width: int, state: Mapping[str, Tensor] | None = None) -> Codec:
    """The codec of a storage.

    Args:
        name: one of `NAMES`.
        width: D of the rows.
        state: what `Codec.state` of a trained "pq" returned, which stays on its device; nothing
            for the others.

    Raises:
        ValueError: a name not known, "pq" without its state, or a state that does not fit.
    """
    if name == "pq":
        return PQCodec.from_state(state or {}, width)
    if state:
        raise ValueError(f"state: expected none for storage {name!r}, got {', '.join(state)}")
    if name in DTYPES:
        return FloatCodec(name)
    if name == "int8":
        return Int8Codec()
    if name in BITS:
        return BitsCodec(BITS[name], width)
    raise ValueError(f"storage: expected one of {', '.join(NAMES)}, got {name!r}")
