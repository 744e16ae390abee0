"""The tests here run where TRITON_INTERPRET=1 was set before Triton was imported."""

from rsm_kernels import runtime

collect_ignore_glob = [] if runtime.interpreted() else ["test_*.py"]
