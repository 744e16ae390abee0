"""Arguments as users give them, made into tensors or refused by name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SAFE = 1e15  # norms within [1/SAFE, SAFE] neither lose digits nor overflow when squared in float32
NAMED = 8  # rows named in a message


def shown(value: object, most: int = 80) -> str:
    """A value for a message, cut short; Python refuses to write out very long integers."""
    try:
        return f"{value!r:.{most}}"
    except (ValueError, RuntimeError):  # RecursionError is one
        return f"a {type(value).__name__} too long to show"


def as_count(value: object, name: str, least: int, most: int = 2**31 - 1) -> int:
    """An int of that range. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected an int of at least {least}, got {shown(value)}")
    number = int(value)
    if not least <= number <= most:
        bounds = f"of at least {least}" if number < least else f"from {least} to {most}"
        raise ValueError(f"{name}: expected an int {bounds}, got {shown(number)}")
    return number


def as_flag(value: object, name: str) -> bool:
    """True or False. Raises TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {shown(value)}")
    return value


def as_path(value: object, name: str) -> Path:
    """A path that can name a file. Raises TypeError or ValueError, naming the argument."""
    if not isinstance(value, (str, os.PathLike)) or isinstance(os.fspath(value), bytes):
        raise TypeError(f"{name}: expected a path, got {shown(value)}")
    if not os.fspath(value) or "\0" in os.fspath(value):
        raise ValueError(f"{name}: expected a path, got {shown(value)}")
    return Path(value)


def as_choice(value: object, name: str, allowed: Sequence[str]) -> str:
    """One of some words. Raises ValueError."""
    if not (isinstance(value, str) and value in allowed):
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {shown(value)}")
    return value


def is_dense(x: Tensor) -> bool:
    """Whether a tensor holds its values, each in a place of its own."""
    return (
        x.layout == torch.strided
        and not (x.is_nested or x.is_quantized)
        and x.device.type != "meta"
    )


def as_list(value: object, name: str, wanted: str) -> list[Any]:
    """The elements of a list, a tensor or another container. Raises TypeError."""
    try:
        if isinstance(value, Tensor) and is_dense(value):
            return list(value.tolist())
        if not isinstance(value, (str, bytes, Mapping, type, Tensor)) and hasattr(value, "__len__"):
            return list(value)  # type: ignore[call-overload]
    except TypeError as error:  # of no dimensions
        raise TypeError(f"{name}: expected {wanted}, got {shown(value)}") from error
    raise TypeError(f"{name}: expected {wanted}, got {shown(value)}")


def as_device(device: object) -> torch.device:
    """The device named, if tensors can be made on it."""
    try:
        found = torch.device(device)  # type: ignore[call-overload]
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"device: cannot use {shown(device)} ({str(error).splitlines()[0]})"
        ) from error
    if found.type == "meta":
        raise ValueError("device: expected one that holds values, got 'meta'")
    return found


def as_rows(
    x: object, name: str, dims: tuple[int, ...], width: int | None, device: torch.device | None
) -> Tensor:
    """`x` on `device` if it is a float tensor of one of `dims` dimensions and the width asked;
    None: any width, and where it is."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name}: expected a floating dtype, got {x.dtype}; convert with .float()")
    if not is_dense(x):
        kind = "nested" if x.is_nested else x.layout
        raise TypeError(f"{name}: expected a dense tensor with values, got {kind} on {x.device}")
    if x.dim() not in dims:
        wanted = " or ".join(map(str, dims))
        raise ValueError(f"{name}: expected {wanted} dimensions, got shape {tuple(x.shape)}")
    if width is not None and x.shape[-1] != width:
        raise ValueError(f"{name}: expected width dim={width}, got {x.shape[-1]}")
    return x.to(device or x.device).contiguous()


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
    if len(slots) > 1 and len(set(slots.tolist())) < len(slots):
        values, times = slots.unique(return_counts=True)
        raise ValueError(f"{name}: {named(values[times > 1].tolist())} named more than once")
    return slots


def as_integers(value: object, name: str, dims: int) -> Tensor:
    """An int64 tensor on the CPU of `dims` dimensions from integers in any container."""
    value = as_tensor(value, name, "integers")
    if value.numel() == 0:
        value = value.to(torch.int64)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name}: expected integers, got {value.dtype}")
    if value.dim() != dims:
        raise ValueError(f"{name}: expected {dims} dimensions, got shape {tuple(value.shape)}")
    return value.to("cpu", torch.int64)


def as_tensor(value: object, name: str, wanted: str) -> Tensor:
    """A dense tensor of numbers in any container. Raises TypeError."""
    try:
        found = value if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"{name}: expected {wanted}, got {shown(value)}") from error
    if not is_dense(found):
        raise TypeError(f"{name}: expected {wanted}, got a tensor that holds none")
    return found


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
    if check or not isinstance(value, Tensor):
        value = as_tensor(value, name, "numbers")
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
