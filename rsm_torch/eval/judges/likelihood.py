"""How likely a local model finds the reference answer, given the context and the question.

A judge-free measure: the mean log-probability per token (natural logarithm, "nats") of the
reference under a causal language model that has read the reader's prompt. It is at most 0, higher
is better, and it needs no answer.

The prompt and the reference are turned into tokens one without the other and joined, so that the
tokens that are scored are the same for every context: tokenised as one text, a prompt's last
characters could merge with the answer's first. After a prompt in plain text the reference gets a
leading space; a chat template ends where an answer begins. The end of the text is not scored.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rsm_torch.cache import RowCache
from rsm_torch.eval.judges.protocol import NO_REFERENCE, Case, Verdict
from rsm_torch.eval.prompts import dataset_key, prompts_hash, reader_prompt
from rsm_torch.eval.readers.halving import in_halves
from rsm_torch.eval.readers.local_model import LocalModel, left_padded, prompt_ids, window_of
from rsm_torch.eval.readers.protocol import Failure
from rsm_torch.eval.readers.reply_cache import content_key
from rsm_torch.tokens import well_formed

Pair = tuple[list[int], list[int]]


class LikelihoodJudge:
    """Mean log-probability of the reference in nats per token.

    Args:
        local: the model with its tokenizer.
        dataset: whose reader prompt is used, with "-" or "_".
        batch_tokens: padded tokens in one batch, which bounds memory; a longer case runs alone.
        cache: file of scores, by a hash of the model's weights and of all tokens; None keeps none.
    """

    def __init__(
        self,
        local: LocalModel,
        dataset: str,
        *,
        batch_tokens: int = 8192,
        cache: str | Path | None = None,
    ):
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens: expected at least 1, got {batch_tokens}")
        self.local, self.dataset = local, dataset_key(dataset)
        self.name, self.batch_tokens = f"likelihood:{local.name}", batch_tokens
        self.cache = None if cache is None else RowCache(cache)

    def describe(self) -> Mapping[str, Any]:
        return {"judge": self.name, "model": self.local.key, "prompts": prompts_hash()}

    def judge(self, cases: Sequence[Case]) -> list[Verdict]:
        """One verdict for each case, in their order; a case that does not fit the model's window,
        or alone the device's memory, gets an error, nothing is cut."""
        verdicts: dict[int, Verdict] = {}
        pairs: dict[int, Pair] = {}
        for place, case in enumerate(cases):
            if not (case.question.reference or "").strip():
                verdicts[place] = Verdict(None, NO_REFERENCE)
                continue
            pair = self._tokens(case)
            if (why := self._too_long(pair)) is not None:
                verdicts[place] = Verdict(None, why)
            else:
                pairs[place] = pair
        scores = dict(zip(pairs, self.scores(list(pairs.values())), strict=True))
        for place, score in scores.items():
            if isinstance(score, Failure):
                verdicts[place] = Verdict(None, score)
            else:
                verdicts[place] = Verdict(score)
        return [verdicts[place] for place in range(len(cases))]

    def scores(self, pairs: Sequence[Pair]) -> list[float | Failure]:
        """The score of each (prompt tokens, answer tokens), from the cache or computed; why there is
        none where the device's memory is too small for it alone."""
        keys = [content_key(["likelihood", self.local.key, *pair]) for pair in pairs]
        known: dict[str, float | Failure] = {}
        missing = dict(zip(keys, pairs, strict=True))
        if self.cache is not None:
            missing = {keys[at]: pairs[at] for at in self.cache.missing(keys)}
        for batch in _batches(missing, self.batch_tokens):
            values = in_halves([missing[key] for key in batch], self._computed)
            known |= zip(batch, values, strict=True)
            fine = {k: v for k, v in zip(batch, values, strict=True) if isinstance(v, float)}
            if self.cache is not None and fine:
                self.cache.append(list(fine), torch.tensor(list(fine.values()))[:, None])
        kept = [key for key in keys if key not in known]
        if self.cache is not None and kept:
            known |= zip(kept, self.cache.read(kept)[:, 0].tolist(), strict=True)
        return [known[key] for key in keys]

    def _computed(self, pairs: Sequence[Pair]) -> list[float]:
        return mean_log_probability(self.local, pairs).tolist()

    def _tokens(self, case: Case) -> Pair:
        prompt = reader_prompt(self.dataset, case.question, case.context, case.about)
        reference = well_formed(str(case.question.reference).strip())
        templated = getattr(self.local.tokenizer, "chat_template", None)
        answer = self.local.tokenizer(
            reference if templated else f" {reference}", add_special_tokens=False, verbose=False
        )
        return prompt_ids(self.local, prompt), list(answer["input_ids"])

    def _too_long(self, pair: Pair) -> Failure | None:
        window, tokens = window_of(self.local.model), len(pair[0]) + len(pair[1])
        if window is None or tokens <= window:
            return None
        return Failure("ContextTooLong", f"{tokens} tokens do not fit the model's {window}")


def mean_log_probability(local: LocalModel, pairs: Sequence[Pair]) -> Tensor:
    """Mean log-probability per answer token, float32 [n], in nats.

    Rows are padded on the left, so that the answers stand at the end and only their logits are
    made; positions count from each row's own first token, so that padding changes nothing.
    """
    ids, mask = left_padded([[*prompt, *answer] for prompt, answer in pairs], local.pad,
                            local.model.device)  # fmt: skip
    longest = max(len(answer) for _, answer in pairs)
    extra: dict[str, Any] = {}
    known = inspect.signature(local.model.forward).parameters
    if "position_ids" in known:
        extra["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    if "logits_to_keep" in known:
        extra["logits_to_keep"] = longest + 1
    with torch.inference_mode():
        logits = local.model(input_ids=ids, attention_mask=mask, use_cache=False, **extra).logits
    # The logits at a place are about the token after it.
    targets = ids[:, -longest:]
    chances = logits[:, -longest - 1 : -1].float().log_softmax(-1)
    chances = chances.gather(-1, targets[..., None])[..., 0]
    lengths = torch.tensor([len(answer) for _, answer in pairs], device=ids.device)
    counted = torch.arange(longest, 0, -1, device=ids.device) <= lengths[:, None]
    return (chances.where(counted, 0).sum(1) / lengths).cpu()


def _batches(pairs: Mapping[str, Pair], budget: int) -> list[list[str]]:
    """Keys of cases of like length, the padded tokens of a batch within the budget."""
    out: list[list[str]] = []
    width = 0
    for key in sorted(pairs, key=lambda key: -len(pairs[key][0]) - len(pairs[key][1])):
        if out and (len(out[-1]) + 1) * width <= budget:
            out[-1].append(key)
        else:
            out.append([key])
            width = len(pairs[key][0]) + len(pairs[key][1])
    return out
