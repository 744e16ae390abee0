"""Answers kept on disk, so that no prompt is paid for twice."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def content_key(content: Any) -> str:
    """A hash of JSON content that does not depend on the order of its keys."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class ReplyCache:
    """JSON records by content key, in one append-only file of JSON lines.

    A later line of a key counts, and one without a value (null) takes it away. A line that was cut
    short by a kill is passed over and asked for again. Safe among threads; two
    processes may share a file, and then each sees what the other wrote when it next opens it.

    Args:
        path: the file; its folder is made with the first record. None keeps records in memory.

    Raises:
        ValueError: `path` is a folder.
    """

    def __init__(self, path: str | Path | None):
        self.path = None if path is None else Path(path)
        if self.path is not None and self.path.is_dir():
            raise ValueError(f"cache: expected a file, got the folder {self.path}")
        self._lock = threading.Lock()
        self._records: dict[str, Mapping[str, Any]] = {}
        self._torn = False  # the last line has no end yet
        if self.path is not None and self.path.is_file():
            self._read(self.path.read_bytes())

    def _read(self, data: bytes) -> None:
        self._torn = bool(data) and not data.endswith(b"\n")
        for line in data.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:  # cut short: that answer is asked for again
                continue
            if isinstance(entry, dict) and {"key", "value"} <= entry.keys():
                self._set(entry["key"], entry["value"])

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
        with self._lock:
            self._set(key, value)
            if self.path is None:
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write((("\n" if self._torn else "") + line).encode())
            self._torn = False
