"""Readers for agent trajectories and conversations: AMA-Bench, RealMem, LoCoMo, plain turns."""

from rsm_torch.eval.datasets.episode import DatasetError, Episode, Question
from rsm_torch.eval.datasets.loading import FORMATS, detect, episode_ids, find, load

__all__ = [
    "FORMATS",
    "DatasetError",
    "Episode",
    "Question",
    "detect",
    "episode_ids",
    "find",
    "load",
]
