"""What may go wrong with one question without ending the run."""

from __future__ import annotations

from rsm_torch.eval.readers.protocol import Failure

# What a memory, a reader or a judge raises about the work it was given. Interrupts, a full memory
# and a missing package concern the whole run and pass through.
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def failure(error: Exception) -> Failure:
    """What was raised, in one line."""
    lines = (line.strip() for line in str(error).splitlines())
    message = " ".join(line for line in lines if line)
    return Failure(type(error).__name__, message or type(error).__name__)
