"""Models of the Hugging Face hub: whether there is one, and loading without noise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 5.0  # to wait for an answer on whether a model exists


def ask_hub(model_id: str, revision: str | None = None) -> None:
    """Raises OSError unless the hub can be reached and has the model: one request, since loading
    would try for more than a minute."""
    from huggingface_hub import errors, model_info

    try:
        model_info(model_id, revision=revision, timeout=SECONDS)
    except errors.HFValidationError as error:
        raise OSError(f"it is neither a folder nor a model id: {error}") from error
    except errors.HTTPError as error:  # of no use to except OSError, which not all of them are
        raise OSError(f"not in the local cache; asking the hub: {error}") from error


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """transformers draws one for the weights of a local file, which takes no time."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
