"""Run by the crash tests: a run with slow memories, into the folder given; with a third argument
what failed in it is asked again."""

import sys
from pathlib import Path

from eval_support import Newest, made_prepared, plan, run_into

folder, wait = Path(sys.argv[1]), float(sys.argv[2])
work = plan(lambda name, seed: Newest(seed, wait), methods=("newest", "again"), seeds=(0, 1))
run_into(folder, work, made_prepared(), retry=len(sys.argv) > 3)
