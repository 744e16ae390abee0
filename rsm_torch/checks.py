"""Arguments as users give them, made into tensors or refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SAFE = 1e15  # norms within [1/SAFE, SAFE] neither lose digits nor overflow when squared in float32
NAMED = 8  # rows named in a message


@dataclass(frozen=True)
class Batch:
    """A checked write, on the memory's device; rows not valid are zero, -1 or NaN."""

    slots: Tensor  # [B] int64
    x: Tensor  # [B, T, D] float32 unit rows, as the storage holds them
    parts: dict[str, Tensor]  # [B, T, …], the same rows as they are stored
    valid: Tensor  # [B, T] bool
    ids: Tensor  # [B, T] int64
    times: Tensor | None  # [B, T] float64
    labels: Tensor | None  # [B, T] int64


def as_device(device: object) -> torch.device:
    """The device named, if tensors can be made on it."""
    try:
        found = torch.device(device)  # type: ignore[call-overload]
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"device: cannot use {device!r} ({str(error).splitlines()[0]})") from error
    return found


def as_rows(
    x: object, name: str, dims: tuple[int, ...], width: int, device: torch.device
) -> Tensor:
    """`x` on `device` if it is a float tensor of one of `dims` dimensions and the width asked."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name}: expected a floating dtype, got {x.dtype}; convert with .float()")
    if x.layout != torch.strided or x.device.type == "meta":
        raise TypeError(
            f"{name}: expected a dense tensor with values, got {x.layout} on {x.device}"
        )
    if x.dim() not in dims:
        wanted = " or ".join(map(str, dims))
        raise ValueError(f"{name}: expected {wanted} dimensions, got shape {tuple(x.shape)}")
    if x.shape[-1] != width:
        raise ValueError(f"{name}: expected width dim={width}, got {x.shape[-1]}")
    return x.to(device).contiguous()


def as_slots(
    streams: Sequence[int] | Tensor | None, rows: int | None, have: int, name: str = "streams"
) -> Tensor:
    """Distinct slots [B] as int64 on the CPU; None is 0 … rows-1 (all of them if rows is None)."""
    if streams is None:
        rows = have if rows is None else rows
        if rows > have:
            raise ValueError(
                f"x: {rows} rows for a memory of {have} streams; name them by streams="
            )
        return torch.arange(rows)
    slots = as_integers(streams, name, 1)
    if rows is not None and len(slots) != rows:
        raise ValueError(f"{name}: expected one slot for each of {rows} rows, got {len(slots)}")
    wrong = slots[(slots < 0) | (slots >= have)].tolist()
    if wrong:
        raise ValueError(
            f"{name}: {named(wrong)} out of range for {have} streams (0 to {have - 1})"
        )
    values, times = slots.unique(return_counts=True)
    if len(values) < len(slots):
        raise ValueError(f"{name}: {named(values[times > 1].tolist())} named more than once")
    return slots


def as_integers(value: object, name: str, dims: int) -> Tensor:
    """An int64 tensor on the CPU of `dims` dimensions from integers in any container."""
    if not isinstance(value, Tensor):
        if isinstance(value, str):
            raise TypeError(f"{name}: expected integers, got {value!r}")
        try:
            value = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{name}: expected integers, got {value!r:.80}") from error
    if value.numel() == 0:
        value = value.to(torch.int64)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name}: expected integers, got {value.dtype}")
    if value.dim() != dims:
        raise ValueError(f"{name}: expected {dims} dimensions, got shape {tuple(value.shape)}")
    return value.to("cpu", torch.int64)


def as_valid(
    lengths: Sequence[int] | Tensor | None,
    rows: int,
    chunks: int,
    device: torch.device,
    check: bool,
) -> Tensor:
    """[B, T] bool: the first `lengths[b]` of each row."""
    if lengths is None:
        return torch.ones(rows, chunks, dtype=torch.bool, device=device)
    if check or not isinstance(lengths, Tensor):
        lengths = as_integers(lengths, "lengths", 1)
        if len(lengths) != rows:
            raise ValueError(f"lengths: expected one for each of {rows} rows, got {len(lengths)}")
        wrong = [n for n in lengths.tolist() if not 0 <= n <= chunks]
        if wrong:
            raise ValueError(f"lengths: {named(wrong)} outside 0 to {chunks}, the chunks given")
    return torch.arange(chunks, device=device) < lengths.to(device)[:, None]


def unit_rows(x: Tensor, valid: Tensor | None, name: str) -> Tensor:
    """Rows of x [..., D] divided by their norms, in float32; rows not valid become zero.

    Raises:
        ValueError: valid rows that are NaN, infinite or zero, by their indices.
    """
    x = x if x.dtype == torch.float64 else x.float()
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    plain = (norm >= 1 / SAFE) & (norm <= SAFE)
    if bool((plain if valid is None else plain | ~valid[..., None]).all()):
        unit = (x / norm).float()
    else:
        unit, known = directions(x)
        bad = ~known if valid is None else valid & ~known
        if bool(bad.any()):
            raise ValueError(f"{name}: {describe(x, bad)}")
    if valid is None or bool(valid.all()):
        return unit
    return torch.where(valid[..., None], unit, 0)


def directions(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x [..., D] divided by their norms, however large or small, in float32, and which
    rows [...] have a direction; the others become zero. Reads nothing back from the device."""
    x = x if x.dtype == torch.float64 else x.float()
    peak = x.abs().amax(-1, keepdim=True)
    known = (peak > 0) & peak.isfinite()
    x = torch.where(known, x / peak, 0)
    return torch.nn.functional.normalize(x, dim=-1).float(), known[..., 0]


def describe(x: Tensor, bad: Tensor) -> str:
    """Which rows of x [..., D] have no direction, and why."""
    where = bad.nonzero()[:NAMED].tolist()
    reasons = []
    for at in where:
        row = x[tuple(at)]
        why = "NaN" if row.isnan().any() else "inf" if row.isinf().any() else "zero"
        reasons.append(f"{', '.join(map(str, at))} ({why})")
    more = int(bad.sum()) - len(where)
    text = f"rows without a direction: [{'], ['.join(reasons)}]" + (
        f" and {more} more" if more else ""
    )
    return text + "; nothing was stored. Drop or repair them"


def as_payload(
    value: Tensor,
    name: str,
    valid: Tensor,
    dtype: torch.dtype,
    empty: float,
    check: bool = True,
) -> Tensor:
    """A [B, T] payload on the device of `valid`, `empty` where not valid."""
    try:
        value = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected numbers, got {value!r:.80}") from error
    if value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name}: expected numbers, got {value.dtype}")
    if value.shape != valid.shape:
        raise ValueError(f"{name}: expected shape {tuple(valid.shape)}, got {tuple(value.shape)}")
    if dtype == torch.int64 and (value.is_floating_point() or value.dtype == torch.bool):
        raise TypeError(f"{name}: expected integers, got {value.dtype}")
    value = value.to(valid.device, dtype)
    if check and dtype == torch.float64 and bool(value[valid].isinf().any()):
        raise ValueError(f"{name}: expected finite numbers or NaN for unknown, got an infinite one")
    if check and dtype == torch.int64 and bool((value[valid] < 0).any()):
        raise ValueError(f"{name}: expected integers >= 0, got {int(value[valid].min())}")
    return torch.where(valid, value, empty)


def named(values: list) -> str:
    """A few of `values` for a message."""
    more = f" and {len(values) - NAMED} more" if len(values) > NAMED else ""
    return ", ".join(map(str, values[:NAMED])) + more
