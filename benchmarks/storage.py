"""Recall of each storage on real embeddings: `python benchmarks/storage.py DATA`.

DATA is a folder that holds locomo/locomo10.json. Every turn of every conversation is embedded with
the packaged all-MiniLM-L6-v2, every question asked of its own conversation; recall@10 is the share
of the ten nearest turns by float32 search that a storage finds among its own ten nearest; within
forty, among its forty nearest, which is what scoring forty rows again in full would find.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from rsm_torch.embedders import MINILM, embed, load_embedder
from rsm_torch.eval.datasets import load
from rsm_torch.provenance import provenance
from rsm_torch.storage import codec, train_pq

OUT = Path(__file__).parent / "results" / "storage.json"
STORAGES = {
    "float32": None, "float16": None, "bfloat16": None, "int8": None,
    "bits4": None, "bits3": None, "bits2": None, "bits1": None,
    "pq, 2 a byte": 2, "pq, 4 a byte": 4, "pq, 8 a byte": 8,
}  # fmt: skip


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    file = Path(sys.argv[1]) / "locomo" / "locomo10.json"
    model = load_embedder(MINILM, device="cpu")
    pairs: list[tuple[Tensor, Tensor]] = []
    for episode in load(file):
        for name, items in episode.streams.items():
            asked = [q.text for q in episode.questions if q.stream == name]
            texts = [item.text for item in items], asked
            pairs.append(tuple(normalize(embed(model, t), dim=-1) for t in texts))
    rows = torch.cat([turns for turns, _ in pairs])
    results = [measure(name, subvector, pairs, rows) for name, subvector in STORAGES.items()]
    print(
        f"{'storage':14} {'bytes a row':>11} {'recall@10':>10} {'within 40':>10} {'itself first':>13}"
    )
    for r in results:
        print(
            f"{r['storage']:14} {r['bytes']:11} {r['recall']:10.4f} {r['within_40']:10.4f} "
            f"{r['itself_first']:13.4f}"
        )
    report = {
        **provenance(),
        "data_sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "turns": len(rows), "questions": sum(len(asked) for _, asked in pairs), "results": results,
    }  # fmt: skip
    OUT.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written: {OUT}")


def measure(
    name: str, subvector: int | None, pairs: list[tuple[Tensor, Tensor]], rows: Tensor
) -> dict[str, object]:
    width = rows.shape[1]
    held = codec(name, width) if subvector is None else train_pq(rows, subvector)
    found, near, itself = [], [], []
    for turns, asked in pairs:
        parts = held.encode(turns)
        want = (asked @ turns.mT).topk(10).indices
        scores = held.scores(asked, parts)
        for into, k in ((found, 10), (near, 40)):
            got = scores.topk(k).indices
            into.append((want[:, :, None] == got[:, None]).any(-1).float().mean(1))
        own = held.scores(turns, parts)
        itself.append((own.diagonal() >= own.amax(-1)).float())
    return {
        "storage": name,
        "bytes": held.nbytes(1, width),
        "recall": float(torch.cat(found).mean()),
        "within_40": float(torch.cat(near).mean()),
        "itself_first": float(torch.cat(itself).mean()),
    }


if __name__ == "__main__":
    main()
