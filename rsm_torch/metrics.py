"""Watching a text memory: an event for each call, a line in the log, and Prometheus."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rsm_torch.hits import Context

R = TypeVar("R")
LOGGER = logging.getLogger("rsm_torch")


@dataclass(frozen=True, slots=True)
class Event:
    """One call of a verb of an `AgentMemory`. It holds no text, name, key or id.

    Args:
        verb: such as "add".
        seconds: how long it took.
        given: texts, queries, ids or names that came in.
        returned: ids, hits, items or names that came out, or the number that a verb returned; of a
            context, the items in it. 0 where it raised.
        error: the type of what it raised, such as "ValueError"; None: nothing.
    """

    verb: str
    seconds: float
    given: int
    returned: int
    error: str | None = None


Hook = Callable[[Event], object]


class Watch:
    """Tells a hook, and the log at DEBUG, of the calls that a user makes, not of those within them."""

    def __init__(self, hook: Hook | None) -> None:
        self._hook, self._thread = hook, threading.local()

    def asked(self) -> bool:
        """Whether anybody wants to know of a call that begins now."""
        wanted = self._hook is not None or LOGGER.isEnabledFor(logging.DEBUG)
        return wanted and not getattr(self._thread, "inside", False)

    def call(self, verb: str, given: int, function: Callable[[], R]) -> R:
        """What a function returns, and an event of it."""
        begun, returned, error = time.perf_counter(), 0, None
        self._thread.inside = True
        try:
            found = function()
            returned = size(found)
            return found
        except BaseException as failed:
            error = type(failed).__name__
            raise
        finally:
            try:
                self._tell(Event(verb, time.perf_counter() - begun, given, returned, error))
            finally:
                self._thread.inside = False

    def _tell(self, event: Event) -> None:
        LOGGER.debug(
            "%s: %d given, %d returned, %.4f s%s", event.verb, event.given, event.returned,
            event.seconds, f", {event.error}" if event.error else "",
        )  # fmt: skip
        if self._hook is None:
            return
        try:
            self._hook(event)
        except Exception:  # a fault of the hook, which must not break a verb
            LOGGER.exception("on_event raised at %s", event.verb)


def first_argument(function: Callable) -> Callable[[tuple, Mapping[str, Any]], Any]:
    """What gives a method's first argument, however it is given; None if there is none."""
    name = next(iter(list(inspect.signature(function).parameters)[1:]), "")
    return lambda args, kwargs: args[0] if args else kwargs.get(name)


def size(value: Any) -> int:
    """How many things an argument or an answer is."""
    if value is None:
        return 0
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Context):
        return len(value.ids)
    if isinstance(value, Mapping):
        return sum(map(size, value.values()))
    if isinstance(value, Sequence) and not (
        isinstance(value, str | bytes) or hasattr(value, "_fields")
    ):
        return sum(map(size, value))
    return 1


def prometheus(registry: Any = None) -> Hook:
    """What to give a memory as `on_event`, to be counted and timed by prometheus-client: one for all
    memories that report to a registry.

    Series: `rsm_memory_calls_total` by verb and error ("" without), `rsm_memory_things_total` by verb and
    direction ("given", "returned"), and the histogram `rsm_memory_seconds` by verb.

    Args:
        registry: prometheus-client's; None: its default.

    Raises:
        ImportError: it is not installed.
        ValueError: the registry has these series already.
    """
    try:
        import prometheus_client
    except ImportError as error:
        raise ImportError(
            "prometheus needs prometheus-client; pip install 'rsm-torch[metrics]'"
        ) from error
    to: dict[str, Any] = {"registry": prometheus_client.REGISTRY if registry is None else registry}
    calls = prometheus_client.Counter(
        "rsm_memory_calls", "Calls of a memory", ["verb", "error"], **to
    )
    things = prometheus_client.Counter(
        "rsm_memory_things", "Texts, queries, hits and items", ["verb", "direction"], **to
    )
    seconds = prometheus_client.Histogram(
        "rsm_memory_seconds", "Seconds that calls took", ["verb"], **to
    )

    def count(event: Event) -> None:
        calls.labels(event.verb, event.error or "").inc()
        things.labels(event.verb, "given").inc(event.given)
        things.labels(event.verb, "returned").inc(event.returned)
        seconds.labels(event.verb).observe(event.seconds)

    return count


def gauges(memory: Any, registry: Any = None, name: str = "memory") -> None:
    """Have what an `AgentMemory` holds be read whenever a registry is.

    Series, all by `memory` (its `name`): `rsm_streams`, `rsm_items` and `rsm_atoms`, and `rsm_bytes` by kind: "live",
    "allocated" and "reserved" of the tensors that are loaded (see `StreamMemory.nbytes`), and "store". A
    memory that is closed, or in another process, has none.

    Args:
        registry: prometheus-client's; None: its default.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import prometheus_client
        from prometheus_client.core import GaugeMetricFamily
        from prometheus_client.registry import Collector
    except ImportError as error:
        raise ImportError(
            "gauges needs prometheus-client; pip install 'rsm-torch[metrics]'"
        ) from error

    class Held(Collector):
        def describe(self) -> list[Any]:
            return []  # the same names for several memories

        def collect(self) -> list[Any]:
            try:
                counts = memory.counts().values()
                kinds = memory.tensors.nbytes() | {"store": memory.nbytes()["store"]}
            except RuntimeError:
                return []
            sums = {
                "streams": len(counts),
                "items": sum(count.items for count in counts),
                "atoms": sum(count.atoms for count in counts),
            }
            out = []
            for what, value in sums.items():
                out.append(GaugeMetricFamily(f"rsm_{what}", f"{what} held", labels=["memory"]))
                out[-1].add_metric([name], value)
            out.append(GaugeMetricFamily("rsm_bytes", "bytes held", labels=["memory", "kind"]))
            for kind, value in kinds.items():
                out[-1].add_metric([name, kind], value)
            return out

    (prometheus_client.REGISTRY if registry is None else registry).register(Held())
