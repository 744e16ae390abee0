"""What an error of SQLite's means for the file, in words that say what to do."""

from __future__ import annotations

import os
import sqlite3

from rsm_torch.text.claim import REMEDY, Claim

BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
SYSTEM = {
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT,
}  # fmt: skip


def damaged(claim: Claim, what: object) -> ValueError:
    """The error to raise where the contents cannot be what was written."""
    return ValueError(f"path: {claim.path} is damaged, or is truncated ({what}); {REMEDY}")


def explanation(error: sqlite3.Error, claim: Claim) -> Exception:
    """The error to raise instead: BlockingIOError, OSError or ValueError."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    where = "the memory in RAM" if claim.path is None else claim.path
    if code in BUSY:
        return claim.in_use()
    # A file that the system lets us write, and that says it is not to be written, is damaged.
    writable = claim.path is not None and os.access(claim.path, os.W_OK)
    if code in SYSTEM and not (code == sqlite3.SQLITE_READONLY and writable):
        return OSError(f"path: cannot use {where}: {error}")
    if code == sqlite3.SQLITE_TOOBIG:
        return ValueError(f"path: {where} cannot hold a text that long ({error})")
    if code == sqlite3.SQLITE_NOTADB:
        return ValueError(f"path: {where} is not a memory, or is truncated ({error})")
    return damaged(claim, error)
