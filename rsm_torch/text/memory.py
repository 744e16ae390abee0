"""`AgentMemory`: texts of many agents, added, found, packed, deleted and moved."""

from __future__ import annotations

from rsm_torch.text.adding import Adding
from rsm_torch.text.changing import Changing
from rsm_torch.text.finding import Finding
from rsm_torch.text.moving import Moving


class AgentMemory(Adding, Finding, Changing, Moving):
    """A text memory for many streams (agents, users, sessions) that never see each other.

    Each base class holds verbs of one kind: add and add_many; search, context, get and get_all;
    update, delete, delete_all and purge; fork, merge, export, absorb and reembed.

    Safe to call from threads, and from asyncio by `asyncio.to_thread`. A `with` block closes it.
    It works in the process that opened it: in another, as in the workers of a server that forks,
    every verb raises RuntimeError, and `close` does nothing; open one there.

    An interrupt (Ctrl-C) leaves the state from before a verb or from after it; if it came after,
    the exception has a note that says so. The next verb may take as long as opening the file.

    Args:
        embedder: what `load_embedder` accepts.
        config: how to cluster; its `dim` is the embedder's. None: the defaults, with tau as below.
            What its limits drop or merge is deleted or merged here, too: its `ttl` counts back
            from the newest `Item.time` of a stream, and reading does not count as use for
            "least_used". members="none" is refused: it could find no item.
        path: a SQLite file that keeps everything, made if missing; one memory at a time may have
            it open. While it is in use, and after a crash, the log beside it, "-wal", belongs to it:
            neither is to be moved, copied or deleted alone. Closing keeps the tensors in the file,
            too, so that it reopens as it was; after a crash, those of streams that changed are
            rebuilt, to the same atoms; with members="coefficients", coefficients, and so scores, are
            then computed anew and may differ. A file that may not be written, or whose folder may
            not, is opened for reading, by any number of processes: what would change it raises
            PermissionError. None: RAM only.
        device: of the embedder and of the tensors; "auto" is CUDA when there is one.
        tau: the gate's threshold, instead of a config.
        calibration: of the embedder's space: its tau (unless `config` or `tau` says another) and
            its transform.
        tokenizer: the reader's, for `context`; None: the embedder's.
        ttl: seconds that items are kept unless `add` says otherwise; None: for ever. Not kept in
            the file.
        clock: the time now in seconds since the epoch, by which items expire.
        max_bytes: of tensors to keep, about. A stream's tensors are loaded from the store when it is
            first used; if there are more, those of the streams that were not used for longest are
            dropped until they are used again. The streams of one call stay whatever they take. None:
            keep all.

    Without config, tau or calibration, tau starts at the default of `RSMConfig` and is calibrated
    once, by the `add` that brings the memory to 32 items: the 0.70 quantile of the cosines, within
    streams, of up to 50 of them, after which the streams are clustered anew. (While no stream has
    two items, it waits for 64, and takes all pairs.) It is kept in the file. (Quantiles seen with all-MiniLM-L6-v2: 0.3 for chat, 0.5 to 0.7 for web and code agents,
    0.98 for grid games, so that no fixed number does.)

    Raises:
        TypeError: an argument of another kind.
        ValueError: the file belongs to another embedder, width, config or tau; it or its log is
            damaged, missing or no memory's, which any verb may also find when it comes to a damaged
            row; `config` and `tau` are both given.
        BlockingIOError: the file is open in another memory or process.
        OSError: the file cannot be opened or, by any verb, written, as on a full disk (nothing has
            changed then); the embedder cannot be loaded.
    """
