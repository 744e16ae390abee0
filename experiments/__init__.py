"""One file per experiment; `rsm experiment NAME` runs it."""
