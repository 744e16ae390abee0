"""Reading the options of `rsm eval`: each says what it expected."""

from __future__ import annotations

from rsm_torch.cli.errors import CommandError

DTYPES = ("float32", "float16", "bfloat16")


def parts(given: str) -> list[str]:
    """What stands between commas, each once."""
    return list(dict.fromkeys(part.strip() for part in given.split(",")))


def whole(option: str, given: str, least: int, most: int | None = None) -> list[int]:
    """Whole numbers between commas, each once."""
    found = parts(given)
    plain = all(part.isascii() and part.isdigit() for part in found)
    if not plain or not all(least <= int(part) <= (most or int(part)) for part in found):
        upto = "" if most is None else f" and at most {most}"
        raise CommandError(
            f"{option}: expected whole numbers of at least {least}{upto}, separated by commas, "
            f"got {given!r:.80}"
        )
    return list(dict.fromkeys(map(int, found)))


def at_least(option: str, value: int | None, least: int) -> None:
    """Refuse a number that is too small; None is none."""
    if value is not None and value < least:
        raise CommandError(f"{option}: expected at least {least}, got {value}")


def server_limits(
    timeout: float | None, time_limit: float | None, retries: int | None, concurrency: int | None
) -> dict[str, float]:
    """Those of a server's limits that were given, by the names `make_reader` has for them."""
    from rsm_torch.eval.readers.openai_api import check_limits

    given = {
        "timeout": timeout, "time_limit": time_limit, "retries": retries,
        "concurrency": concurrency,
    }  # fmt: skip
    limits = {name: value for name, value in given.items() if value is not None}
    try:
        check_limits(limits)
    except ValueError as error:
        name, _, why = str(error).partition(": ")
        raise CommandError(f"--{name.replace('_', '-')}: {why}") from error
    return limits


def check_dtype(dtype: str | None) -> None:
    """Refuse a name that is no dtype of a model here."""
    if dtype is not None and dtype not in DTYPES:
        raise CommandError(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")


def check_device(device: str) -> None:
    """Refuse a device that nothing can be put on here."""
    import torch

    try:
        torch.empty(0, device=device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        raise CommandError(f"--device: cannot use {device!r} here ({why})") from error
