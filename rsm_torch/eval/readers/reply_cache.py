"""Answers kept on disk, so that no prompt is paid for twice."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rsm_torch.cache import locked
from rsm_torch.files import open_regular, parse_json, read_file


def content_key(content: Any) -> str:
    """A hash of JSON content that does not depend on the order of its keys."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class ReplyCache:
    """Answers, JSON records with a "text", by content key, in one append-only file of JSON lines.

    A later line of a key counts, and one without a value (null) takes it away. A line that was cut
    short by a kill is passed over and asked for again. Safe among threads and processes, forked ones
    too; each process sees what another wrote when it next opens the file.

    Args:
        path: the file; its folder is made with the first record. None keeps records in memory.

    Raises:
        ValueError: `path` is no regular file.
    """

    def __init__(self, path: str | Path | None):
        self.path = None if path is None else Path(path)
        self._records: dict[str, Mapping[str, Any]] = {}
        if self.path is not None and self.path.exists():
            self._read(read_file(self.path, None, follow=True))

    def _read(self, data: bytes) -> None:
        for line in data.splitlines():
            try:
                entry = parse_json(self.path, line)
            except ValueError:  # cut short: that answer is asked for again
                continue
            if isinstance(entry, dict) and {"key", "value"} <= entry.keys():
                key, value = entry["key"], entry["value"]
                answers = isinstance(value, dict) and isinstance(value.get("text"), str)
                if isinstance(key, str) and (answers or value is None):
                    self._set(key, value)

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: str) -> Mapping[str, Any] | None:
        return self._records.get(key)

    def put(self, key: str, value: Mapping[str, Any]) -> None:
        """Keep a record; on disk before this returns."""
        self._add(key, value)

    def forget(self, key: str) -> None:
        """Hold no record of `key` any more, also when the file is next opened."""
        if key in self._records:
            self._add(key, None)

    def _set(self, key: str, value: Mapping[str, Any] | None) -> None:
        if value is None:
            self._records.pop(key, None)
        else:
            self._records[key] = value

    def _add(self, key: str, value: Mapping[str, Any] | None) -> None:
        line = json.dumps({"key": key, "value": value}, ensure_ascii=True) + "\n"
        self._set(key, value)
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open_regular(self.path, "a+b", follow=True) as file, locked(file):
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = ("" if file.read(1) == b"\n" else "\n") + line  # behind a torn one
            file.write(line.encode())
            file.flush()
