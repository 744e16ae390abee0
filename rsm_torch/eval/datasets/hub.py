"""Published copies of the datasets on the Hugging Face hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rsm_torch.eval.datasets import mmlu
from rsm_torch.eval.datasets.episode import DatasetError


@dataclass(frozen=True, slots=True)
class Published:
    """A dataset repository of the hub, and the files to read in it (none: `datasets` reads it)."""

    repository: str
    files: tuple[str, ...] = ()


_BEAM = "Mohammadta/BEAM"
_BEAM_FILES = {
    size: f"data/{size.upper()}-00000-of-00001.parquet" for size in ("100k", "500k", "1m")
}
_LONGMEMEVAL = "xiaowu0162/longmemeval-cleaned"
_ABILITIES = (
    "Accurate_Retrieval", "Test_Time_Learning", "Long_Range_Understanding", "Conflict_Resolution",
)  # fmt: skip
HUB = {
    "ama_bench": Published("AMA-bench/AMA-bench", ("test/open_end_qa_set.jsonl",)),
    "longmemeval": Published(_LONGMEMEVAL, ("longmemeval_s_cleaned.json",)),
    "longmemeval_s": Published(_LONGMEMEVAL, ("longmemeval_s_cleaned.json",)),
    "longmemeval_oracle": Published(_LONGMEMEVAL, ("longmemeval_oracle.json",)),
    "longmemeval_m": Published(_LONGMEMEVAL, ("longmemeval_m_cleaned.json",)),
    "memory_agent_bench": Published(
        "ai-hyz/MemoryAgentBench",
        tuple(f"data/{split}-00000-of-00001.parquet" for split in _ABILITIES),
    ),
    "mmlu": Published("cais/mmlu"),
    "beam": Published(_BEAM, tuple(_BEAM_FILES.values())),
    **{f"beam_{size}": Published(_BEAM, (file,)) for size, file in _BEAM_FILES.items()},
    "beam_10m": Published(
        f"{_BEAM}-10M", tuple(f"data/10M-0000{part}-of-00002.parquet" for part in range(2))
    ),
}
# Published on GitHub alone: to be cloned, and given by their folder.
ELSEWHERE = {
    "realmem": "https://github.com/AvatarMemory/RealMemBench",
    "locomo": "https://github.com/snap-research/locomo",
    "locomo_plus": "https://github.com/xjtuleeyf/Locomo-Plus",
    "locomo_plus_grouped": "https://github.com/xjtuleeyf/Locomo-Plus",
    "toolbench": "https://github.com/THUNLP-MT/StableToolBench",
}
_SPLITS = {"dev": "dev", "validation": "val", "test": "test"}


def hub_files(dataset: str) -> list[Path]:
    """The local copies of a dataset's published files, downloaded once into the hub's own cache.

    Raises:
        DatasetError: the dataset is not on the hub, or cannot be fetched from it.
    """
    published = _published(dataset)
    from huggingface_hub import hf_hub_download

    found = []
    for file in published.files:
        try:
            local = hf_hub_download(published.repository, file, repo_type="dataset")
        except (OSError, ValueError) as error:
            raise _unreachable(dataset, f"{published.repository}/{file}", error) from error
        found.append(Path(local))
    return found


def hub_subjects() -> mmlu.Subjects:
    """MMLU as the hub holds it, in the form of `mmlu.subjects`.

    Raises:
        DatasetError: it cannot be fetched, or the package `datasets` is not installed.
    """
    published = _published(mmlu.NAME)
    try:
        from datasets import load_dataset
    except ImportError:
        raise DatasetError(
            "path: reading mmlu from the hub needs the package datasets (pip install datasets); "
            "or give the folder of the original CSV files"
        ) from None
    try:
        splits: Any = load_dataset(published.repository, "all")
    except (OSError, ValueError) as error:
        raise _unreachable(mmlu.NAME, published.repository, error) from error
    return mmlu.from_rows({ours: splits[theirs] for theirs, ours in _SPLITS.items()})


def _published(dataset: str) -> Published:
    if dataset in HUB:
        return HUB[dataset]
    where = ELSEWHERE.get(dataset)
    remedy = f"clone {where} and give its folder" if where else "give a file or folder"
    raise DatasetError(f"path: {dataset} is not on the hub; {remedy}")


def _unreachable(dataset: str, place: str, error: Exception) -> DatasetError:
    reason = " ".join(str(error).split())[:160]
    return DatasetError(
        f"path: cannot fetch {dataset} from the hub ({place}): {reason}; "
        "without a network, give a local file or folder"
    )
