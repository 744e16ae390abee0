"""The models of `rsm eval`: reader, judges, and what memories talk to."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rsm_torch.cli.errors import CommandError
from rsm_torch.eval.judges.protocol import Judge
from rsm_torch.eval.readers.protocol import NoReader, Reader
from rsm_torch.eval.readers.reply_cache import content_key

T = TypeVar("T")

ANSWER_TOKENS, NOTE_TOKENS = 256, 1024  # of an answer; of what memories have a model write
LOCAL = ("hf", "likelihood")
PATHS = ("/", "./", "../", "~")  # how a path begins that cannot be a model id


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was asked for.

    Args:
        reader, chat, judges: as on the command line.
        prices: a file of them.
        device, dtype: of local models.
        limits: of servers, as `make_reader` names them.
    """

    reader: str
    chat: str
    judges: Sequence[str]
    prices: Path | None
    device: str
    dtype: str | None
    limits: Mapping[str, float]


def make_models(dataset: str, asked: Asked) -> tuple[Reader, list[Judge], Reader | None]:
    """The reader, the judges, and the reader that memories talk to, None without one.

    Raises:
        CommandError: one that cannot be made; the message names the option.
    """
    from rsm_torch.cache import cache_folder
    from rsm_torch.eval.judges import make_judge
    from rsm_torch.eval.readers import load_prices, make_reader

    prices = None
    if (table := asked.prices) is not None:
        prices = named("--prices", str(table), lambda: load_prices(table))
    replies = cache_folder("replies")
    if asked.reader.strip() == "none":
        for judge in asked.judges:
            if not judge.startswith("likelihood:"):
                raise CommandError(
                    f"--judge: {judge!r} judges answers, and --reader none gives none; name a "
                    "reader, or a likelihood judge, which needs none"
                )
    options: dict[str, Any] = {"device": asked.device, "dtype": asked.dtype, **asked.limits}

    def read(option: str, spec: str, most: int) -> Reader:
        cache = replies / content_key(spec)[:12]  # a folder
        made = {"cache": cache, "prices": prices, "max_tokens": most, **options}
        return named(option, spec, lambda: make_reader(spec, **made))

    def judging(spec: str) -> Judge:
        made = {"cache": replies, "prices": prices, **options}
        return named("--judge", spec, lambda: make_judge(spec, dataset, **made))

    reader = read("--reader", asked.reader, ANSWER_TOKENS)
    chat = read("--chat", asked.chat, NOTE_TOKENS)
    judges = [judging(spec) for spec in asked.judges]
    return reader, judges, None if isinstance(chat, NoReader) else chat


def named(option: str, spec: str, make: Callable[[], T]) -> T:
    """What `make` makes of an option's value; what it raises is said of the option.

    Raises:
        CommandError: it raised an OSError or a ValueError.
    """
    kind, _, name = spec.strip().partition(":")
    if kind in LOCAL and name.startswith(PATHS) and not Path(name).is_dir():
        raise CommandError(
            f"{option}: there is no folder {name}; expected after '{kind}:' a folder that holds a "
            "saved model with its tokenizer, or the id of a model"
        )
    try:
        return make()
    except (OSError, ValueError) as error:
        why = re.sub(r"^(reader|judge|spec|prices): ", "", str(error))
        if kind in LOCAL and name.strip() and Path(name).is_dir():
            why = (
                f"no model could be loaded from the folder {name} ({why}); expected config.json, "
                "weights and tokenizer in it, as save_pretrained leaves them"
            )
        raise CommandError(f"{option}: {why}") from error
