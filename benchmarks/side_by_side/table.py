"""A benchmark's figures for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

UNIT = {"write": "chunks", "search": "queries"}
AGREES = {"write": "same atom", "search": "overlap"}


def table(kind: str, shape: dict[str, Any]) -> Table:
    """One comparison. `ratio` is how many times the first row's median a row's median is."""
    from rich import box
    from rich.table import Table

    unit = UNIT[kind]
    per = f"{shape[unit]} new" if kind == "write" else f"{shape[unit]} asked"
    atoms = shape["atoms"]
    grid = Table(
        title=f"{kind}: {shape['streams']:,} streams, {shape['held']:,} held in "
        f"{atoms['mean']:.0f} atoms, {per}, {shape['dim']} wide",
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    grid.add_column("system")
    for head in ("median", f"{unit}/s", "ratio", AGREES[kind], "state", "peak"):
        grid.add_column(head, justify="right", no_wrap=True)
    grid.add_column("note")
    for row in shape["rows"]:
        grid.add_row(*_cells(row, unit))
    return grid


def skew(report: dict[str, Any]) -> Table:
    """Shapes of streams beside each other: bytes over what is live, and writes over those of equal
    streams."""
    from rich import box
    from rich.table import Table

    grid = Table(
        title="skew: as many chunks in streams of other lengths", title_justify="left",
        header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    grid.add_column("shape")
    news = list(report["shapes"][0]["times_equal"])
    heads = ("streams", "chunks", "longest", "live", "allocated", "reserved")
    for head in (*heads, *(f"write of {n}, times equal" for n in news)):
        grid.add_column(head, justify="right")
    for row in report["shapes"]:
        grid.add_row(
            row["shape"], f"{row['streams']:,}", f"{row['chunks']:,}", f"{row['longest']:,}",
            _bytes(row["live"]), f"{row['allocated_over_live']:.3f} x",
            f"{row['reserved_over_live']:.3f} x", *(f"{row['times_equal'][n]:.2f}" for n in news),
        )  # fmt: skip
    return grid


def lines(report: dict[str, Any]) -> list[str]:
    """What stands below the tables: growth, parity, machine, versions, load."""
    out = []
    if "growth" in report:
        growth = report["growth"]
        times = zip(growth["held"], growth["seconds_per_chunk"], strict=True)
        shown = ", ".join(f"{1e6 * s:,.0f} µs a chunk at {n:,} held" for n, s in times)
        out.append(f"growth, one stream: {shown}; ratio {growth['ratio']:.1f}")
    if report["bench"] == "skew":
        out += _skew_lines(report)
    parity, machine = report["parity"], report["machine"]
    out.append(f"parity: {parity['compared']:,} results equal to the reference's")
    versions = ", ".join(f"{name} {v}" for name, v in report["versions"].items() if v)
    out.append(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} torch threads; "
        f"{versions}; commit {report['commit'] or 'unknown'}"
    )
    out.append(f"load average before {report['load_before']}, after {report['load_after']}")
    return out


def _skew_lines(report: dict[str, Any]) -> list[str]:
    one, fork, busy = report["singles"], report["fork"], report["busy"]
    out = [
        f"{one['writes']:,} single writes to a stream of {one['held']:,}: median "
        f"{_time(one['median_seconds'])}, slowest {one['slowest_over_median']:.1f} x",
        f"fork of {fork['held']:,}: {_time(fork['median_seconds'])}, {100 * fork['share_of_stream']:.2f} % "
        "of its bytes",
    ]
    for name in ("small", "large"):
        row = busy[name]
        out.append(
            f"{busy['cores']} cores busy, {row['chunks']} chunks to {row['streams']} streams: default "
            f"threads take {row['busy_default_over_one']:.2f} x one thread"
        )
    texts = report["texts"]
    opening = texts["opening"]
    out += [
        f"single AgentMemory.add at {texts['streams']} streams, one of {texts['giant']:,}: "
        f"{texts['ram']['adds_per_second']:,.0f} a second in RAM, "
        f"{texts['file']['adds_per_second']:,.0f} in a file",
        f"that file opened: {_time(opening['seconds'])}, {_bytes(opening['bytes'])}; its first search "
        f"{_time(opening['first_search_seconds'])}, {_bytes(opening['first_search_bytes'])} in all",
    ]
    return out


def _cells(row: dict[str, Any], unit: str) -> list[str]:
    if row["median_seconds"] is None:
        return [row["name"], *["-"] * 6, row["note"]]
    return [
        row["name"],
        _time(row["median_seconds"]),
        f"{row[f'{unit}_per_second']:,.0f}",
        f"{row['ratio']:.2f}",
        "-" if row["agrees"] is None else f"{100 * row['agrees']:.1f} %",
        _bytes(row["state_bytes"]),
        "-" if row["peak_bytes"] is None else _bytes(row["peak_bytes"]),
        row["note"],
    ]


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:,.2f} {unit}"
    return f"{seconds * 1e6:,.0f} µs"


def _bytes(size: int) -> str:
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= one:
            return f"{size / one:,.1f} {unit}"
    return f"{size} B"
