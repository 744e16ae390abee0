"""Moving whole streams: into one another, into files and into another embedder's space."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rsm_torch.calibrate import Calibration
from rsm_torch.text import intake
from rsm_torch.text.embedders import Embedder, load_embedder
from rsm_torch.text.exchange import read_exchange, write_exchange
from rsm_torch.text.opened import OpenMemory, locked
from rsm_torch.text.settings import Settings
from rsm_torch.text.store import Content, Found


class Moving(OpenMemory):
    """The verbs `fork`, `merge`, `export`, `absorb` and `reembed`."""

    @locked
    def fork(self, src: str, dst: str) -> list[str]:
        """Branch a stream: `dst` gets all items of `src`, in the same atoms. From then on they
        are independent.

        Args:
            dst: a stream that holds no items.

        Returns:
            The ids of the new items, in the order of those of `src`.

        Raises:
            KeyError: `src` was never written.
            ValueError: `dst` holds items, or is `src`.
        """
        content, name = self._content(src), intake.read_stream(dst, "dst")
        held = self.counts().get(name)
        if held is not None:
            raise ValueError(
                f"dst: {name!r} holds {held.items} items; expected a stream that holds none "
                "(merge adds to one that does)"
            )
        return self._insert({name: content})[name]

    @locked
    def merge(self, src: str, dst: str) -> list[str]:
        """Add the items of `src` to `dst`, as `add` would, but for those that `dst` already has
        (text, time, step, session and role equal). `src` stays as it is.

        Returns:
            The ids of the new items.

        Raises:
            KeyError: `src` was never written.
        """
        content, name = self._content(src), intake.read_stream(dst, "dst")
        known = self._state.streams.get(name)
        new = [
            place
            for place, row in enumerate(content.rows)
            if known is None or self._store.find(known, row.hash) is None
        ]
        some = Content([content.rows[place] for place in new], content.vectors[new])
        return self._insert({name: some})[name]

    @locked
    def export(
        self, path: str | Path, streams: Sequence[str] | None = None, vectors: bool = True
    ) -> int:
        """Write items as JSON lines, which `absorb` takes in on any machine; how many.

        The first line names the format, its version, the embedder, the settings and how many
        items follow, one a line. An older file of that name stays whole until the new one is.

        Args:
            path: the file to write.
            streams: those to write, in this order; None: all.
            vectors: with the embeddings, about 5.3 bytes a number; else `absorb` embeds anew.

        Raises:
            KeyError: a stream never written.
            OSError: the file cannot be written.
        """
        file, vectors = intake.read_file(path), intake.read_flag(vectors, "vectors")
        if self._store.uses(file):
            raise ValueError(f"path: {path} is this memory's own; export to another file")
        names = self.streams() if streams is None else intake.read_streams(streams)
        chosen = {name: self._store.select(self._known(name)) for name in names}
        total = sum(map(len, chosen.values()))
        contents = self._contents(chosen)
        write_exchange(file, self._state.settings, vectors, total, contents)
        return total

    @locked
    def absorb(self, path: str | Path, into: str | None = None) -> dict[str, list[str]]:
        """Add the items of a file that `export` wrote; all of them or, if it raises, none.

        Embeddings of the same embedder are kept; otherwise the texts are embedded anew. With
        embeddings, a stream that holds nothing here keeps its atoms, too; other streams get the
        items as `add` would put them. A memory that holds nothing and was given no tau goes on
        with the settings of the file. What has expired meanwhile is left out.

        Args:
            into: the stream to put the items of a file with one stream into; None: streams of
                the same names.

        Returns:
            The new ids by stream, in the order of the file.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no such file, is truncated or damaged, or holds several streams
                though `into` names one.
        """
        file = read_exchange(intake.read_file(path))
        contents = {name: self._unexpired(some) for name, some in file.contents.items()}
        if into is not None:
            if len(contents) > 1:
                raise ValueError(f"into: {path} holds {len(contents)} streams, not one")
            contents = {intake.read_stream(into, "into"): some for some in contents.values()}
        known = self._state.settings
        if not file.vectors or not known.same_space(file.settings):
            return self._insert(self._embedded(contents))
        held = self.counts()
        placed = {
            name: Content(some.rows, some.vectors, None if name in held else some.atoms)
            for name, some in contents.items()
        }
        untouched = known.pending and self._store.is_empty()
        return self._insert(placed, file.settings if untouched else None)

    @locked
    def reembed(
        self,
        embedder: str | Path | Embedder | Callable[[list[str]], Any],
        *,
        tau: float | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        """Embed all texts anew and cluster them anew; if it raises, the memory is as before.

        Args:
            embedder: what `load_embedder` accepts; the file opens only with it from then on.
            tau, calibration: as for a new memory; with neither, tau is calibrated from the new
                embeddings. The other settings stay.
        """
        new = load_embedder(embedder, self._device)
        settings = self._state.settings.moved(new, tau, calibration)
        chunks, texts = self._store.texts()
        vectors = self._embed(texts, new)
        self._state.reembed(settings, chunks, vectors, lambda: setattr(self, "embedder", new))

    # -- contents of streams ----------------------------------------------------------------

    def _content(self, stream: str) -> Content:
        return self._store.content(self._store.select(self._known(stream, "src")))

    def _contents(self, chosen: Mapping[str, Sequence[Found]]) -> Iterator[tuple[str, Content]]:
        """One stream at a time."""
        for name, found in chosen.items():
            yield name, self._store.content(found)

    def _unexpired(self, content: Content) -> Content:
        now = self._clock()
        live = [n for n, row in enumerate(content.rows) if row.expires is None or row.expires > now]
        assert content.atoms is not None
        rows = [content.rows[place] for place in live]
        return Content(rows, content.vectors[live], content.atoms[live])

    def _embedded(self, contents: Mapping[str, Content]) -> dict[str, Content]:
        """The same with embeddings of their texts, still to be clustered."""
        vectors = self._embed([row.raw for some in contents.values() for row in some.rows])
        parts = vectors.split([len(some.rows) for some in contents.values()])
        return {
            name: Content(some.rows, part)
            for (name, some), part in zip(contents.items(), parts, strict=True)
        }

    def _insert(
        self, contents: Mapping[str, Content], settings: Settings | None = None
    ) -> dict[str, list[str]]:
        """New ids by stream; `settings`: to go on with."""
        some = {name: content for name, content in contents.items() if content.rows}
        ids = dict(zip(some, self._state.insert(some, settings), strict=True))
        return {name: [str(id) for id in ids.get(name, [])] for name in contents}
