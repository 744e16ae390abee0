"""Readers for agent trajectories and conversations, all into one form: episodes of streams of
items, with questions about them."""

from rsm_torch.eval.datasets.episode import DatasetError, Episode, Question
from rsm_torch.eval.datasets.formats import FORMATS, family, format_name
from rsm_torch.eval.datasets.loading import detect, episode_ids, find, load
from rsm_torch.eval.datasets.longmemeval import at_session_level
from rsm_torch.eval.datasets.mmlu import MMLUQuestion, subjects
from rsm_torch.eval.datasets.permute import permuted
from rsm_torch.eval.datasets.stitch import stitched

__all__ = [
    "FORMATS",
    "DatasetError",
    "Episode",
    "MMLUQuestion",
    "Question",
    "at_session_level",
    "detect",
    "episode_ids",
    "family",
    "find",
    "format_name",
    "load",
    "permuted",
    "stitched",
    "subjects",
]
