"""Run by the crash test: a run with slow memories, into the folder given."""

import sys
from pathlib import Path

from eval_support import Newest, plan, run_into

folder, wait = Path(sys.argv[1]), float(sys.argv[2])
run_into(
    folder,
    plan(lambda name, seed: Newest(seed, wait), methods=("newest", "again"), seeds=(0, 1)),
)
