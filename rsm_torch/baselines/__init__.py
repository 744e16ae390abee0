"""The memories that rsm_torch is compared with, and its own variants, behind one protocol."""
