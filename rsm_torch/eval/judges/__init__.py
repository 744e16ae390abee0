"""Judges: how good an answer is, or how likely the right one."""

from rsm_torch.eval.judges.making import make_judge
from rsm_torch.eval.judges.model import ModelJudge
from rsm_torch.eval.judges.overlap import OverlapJudge
from rsm_torch.eval.judges.protocol import Case, Judge, Verdict
from rsm_torch.eval.judges.templates import templates_hash

__all__ = [
    "Case",
    "Judge",
    "ModelJudge",
    "OverlapJudge",
    "Verdict",
    "make_judge",
    "templates_hash",
]
