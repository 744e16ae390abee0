"""Writing the states of tokens down while a model generates them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from rsm_torch.checks import as_count, as_flag, as_integers, as_list, as_slots
from rsm_torch.hidden.capture import Captured, argument, capture
from rsm_torch.hidden.encoding import check_finite
from rsm_torch.hidden.layers import find_decoder
from rsm_torch.hidden.models import Origin
from rsm_torch.hidden.pooling import counted_tokens, pool_states
from rsm_torch.hidden.store import LabelsGiven, Store

# Loops of transformers in which a row is not one sequence that grows by a token a step.
OTHER_LOOPS = ("beam", "assisted", "contrastive")


class Block:
    """The pooled state of each row's tokens, taken one step at a time."""

    def __init__(self, pool: str):
        self.pool = pool
        self._rows: Tensor | None = None  # [B, D] the pool of what has come; the sum for "mean"
        self._number: Tensor | None = None  # [B] tokens of each row
        self.tokens: list[tuple[Tensor, Tensor]] = []  # ids [B, t] and which of them count

    @property
    def empty(self) -> bool:
        """Whether no step has come; a step of finished rows is one."""
        return self._rows is None

    def add(self, states: Tensor, counted: Tensor, tokens: Tensor | None) -> None:
        """Take in states [B, t, D] of the tokens that count [B, t]."""
        number = counted.sum(1)
        if self.pool == "mean":
            wide = torch.promote_types(states.dtype, torch.float32)
            rows = states.masked_fill(~counted[..., None], 0).sum(1, dtype=wide)
            self._rows = rows if self._rows is None else self._rows + rows
        else:
            rows = pool_states(states, counted, self.pool)
            if self._rows is not None and self._number is not None:
                fresh = number > 0 if self.pool == "last" else self._number == 0
                rows = torch.where(fresh[:, None], rows, self._rows)
            self._rows = rows
        self._number = number if self._number is None else self._number + number
        if tokens is not None:
            self.tokens.append((tokens, counted))

    def pooled(self) -> tuple[Tensor, Tensor]:
        """[B, D], and which rows have had a token [B]."""
        assert self._rows is not None
        assert self._number is not None
        some = self._number > 0
        if self.pool == "mean":
            return self._rows / self._number.clamp(min=1)[:, None], some
        return self._rows, some


class Generating:
    """The block in which a `HiddenStateMemory` follows `model.generate`, made by its
    `while_generating`.

    Attributes:
        rows: how many rows generate; None before the first forward.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        origin: Origin,
        store: Store,
        streams: Sequence[int] | Tensor | None,
        every: int | None,
        prompt: bool,
        labels: LabelsGiven,
        ends: Sequence[int] | None,
        check: bool,
    ):
        every = None if every is None else as_count(every, "every", 1)
        prompt, check = as_flag(prompt, "prompt"), as_flag(check, "check")
        if labels is not None:
            labels = as_list(labels, "labels", "a list of strings or integers")
        self.rows: int | None = None
        self._model, self._tokenizer, self._origin, self._store = model, tokenizer, origin, store
        self._slots: Tensor | None = None
        if streams is not None:
            self._slots = as_slots(streams, None, store.memory.streams)
            self._check_labels(len(self._slots), labels)
        self._labels, self._check = labels, check
        store.encode(labels, 0 if labels is None else len(labels))  # raises before generate runs
        self._every, self._prompt = every, prompt
        given = None if ends is None else as_integers(ends, "ends", 1).tolist()
        self._ends = _ends(model, tokenizer) if given is None else given
        self._hooks: ExitStack | None = None
        self._seen = 0  # tokens of each row so far, padding too
        self._written: list[Tensor] = []
        self._texts: list[tuple[Tensor, list[tuple[Tensor, Tensor]]]] = []

    @property
    def ids(self) -> Tensor:
        """[rows, items] int64, the ids of what each row has written so far, in order; -1 where it
        had nothing to write any more."""
        if not self._written:
            return torch.zeros(self.rows or 0, 0, dtype=torch.int64)
        return torch.stack(self._written, 1)

    # The block

    def __enter__(self) -> Generating:
        if self._hooks is not None or self.rows is not None:
            raise RuntimeError("while_generating: this block was used already; make another")
        origin = self._origin
        with ExitStack() as hooks:
            # Its forward hook comes behind the layer's, with the arguments that tell what was fed.
            acts = hooks.enter_context(capture(self._model, origin.layer, "none", check=False))
            caller = self._model if origin.norm is None else find_decoder(self._model).parent
            handle = caller.register_forward_hook(self._follow(acts), with_kwargs=True)
            hooks.callback(handle.remove)
            self._hooks = hooks.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._hooks is not None
        self._hooks.close()
        try:
            if kind is None:
                if self.rows is None:
                    raise RuntimeError(
                        f"while_generating: layer {self._origin.layer!r} did not run in the block "
                        "(which sees what its own thread runs; and a compiled model runs no hooks "
                        "that were added later)"
                    )
                self._flush()
        finally:
            self._keep_texts()

    def _follow(self, acts: Captured) -> Any:
        def follow(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if not acts.here:
                return
            states = acts.steps(self._origin.layer)[-1]  # a forward that failed may have left one
            acts.clear()
            tokens = argument(module, "input_ids", args, kwargs)
            mask = argument(module, "attention_mask", args, kwargs)
            if self.rows is None:
                self._begin(states, tokens, mask)
            else:
                self._step(states, tokens, mask)

        return follow

    # One forward

    def _begin(self, states: Tensor, tokens: Tensor | None, mask: Tensor | None) -> None:
        """The prompts."""
        if loop := _other_loop():
            raise ValueError(
                f"generate: {loop} moves sequences between rows or checks several tokens at once; "
                "use sampling or greedy search (num_beams=1), or write the result with write()"
            )
        if self._slots is None:
            self._slots = as_slots(None, len(states), self._store.memory.streams)
        self._check_rows(states)
        self._check_labels(len(states), self._labels)
        self.rows = len(states)
        self._slots = self._slots.to(self._store.memory.device)
        self._seen = states.shape[1] if mask is None or mask.dim() != 2 else mask.shape[1]
        self._finished = torch.zeros(len(states), dtype=torch.bool, device=states.device)
        self._end = torch.tensor(self._ends, dtype=torch.int64, device=states.device)
        self._block, self._steps = Block(self._origin.pool), 0
        if self._prompt:
            self._block.add(states, counted_tokens(states, mask, None, None), tokens)
            self._flush()

    def _step(self, states: Tensor, tokens: Tensor | None, mask: Tensor | None) -> None:
        """One token of each row; without a KV cache all tokens before it, too."""
        self._check_rows(states)
        masked = mask is not None and mask.dim() == 2
        length = mask.shape[1] if masked else self._seen + states.shape[1]  # type: ignore[union-attr]
        if tokens is None or length != self._seen + 1 or states.shape[1] not in (1, length):
            raise ValueError(
                f"generate: expected the next token of each row after {self._seen}, got "
                f"{states.shape[1]} of {length}; a block follows one call of generate, without "
                "prefill_chunk_size or an assistant model"
            )
        self._seen = length
        last = tokens[:, -1:].to(states.device)
        self._finished = self._finished | torch.isin(last[:, 0], self._end)
        self._block.add(states[:, -1:], ~self._finished[:, None], last)
        self._steps += 1
        if self._every is not None and self._steps % self._every == 0:
            self._flush()

    def _check_rows(self, states: Tensor) -> None:
        have = 0 if self._slots is None else len(self._slots)
        if len(states) == have:
            return
        why = "rows must stay the same while they generate"
        if self.rows is None:
            why = "each row writes to a stream of its own; beam search and several sequences of a"
            why += " prompt multiply the rows"
        raise ValueError(f"streams: {have} for a forward of {len(states)} rows; {why}")

    @staticmethod
    def _check_labels(rows: int, labels: LabelsGiven) -> None:
        if labels is not None and len(labels) != rows:
            raise ValueError(f"labels: expected one for each of {rows} rows, got {len(labels)}")

    def _flush(self) -> None:
        """Write what the rows have had since the last item."""
        block, self._block = self._block, Block(self._origin.pool)
        if block.empty:
            return
        states, some = block.pooled()
        if self._check:
            check_finite(states.masked_fill(~some[:, None], 0), self._origin.layer)
        store = self._store
        codes, known = store.encode(self._labels, len(states))
        written = store.memory.write(
            states[:, None], self._slots, some.to(torch.int64), check=self._check,
            labels=None if codes is None else codes[:, None].to(store.memory.device),
        )  # fmt: skip
        store.labels = known
        self._written.append(written.ids[:, 0])
        if store.texts is not None:
            self._texts.append((written.ids[:, 0], block.tokens))

    def _keep_texts(self) -> None:
        """Decode what was written, once generate is over and waiting does no harm."""
        for ids, parts in self._texts:
            if not parts or self._tokenizer is None:
                continue
            tokens = torch.cat([part for part, _ in parts], 1).to("cpu")
            counted = torch.cat([which.to("cpu") for _, which in parts], 1)
            decode = self._tokenizer.decode
            self._store.keep(
                {
                    at: decode(tokens[row][counted[row]], skip_special_tokens=True)
                    for row, at in enumerate(ids.tolist())
                    if at >= 0
                }
            )
        self._texts.clear()


def _ends(model: nn.Module, tokenizer: Any) -> list[int]:
    """The token ids after which a row has finished: end of text, and the padding behind it."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), tokenizer):
        for name in ("eos_token_id", "pad_token_id"):
            value = getattr(source, name, None)
            found |= set() if value is None else {value} if isinstance(value, int) else set(value)
    return sorted(found)


def _other_loop() -> str:
    """The loop of transformers that is running, if it is one of OTHER_LOOPS; nothing that a forward
    is given tells beams from rows."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if frame.f_globals.get("__name__", "").startswith("transformers.generation") and any(
            kind in name for kind in OTHER_LOOPS
        ):
            return name.strip("_")
        frame = frame.f_back  # type: ignore[assignment]
    return ""
