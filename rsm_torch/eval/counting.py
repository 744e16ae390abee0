"""Counting the tokens of thousands of contexts that are made of the same lines.

Tokenizers that first cut a text at white space make the same tokens of a line wherever it stands.
For those, a text's count is the sum of its lines' counts, and a line is tokenised once. Which
tokenizers do so is read from their own description, never guessed; all others count whole texts.
"""

from __future__ import annotations

import json
import re
from hashlib import blake2b
from typing import Any

from rsm_torch.tokens import TokenCounter, token_counter, well_formed

# Between a line that ends in a printable ASCII character and one that begins with one: spaces at
# either side could join the line break in one token.
SEAM = re.compile(r"(?<=[!-~]\n)(?=[!-~])")
SHORT = 120
MOST_KEPT = 2_000_000  # counts kept, before starting afresh: some 300 MB


class CachedCounter:
    """Exact token counts, remembered.

    Args:
        tokenizer: what `token_counter` accepts.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._count: TokenCounter = token_counter(tokenizer)
        self.by_line = lines_add_up(tokenizer)
        self._known: dict[str | bytes, int] = {}

    def __call__(self, text: str) -> int:
        """How many tokens the tokenizer makes of `text`, without special tokens."""
        if not self.by_line:
            return self._part(text)
        return sum(map(self._part, SEAM.split(text)))

    def _part(self, text: str) -> int:
        # a digest stands for a long text, which would otherwise be kept as long as this counter
        key = (
            text
            if len(text) <= SHORT
            else blake2b(well_formed(text).encode(), digest_size=16).digest()
        )
        count = self._known.get(key)
        if count is None:
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            count = self._known[key] = self._count(text)
        return count


def lines_add_up(tokenizer: Any) -> bool:
    """Whether the tokens of a text are those of its pieces, cut at `SEAM`.

    True for fast tokenizers of the BERT kind (words first, then pieces of words) and of the GPT-2
    kind (byte-level, split by GPT-2's expression, with digits set apart or not), whose split puts
    a single line break between printable characters into a token of its own.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "token_to_id") or not hasattr(backend, "to_str"):
        return False
    form = json.loads(backend.to_str())
    added = form.get("added_tokens") or []
    if any(t.get("lstrip") or t.get("rstrip") or "\n" in t.get("content", "") for t in added):
        return False
    normalizer = (form.get("normalizer") or {}).get("type")
    steps = _steps(form.get("pre_tokenizer") or {})
    if [step.get("type") for step in steps] == ["BertPreTokenizer"]:
        return normalizer in (None, "BertNormalizer")
    *before, last = steps or [{}]
    return (
        normalizer is None
        and all(step.get("type") == "Digits" for step in before)
        and last.get("type") == "ByteLevel"
        and last.get("use_regex") is True
        and last.get("add_prefix_space") is False
    )


def _steps(pre_tokenizer: dict[str, Any]) -> list[dict[str, Any]]:
    if pre_tokenizer.get("type") == "Sequence":
        return list(pre_tokenizer.get("pretokenizers") or [])
    return [pre_tokenizer]
