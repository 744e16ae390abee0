"""`rsm top`: what the memories of a running process do, from the metrics that it serves."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rsm_torch.cli.errors import CommandError, one_line_errors
from rsm_torch.cli.output import print_json, stdout

if TYPE_CHECKING:
    from rich.console import Group

HELD = ("streams", "items", "atoms")
SECONDS = 10.0  # that an answer may take
LARGEST = 2**24  # bytes of an answer
Labels = tuple[tuple[str, str], ...]
Sample = dict[str, dict[Labels, float]]


@one_line_errors
def top(
    url: Annotated[
        str, typer.Argument(help="Where the process serves its metrics.")
    ] = "http://127.0.0.1:9000/metrics",
    every: Annotated[float, typer.Option(help="Seconds between two looks.")] = 2.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Two looks, then one JSON object on stdout.")
    ] = False,
) -> None:
    """Watch calls, latencies, streams and bytes of a process whose memories report to Prometheus
    (`rsm_torch.metrics`). Ends with Ctrl-C."""
    if not every > 0:
        raise CommandError(f"--every: expected more than 0 seconds, got {every:g}")
    before, then = read(url), time.monotonic()
    if as_json:
        time.sleep(every)
        print_json(figures(before, read(url), time.monotonic() - then))
        return
    from rich.live import Live

    with Live(shown(figures(before, before, every)), console=stdout(), auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every)
                now, at = read(url), time.monotonic()
                live.update(shown(figures(before, now, at - then)), refresh=True)
                before, then = now, at
        except KeyboardInterrupt:
            return


def read(url: str) -> Sample:
    """The samples of series that begin with "rsm_", by name and labels.

    Raises:
        CommandError: no such address, no answer, or one that is none of Prometheus' text format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    if not url.startswith(("http://", "https://")):
        raise CommandError(f"url: expected http:// or https://, got {url!r}")
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            text = answer.read(LARGEST).decode()
        out: Sample = {}
        for family in text_string_to_metric_families(text):
            for one in family.samples if family.name.startswith("rsm_") else ():
                out.setdefault(one.name, {})[tuple(sorted(one.labels.items()))] = one.value
    except (OSError, urllib.error.URLError) as error:
        raise CommandError(
            f"url: {url}: {getattr(error, 'reason', error)}; start the process with "
            "prometheus_client.start_http_server(9000) and AgentMemory(on_event=prometheus())"
        ) from error
    except ValueError as error:
        raise CommandError(f"url: {url} serves no metrics of Prometheus: {error}") from error
    if not out:
        raise CommandError(
            f"url: {url} has no series of rsm_torch; give AgentMemory on_event=prometheus() of rsm_torch.metrics"
        )
    return out


def figures(before: Sample, now: Sample, seconds: float) -> dict[str, Any]:
    """What is held now, by memory, and what was done in between, by verb: calls and things a second,
    errors, and the latencies in ms under which half and 95 % of the calls lie (upper edges of the
    histogram's buckets, None where it was not called)."""
    memories: dict[str, dict[str, float]] = {}
    for what in HELD:
        for labels, value in now.get(f"rsm_{what}", {}).items():
            memories.setdefault(dict(labels)["memory"], {})[what] = value
    for labels, value in now.get("rsm_bytes", {}).items():
        given = dict(labels)
        memories.setdefault(given["memory"], {})[f"{given['kind']}_bytes"] = value
    verbs: dict[str, dict[str, Any]] = {}
    calls = _risen(before, now, "rsm_memory_calls_total")
    things = _risen(before, now, "rsm_memory_things_total")
    buckets = _risen(before, now, "rsm_memory_seconds_bucket")
    for verb in sorted({dict(labels)["verb"] for labels in calls}):
        mine = {labels: n for labels, n in calls.items() if dict(labels)["verb"] == verb}
        moved = {
            d: n
            for labels, n in things.items()
            if dict(labels)["verb"] == verb
            for d in [dict(labels)["direction"]]
        }
        edges = sorted(
            (float(dict(labels)["le"]), n)
            for labels, n in buckets.items()
            if dict(labels)["verb"] == verb
        )
        total = now["rsm_memory_calls_total"]
        verbs[verb] = {
            "calls": sum(value for labels, value in total.items() if dict(labels)["verb"] == verb),
            "calls_per_s": sum(mine.values()) / seconds,
            "errors": sum(n for labels, n in mine.items() if dict(labels)["error"]),
            "given_per_s": moved.get("given", 0.0) / seconds,
            "returned_per_s": moved.get("returned", 0.0) / seconds,
            "p50_ms": _quantile(edges, 0.5), "p95_ms": _quantile(edges, 0.95),
        }  # fmt: skip
    return {"seconds": seconds, "memories": memories, "verbs": verbs}


def _risen(before: Sample, now: Sample, name: str) -> dict[Labels, float]:
    """By how much each series has risen; all of it where the process began anew."""
    was = before.get(name, {})
    return {
        labels: value - was.get(labels, 0.0) if value >= was.get(labels, 0.0) else value
        for labels, value in now.get(name, {}).items()
    }


def _quantile(edges: list[tuple[float, float]], share: float) -> float | None:
    """ms under which so large a share lies, of counts [≤ edge]."""
    total = edges[-1][1] if edges else 0.0
    if not total:
        return None
    return 1_000 * next(edge for edge, count in edges if count >= share * total)


def shown(found: Mapping[str, Any]) -> Group:
    """Two tables."""
    from rich.console import Group
    from rich.table import Table

    held = Table(title="held")
    for name in ("memory", *HELD, "live", "allocated", "reserved", "store"):
        held.add_column(name, justify="left" if name == "memory" else "right")
    for name, one in found["memories"].items():
        counts = [f"{one.get(what, 0):,.0f}" for what in HELD]
        sizes = [
            f"{one.get(f'{kind}_bytes', 0) / 1e6:,.1f} MB"
            for kind in ("live", "allocated", "reserved", "store")
        ]
        held.add_row(name, *counts, *sizes)
    done = Table(title=f"the last {found['seconds']:.1f} s")
    for name in (
        "verb",
        "calls",
        "a second",
        "errors",
        "given / s",
        "returned / s",
        "p50 ≤ ms",
        "p95 ≤ ms",
    ):
        done.add_column(name, justify="left" if name == "verb" else "right")
    for verb, one in found["verbs"].items():
        limits = ["–" if one[k] is None else f"{one[k]:g}" for k in ("p50_ms", "p95_ms")]
        rates = [f"{one[k]:,.1f}" for k in ("given_per_s", "returned_per_s")]
        done.add_row(
            verb,
            f"{one['calls']:,.0f}",
            f"{one['calls_per_s']:,.1f}",
            f"{one['errors']:,.0f}",
            *rates,
            *limits,
        )
    return Group(held, done)
