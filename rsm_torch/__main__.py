"""`python -m rsm_torch` is `rsm`."""

from rsm_torch.cli import main

main()
