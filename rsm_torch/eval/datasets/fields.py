"""Reading JSON so that what is wrong is named by file, line and field."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rsm_torch.eval.datasets.episode import DatasetError

_NAMES = {str: "a string", list: "a list", dict: "an object", int: "an integer"}


def read_text(path: Path) -> str:
    """The file's text; a byte order mark is dropped."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_text(path, error) from None


def read_json(path: Path) -> Any:
    """The one JSON document in a file."""
    return parse(read_text(path), str(path))


def json_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Each line that is not blank, with the place ("file, line 3") for error messages."""
    with path.open(encoding="utf-8-sig") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}, line {number}", line.rstrip()
        except UnicodeDecodeError as error:
            raise not_text(path, error) from None


def records(path: Path) -> Iterable[tuple[str, Any]]:
    """Each record of a JSON file with its place: the elements of an array, a value a line, or one
    document over many lines."""
    with path.open(encoding="utf-8-sig") as file:
        is_list = file.read(1024).lstrip().startswith("[")
    if is_list:
        return ((f"{path}, [{i}]", record) for i, record in enumerate(read_json(path)))
    lines = json_lines(path)
    place, line = next(lines, ("", ""))
    if line.strip() == "{" or (line and not line.endswith("}")):  # one document over many lines
        return [(str(path), read_json(path))]
    return (
        (place, parse(line, place)) for place, line in chain([(place, line)] * bool(line), lines)
    )


def parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}"
        raise DatasetError(
            f"{place}: not valid JSON at {at} ({error.msg}); is the file cut short?"
        ) from None
    except (ValueError, RecursionError) as error:
        raise unreadable(place, error) from None


def unreadable(place: str, error: Exception) -> DatasetError:
    """What to raise for JSON that is too deep, or a number that is too long, for Python."""
    deep = isinstance(error, RecursionError)
    return DatasetError(f"{place}: {'JSON nested too deeply' if deep else error}")


def required(record: Any, name: str, kind: type, place: str) -> Any:
    """`record[name]`, which must be there and of that kind."""
    if not isinstance(record, dict):
        raise DatasetError(f"{place}: expected an object, got {type(record).__name__}")
    if name not in record:
        raise DatasetError(
            f"{place}: field '{name}' is missing; the fields are {', '.join(record) or 'none'}"
        )
    return _checked(record[name], name, kind, place)


def optional(record: Mapping[str, Any], name: str, kind: type, place: str) -> Any:
    """`record[name]`, or an empty value of that kind where it is missing or null."""
    if not isinstance(record, Mapping):
        raise DatasetError(f"{place}: expected an object, got {type(record).__name__}")
    value = record.get(name)
    return kind() if value is None else _checked(value, name, kind, place)


def parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row of a Parquet file with its place, of those of these columns that it has."""
    with parquet_file(path) as file:
        known = [name for name in columns if name in file.schema_arrow.names]
        rows = (row for some in file.iter_batches(1, columns=known) for row in some.to_pylist())
        for number, row in enumerate(rows):
            yield f"{path}, row {number}", row


def parquet_file(path: Path) -> Any:
    """A Parquet file, opened. DatasetError without pyarrow."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise DatasetError(
            f"{path}: reading Parquet files needs pyarrow (pip install pyarrow)"
        ) from None
    return parquet.ParquetFile(path)


def answer_text(value: Any) -> str | None:
    """A reference answer as text: some files hold numbers where others hold strings."""
    if value is None:
        return None
    return value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _checked(value: Any, name: str, kind: type, place: str) -> Any:
    if not isinstance(value, kind):
        raise DatasetError(
            f"{place}: field '{name}' should be {_NAMES[kind]}, got {type(value).__name__}"
        )
    return value


def not_text(path: Path, error: UnicodeDecodeError) -> DatasetError:
    """What to raise for a file in another encoding."""
    return DatasetError(f"{path}: not UTF-8 text (byte {error.start}: {error.reason})")
