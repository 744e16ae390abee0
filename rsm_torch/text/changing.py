"""Changing and deleting what a memory holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rsm_torch.text import intake
from rsm_torch.text.filters import read_filter
from rsm_torch.text.items import StoredItem, Time, utc_seconds
from rsm_torch.text.opened import OpenMemory, locked


class Changing(OpenMemory):
    """The verbs `update`, `delete`, `delete_all` and `purge`.

    What is deleted or replaced is overwritten in the file, its write-ahead log included; copies of it
    that SQLite left in gaps of pages go with the next `checkpoint` or `close`, which write the file
    anew. If the disk is too full for either, the change is made, a warning says so, and it is tried
    again by the next change, `checkpoint` or `close`.
    """

    @locked
    def update(
        self,
        id: str,
        text: str | None = None,
        time: Time | None = None,
        metadata: Mapping[str, Any] | None = None,
        ttl: float | None = None,
    ) -> None:
        """Change an item; what is None stays. The id stays too.

        Args:
            text: embedded anew; the item is clustered again, as the newest of its stream.
            time: with a `ttl` of the config, an old one can expire the item at once.
            metadata: keys to set; the others keep their values.
            ttl: seconds from now that the item is kept; `math.inf`: for ever.

        Raises:
            KeyError: no such item.
            ValueError: nothing to change; blank text.
        """
        if all(value is None for value in (text, time, metadata, ttl)):
            raise ValueError("update: give text, time, metadata or ttl to change")
        number, item = self._existing(id)
        if text is not None and not isinstance(text, str):
            raise TypeError(f"text: expected a str, got {type(text).__name__}")
        if text is not None:
            intake.read_texts(text)
        changed = {} if metadata is None else intake.read_metadata(metadata, "metadata")
        row = intake.make_row(
            item.text if text is None else text,
            item.time if time is None else utc_seconds(time),
            item.step, item.session, item.role,
            {**item.metadata, **changed},
            item.expires if ttl is None else intake.read_expiry(ttl, self._clock()),
        )  # fmt: skip
        if row.raw != item.text:
            self._state.replace(number, row, self._embed([row.raw])[0])
        elif row.time != item.time and self.config.ttl is not None:
            self._state.replace(number, row, None)
        else:
            self._state.change(number, row)

    @locked
    def delete(self, id: str) -> None:
        """Remove an item for good, even one that has expired. KeyError: no such item."""
        number = intake.read_id(id)
        place = None if number is None else self._store.place_of(number)
        if place is None:
            raise KeyError(f"id: no item {id!r}")
        stream, found = place
        self._state.delete({stream: [found]})

    @locked
    def delete_all(
        self,
        stream: str | None = None,
        *,
        where: Mapping[str, Any] | None = None,
        before: Time | None = None,
        after: Time | None = None,
    ) -> int:
        """Remove the items of one stream that match, for good; how many there were.

        Expired items that were not purged match and count like others.

        Args:
            where, before, after: as in `get_all`; none of them: every item.

        Raises:
            ValueError: no stream given: nothing removes all streams at once.
            KeyError: a stream never written.
        """
        if stream is None:
            raise ValueError("stream: say which one; to remove all, call it for each of streams()")
        known, chosen = self._known(stream), read_filter(where, before, after)
        return self._state.delete({known: self._store.select(known, chosen, expired=True)})

    @locked
    def purge(self, now: Time | None = None) -> int:
        """Remove for good the items of all streams whose time to live is over; how many.

        Until then they are not returned by anything, but take room and still shape their atoms.

        Args:
            now: the time to judge by; None: the present.
        """
        given = utc_seconds(now, "now")
        return self._state.delete(self._store.expired(self._clock() if given is None else given))

    def _existing(self, id: str) -> tuple[int, StoredItem]:
        number = intake.read_id(id)
        item = None if number is None else self._store.item(number)
        if number is None or item is None:
            raise KeyError(f"id: no item {id!r}")
        return number, item
