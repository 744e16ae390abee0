"""Reading the hidden states of a model while it runs."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from rsm_torch.checks import as_device, as_flag, named, shown
from rsm_torch.hidden.layers import Layer, Layers, Site, check_model, find_decoder, find_sites
from rsm_torch.hidden.pooling import Pool, Span, check_pooling, counted_tokens, pool_states

Edit = Callable[[Layer, Tensor], Tensor | None]


IGNORE_MASKS = {"rwkv"}


class _Stopped(Exception):
    """Unwinds a forward after the last wanted layer; caught by the capture that raised it."""

    def __init__(self, by: Captured):
        super().__init__("this forward was ended by capture(..., stop=True)")
        self.by = by


def capture(
    model: nn.Module,
    layers: Layers,
    pool: Pool = "last",
    *,
    mask: Tensor | None = None,
    span: Span | None = None,
    norm: str = "pre",
    stop: bool = False,
    check: bool = True,
    device: torch.device | str | None = None,
    grad: bool = False,
    edit: Edit | None = None,
) -> Captured:
    """A context in which the hidden states of a causal language model are kept.

    ```python
    with capture(model, layers=[12, -1], pool="mean") as acts:
        model(**batch)
    acts[12], acts[-1]  # [B, D] each
    ```

    Forward hooks read the outputs; neither the model nor `model.forward` is changed, and no hook is
    left when the block ends, however it ends. What other threads run in the model is not seen; but
    hooks are the model's own, and PyTorch may raise a RuntimeError in a thread that runs it while
    another opens or closes a block: keep those apart by a lock. The `attention_mask` of each call says which tokens
    count, so that a text alone, padded on the left or on the right gives the same; without one,
    all count. (Models with learned absolute positions also need `position_ids` for left padding.)

    Args:
        model: any PyTorch model whose layers return [B, T, D], or a tuple that begins with it.
            It may lie on several devices.
        layers: an index, a module's name, or a list of them; or a predicate on module names. Layer
            i is transformers' `hidden_states[i + 1]`, -1 the last one. "final", or the number of
            layers, is the state after the final norm, which transformers gives as the last of
            `hidden_states` in place of the last layer's. "embeddings" is what the first layer is
            given, transformers' `hidden_states[0]`; "all" stands for all decoder layers. Some models
            (Mamba, RWKV) leave the embeddings out of their `hidden_states`: there, layer i is
            `hidden_states[i]`. The router of a layer of experts is a module, such as
            "model.layers.3.mlp.gate": its logits come as [B, T, experts].
        pool: "last", "mean" or "first" of a row's counted tokens, [B, D]; "none", every token
            [B, T, D] as it is, padding too; or a function from the states [B, T, D] and which tokens
            count [B, T] to [B, …], which is to copy what it returns.
        mask: [B, T], not zero for the tokens to count, beside the attention mask; for calls of
            that shape only.
        span: (start, stop), a slice of each row's own tokens (padding is not one of them); negative
            numbers count from their end, stop=None is the end.
        norm: "post" takes the last layer after the final norm instead.
        stop: end each forward when the wanted layers have run, which saves the rest and the
            output head. Call `acts.run(**batch)` in the block, which then returns None. A plain
            `model(**batch)` ends the whole block at that point, so it must be its last statement.
            Of nested captures only the innermost should stop.
        check: refuse NaN and infinite states, naming layer and rows. It waits for the device at
            the end of each forward; without it a row in which no token counts is NaN.
        device: where pooled states go, such as "cpu" to keep those of many layers; None: they stay
            on their layer's.
        grad: keep the graph, so that gradients flow back from what was captured.
        edit: a function from a layer's key and its states [B, T, D], before they are pooled, to others
            of that shape, which the model goes on with; or to None, having changed them in place or
            not at all. Not for "embeddings".

    Returns:
        a `Captured`, the mapping from layers to states.

    Raises:
        TypeError, ValueError: at once, for arguments that do not fit the model; in the model's call,
            for masks that do not fit it, and states that `check` refuses. That forward leaves
            nothing behind.

    Warns:
        UserWarning: in the model's call, where rows are padded on the left and the model ignores
            masks, as RWKV does: its states are then not those of the row alone.
    """
    check_model(model)
    check_pooling(pool, mask, span)
    as_flag(stop, "stop")
    as_flag(check, "check")
    as_flag(grad, "grad")
    where = None if device is None else as_device(device)
    if edit is not None and not callable(edit):
        raise TypeError(f"edit: expected a function, got {shown(edit)}")
    if any(name.rpartition(".")[2] == "encoder" for name, _ in model.named_modules()) and getattr(
        getattr(model, "config", None), "is_encoder_decoder", False
    ):
        raise ValueError(
            f"model: {type(model).__name__} has an encoder too, and the attention_mask is the "
            "encoder's; pass model.get_decoder(), and call that"
        )
    sites, called = find_sites(model, layers, norm)
    if edit is not None and any(site.before for site in sites):
        raise ValueError("edit: the embeddings are what a layer is given; edit a layer's output")
    return Captured(model, sites, called, (pool, mask, span), stop, check, where, grad, edit)


class Captured(Mapping[Layer, Tensor]):
    """States by layer, made by `capture` and readable during and after its block.

    Keys are indices of decoder layers (their number for "final") and names of other modules;
    looking up also understands negative indices and what was asked for. Each run of the layers
    appends: `acts[12]` is all runs joined along the batch, `acts.steps(12)` one tensor a run.
    While `model.generate` writes with a KV cache, a run holds one new token of each row, after a
    first run with the prompt. States are detached and stay on the layer's device in its dtype, unless
    told otherwise.

    Attributes:
        norms: "pre", "post" (after the final norm) or None (no decoder layer), by key.
        names: the module's name, by key.
        pool: how rows were pooled.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: list[Site],
        called: dict[Layer, Layer],
        pooling: tuple[Pool, Tensor | None, Span | None],
        stop: bool,
        check: bool,
        device: torch.device | None,
        grad: bool,
        edit: Edit | None,
    ):
        self.pool, self._mask, self._span = pooling
        self.norms = {site.key: site.norm for site in sites}
        self.names = {site.key: site.name for site in sites}
        self._model, self._sites, self._called = model, sites, called
        self._stop, self._check, self._device, self._grad = stop, check, device, grad
        self._edit = edit
        self._shape: tuple[int, int] | None = None  # rows and tokens of the call under way
        self._steps: dict[Layer, list[Tensor]] = {site.key: [] for site in sites}
        self._hooks: ExitStack | None = None
        self._thread = 0
        self._depth = 0  # calls of the model or its decoder that have not returned
        self._attention: Tensor | None = None
        self._start(None)

    # The mapping

    def __getitem__(self, layer: Layer) -> Tensor:
        steps = self.steps(layer)
        if not steps:
            late = [key for key in self._steps if key not in self._running]
            which = f": layers {named(late)} did not run" if self._running else ""
            raise RuntimeError(
                f"layer {layer!r}: no forward has run in the block{which} (a block sees what its own "
                "thread runs, and a compiled model runs no hooks that were added later)"
            )
        if len({step.shape[1:] for step in steps}) > 1:
            raise ValueError(
                f"layer {layer!r}: its {len(steps)} runs have different numbers of tokens; "
                "take them one by one from steps()"
            )
        return steps[0] if len(steps) == 1 else torch.cat(steps)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, layer: object) -> bool:
        return layer in self._called or self._from_end(layer) in self._steps

    def __repr__(self) -> str:
        return f"Captured(layers={list(self)}, pool={self.pool!r}, runs={self.runs})"

    def steps(self, layer: Layer) -> list[Tensor]:
        """One tensor for each run of the layers, in order.

        Raises:
            KeyError: a layer that is not captured.
        """
        key = self._called.get(layer, self._from_end(layer))
        if key not in self._steps:
            raise KeyError(f"layer {layer!r} is not captured; captured are {named(list(self))}")
        return list(self._steps[key])

    @property
    def runs(self) -> int:
        """How often the layers have run."""
        return len(next(iter(self._steps.values())))

    @property
    def here(self) -> bool:
        """Whether this thread is the one that entered the block, and so the one whose forwards are
        read: hooks run in all."""
        return threading.get_ident() == self._thread

    def clear(self) -> None:
        """Forget what was captured; a loop that runs long should, once it has used it."""
        for steps in self._steps.values():
            steps.clear()

    def _from_end(self, layer: object) -> Layer:
        if type(layer) is int and layer < 0 and any(norm for norm in self.norms.values()):
            return len(find_decoder(self._model).layers) + layer
        return ""

    # The block

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; with stop=True the call ends early and gives None.

        Raises:
            RuntimeError: outside of the block, or in another thread than entered it.
        """
        if self._hooks is None:
            raise RuntimeError(
                "run: the block has ended, or was not entered: use `with capture(…)`"
            )
        if not self.here:
            raise RuntimeError("run: another thread entered this block; enter one here")
        try:
            return self._model(*args, **kwargs)
        except _Stopped as stopped:
            if stopped.by is not self:
                raise
            return None

    def __enter__(self) -> Captured:
        if self._hooks is not None:
            raise RuntimeError("capture: its block is already open; make another capture")
        self._thread = threading.get_ident()
        with ExitStack() as hooks:
            for module in self._callers():
                handle = module.register_forward_pre_hook(self._enter, with_kwargs=True)
                hooks.callback(handle.remove)
                leave = module.register_forward_hook(self._leave, always_call=True)
                hooks.callback(leave.remove)
            for site in self._sites:
                read = self._reader(site)
                if site.before:
                    handle = site.module.register_forward_pre_hook(_given(read), with_kwargs=True)
                else:
                    handle = site.module.register_forward_hook(read)
                hooks.callback(handle.remove)
            self._hooks = hooks.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.close()
        self._depth, self._attention = 0, None
        return isinstance(error, _Stopped) and error.by is self

    def _callers(self) -> list[nn.Module]:
        """The modules whose calls carry an attention mask: the model, and the decoder in it, which
        is called alone by those who want no output head."""
        if not any(self.norms.values()):
            return [self._model]
        parent = find_decoder(self._model).parent
        return [self._model] if parent is self._model else [self._model, parent]

    # One forward

    def _start(self, attention: Tensor | None) -> None:
        """Forget what a forward that did not finish has left."""
        self._running: dict[Layer, Tensor] = {}
        self._counted: dict[torch.device, Tensor] = {}
        self._attention = attention

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.here:
            return
        found = argument(module, "attention_mask", args, kwargs)
        if self._depth == 0 or module is self._model:
            self._start(found)
            self._depth = 0  # even if an interrupt left it higher
            given = (
                argument(module, name, args, kwargs) for name in ("input_ids", "inputs_embeds")
            )
            shape = next((tuple(one.shape[:2]) for one in given if one is not None), None)
            self._shape = shape if shape is None or len(shape) == 2 else None
            _warn_of_padding(self._model, found)
        elif self._attention is None:
            self._attention = found
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.here:
            return
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._attention, self._counted = None, {}

    def _reader(self, site: Site) -> Any:
        def read(module: nn.Module, args: Any, output: Any) -> Any:
            if not self.here:
                return None
            states, changed = _states(output, site, self._shape), None
            if self._edit is not None and (new := self._edit(site.key, states)) is not None:
                if not isinstance(new, Tensor) or new.shape != states.shape:
                    raise ValueError(
                        f"edit: expected states {tuple(states.shape)} of layer {site.key!r} or None, "
                        f"got {tuple(new.shape) if isinstance(new, Tensor) else shown(new)}"
                    )
                states, changed = new, _with_states(output, new)
            states = states if self._grad else states.detach()
            if self._depth == 0:  # a layer called by itself
                self._counted = {}
            if site.key in self._running:
                raise RuntimeError(
                    f"layer {site.key!r}: ran twice before others had run once; capture layers "
                    "that are shared or run alone by themselves"
                )
            counted = self._counts(states)
            self._running[site.key] = pool_states(states, counted, self.pool)
            if len(self._running) == len(self._sites):
                self._finish()
            return changed

        return read

    def _counts(self, states: Tensor) -> Tensor:
        """The tokens that count, once per forward and device."""
        if states.device not in self._counted:
            readable = self._attention is None or self._attention.dim() == 2
            attention = self._attention if readable or self.pool != "none" else None
            counted = counted_tokens(states, attention, self._mask, self._span)
            self._counted[states.device] = counted
        return self._counted[states.device]

    def _finish(self) -> None:
        """Keep the states of a forward, once every layer wanted has run."""
        done, self._running = self._running, {}
        if self._check:
            for key, states in done.items():
                counted = next(iter(self._counted.values())).to(states.device)
                _refuse_bad(key, states, self._counted.get(states.device, counted))
        for key, states in done.items():
            self._steps[key].append(states if self._device is None else states.to(self._device))
        if self._stop:
            raise _Stopped(self)


def argument(
    module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """What a call was given as `name`, by name or by position, if it is a tensor. Of masks by kind
    of attention, the first: none of them tells padding, and as no mask all tokens would count."""
    found = kwargs.get(name)
    if found is None and args:
        names = list(inspect.signature(module.forward).parameters)
        place = names.index(name) if name in names else len(args)
        found = args[place] if place < len(args) else None
    if isinstance(found, Mapping):
        found = next((one for one in found.values() if isinstance(one, Tensor)), None)
    return found if isinstance(found, Tensor) else None


def _given(read: Callable[[nn.Module, Any, Any], Any]) -> Callable[..., None]:
    """A hook before a module that reads the states that it is given."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        read(module, args, args[0] if args else kwargs.get("hidden_states"))

    return hook


def _warn_of_padding(model: nn.Module, attention: Tensor | None) -> None:
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind in IGNORE_MASKS and attention is not None and not bool(attention[..., 0].all()):
        warnings.warn(
            f"{kind} ignores attention masks: states of rows that are padded on the left are not those "
            "of the rows alone; pad on the right",
            UserWarning,
            stacklevel=2,
        )


def _with_states(output: Any, states: Tensor) -> Any:
    """What a module returned, with other states first."""
    if isinstance(output, Tensor):
        return states.view(output.shape)
    if isinstance(output, Mapping):
        first = next(iter(output))
        kind: Any = type(output)
        return kind({**output, first: states.view(output[first].shape)})
    return type(output)([states.view(output[0].shape), *output[1:]])


def _states(output: Any, site: Site, shape: tuple[int, int] | None) -> Tensor:
    """The hidden states [B, T, D] in what a module returned; of [B * T, D], as routers return, too,
    where the call's `shape` (B, T) is known."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    states = output[0] if isinstance(output, (tuple, list)) and output else output
    if isinstance(states, Tensor) and states.dim() == 2 and shape is not None:
        states = states.view(*shape, -1) if len(states) == shape[0] * shape[1] else states
    if not isinstance(states, Tensor) or states.dim() != 3 or not states.is_floating_point():
        got = (
            f"{states.dtype} {tuple(states.shape)}"
            if isinstance(states, Tensor)
            else type(states).__name__
        )
        raise TypeError(f"layer {site.name}: expected it to return [B, T, D] states, got {got}")
    return states


def _refuse_bad(key: Layer, states: Tensor, counted: Tensor) -> None:
    """Raises ValueError for states [B, D] or [B, T, D] that are not finite where they count."""
    finite = states.isfinite().all(-1)
    if finite.shape == counted.shape:  # of every token
        bad = (~finite & counted).any(1)
    else:
        bad = ~finite.view(len(finite), -1).all(1)
    if not bool(bad.any()):
        return
    empty = bad & ~counted.any(1)
    if bool(empty.any()):
        raise ValueError(
            f"layer {key!r}: no token counts in rows {named(empty.nonzero()[:, 0].tolist())}; see "
            "attention_mask, mask and span"
        )
    rows = [
        f"{row} ({'NaN' if states[row].isnan().any() else 'inf'})"
        for row in bad.nonzero()[:, 0].tolist()
    ]
    raise ValueError(
        f"layer {key!r}: states not finite in rows {named(rows)}; nothing of this forward was "
        f"kept. {states.dtype} may be too narrow: load the model in bfloat16 or float32, or pass "
        "check=False"
    )
