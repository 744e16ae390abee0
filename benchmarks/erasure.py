"""What it costs to leave no trace of an erased item in a memory's file, by the size of the file.

Texts of 2,000 letters and embeddings of 384 numbers; one item is deleted, and the file rewritten as
`checkpoint` and `close` do. Beside it, the copy of a file of that size, synced, and the same checkpoint
when nothing was erased.

    python benchmarks/erasure.py [--megabytes 1,10,100,1000] [--folder FOLDER] > erasure.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import string
import tempfile
import time
from pathlib import Path

import torch

from rsm_torch.provenance import provenance
from rsm_torch.text.items import read_texts
from rsm_torch.text.store import ItemStore

ITEM = 6_250  # bytes that one takes in the file, about
LETTERS, DIM, AT_ONCE = 2_000, 384, 2_000


def fill(path: Path, size: int) -> None:
    chance = random.Random(0)
    store = ItemStore(path)
    with store.transaction():
        stream = store.add_stream("s")
    for start in range(0, size // ITEM, AT_ONCE):
        count = min(AT_ONCE, size // ITEM - start)
        texts = ["".join(chance.choices(string.ascii_letters, k=LETTERS)) for _ in range(count)]
        with store.transaction():
            items = store.insert(stream, read_texts(texts))
            chunks = store.insert_chunks(stream, items, torch.randn(count, DIM))
            store.set_atoms(chunks, chunks[:1].expand(count))
    store.close()


def seconds(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def copy(source: Path, target: Path) -> None:
    with open(source, "rb") as reading, open(target, "wb") as writing:
        while part := reading.read(2**20):
            writing.write(part)
        os.fsync(writing.fileno())


def measure(folder: Path, size: int) -> dict[str, float]:
    path = folder / "m.db"
    fill(path, size)
    found = {"bytes": path.stat().st_size, "copy": seconds(lambda: copy(path, folder / "copy"))}
    (folder / "copy").unlink()
    store = ItemStore(path)
    found["checkpoint, nothing erased"] = seconds(store.rewrite)
    with store.transaction():
        store.delete([size // ITEM // 2])
    found["checkpoint after one delete"] = seconds(store.rewrite)
    with store.transaction():
        store.delete(range(1, size // ITEM * 3 // 4))
    found["after three quarters were deleted"] = seconds(store.rewrite)
    store.close()
    found["bytes then"] = path.stat().st_size
    path.unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", default="1,10,100,1000")
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    given = parser.parse_args()
    sizes = [int(float(size) * 1e6) for size in given.megabytes.split(",")]
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        rows = [measure(Path(folder), size) for size in sizes]
    print(json.dumps({"provenance": provenance(), "seconds": rows}, indent=2))


if __name__ == "__main__":
    main()
