"""Hidden states that serving engines give back: vLLM's files, SGLang's answers."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rsm_torch.checks import named
from rsm_torch.hidden.encoding import check_finite
from rsm_torch.hidden.layers import FINAL, Layer
from rsm_torch.hidden.pooling import pool_states

EMBEDDINGS = "embeddings"  # what vLLM calls layer 0, which is no decoder layer
SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")  # what vLLM makes ids unique by, inside


@dataclass(frozen=True, eq=False)
class ServedStates:
    """The states of one request's tokens.

    Attributes:
        request_id: what the engine calls the request.
        token_ids: [T] int64, the tokens that were fed; -1 where the engine does not say which.
        states: [T, L, D], as the engine gave them.
        layers: L layers, counted as `capture` does; "final" is the state after the final norm.
        norm: "pre" or "post" the final norm, for all of them.
    """

    request_id: str
    token_ids: Tensor
    states: Tensor
    layers: tuple[Layer, ...]
    norm: str

    def pool(self, layer: Layer, pool: str = "mean") -> Tensor:
        """[D], one state of all tokens, as `capture` pools them.

        Raises:
            KeyError: a layer that is not there.
            ValueError: states that are not finite, by layer and token; another pool.
        """
        if pool not in ("mean", "last", "first"):
            raise ValueError(f"pool: expected mean, last or first, got {pool!r}")
        states = self.states[:, self.place(layer)]
        try:
            check_finite(states, layer, [str(token) for token in range(len(states))])
        except ValueError as error:
            raise ValueError(f"request {self.request_id!r}: {error}") from None
        everything = torch.ones(1, len(states), dtype=torch.bool, device=states.device)
        return pool_states(states[None], everything, pool)[0]

    def place(self, layer: Layer) -> int:
        """Where along L a layer is. KeyError if it is not there."""
        if layer not in self.layers:
            raise KeyError(
                f"layer {layer!r}: request {self.request_id!r} has layers {named(list(self.layers))}"
            )
        return self.layers.index(layer)


# vLLM


def read_vllm(
    source: Any,
    layer_ids: Sequence[int],
    tokens: Sequence[int] | Tensor | None = None,
    request_id: str | None = None,
) -> ServedStates:
    """Read a file that vLLM's `ExampleHiddenStatesConnector` wrote, once it is whole.

    Args:
        source: the file; or an output of `LLM.generate` (or a server's answer as a dict) whose
            `kv_transfer_params` name it, which is then checked against the output's own tokens.
        layer_ids: the engine's `eagle_aux_hidden_state_layer_ids`, which the file does not hold.
            vLLM's id k is the state after k layers, `capture`'s layer k - 1; the number of layers
            is the last layer's, not normalised. 0 is "embeddings".
        tokens: the token ids that should be there.
        request_id: another name; None: the output's, or the file's name.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file that is truncated or something else; lengths that do not match.
    """
    if isinstance(layer_ids, str) or not hasattr(layer_ids, "__len__"):
        raise TypeError(f"layer_ids: expected a list of integers, got {layer_ids!r:.80}")
    if wrong := [k for k in layer_ids if not hasattr(k, "__index__") or operator.index(k) < 0]:
        raise ValueError(f"layer_ids: expected integers from 0, got {named(wrong)}")
    expected = None if tokens is None else [torch.as_tensor(tokens).flatten().tolist()]
    path = source
    if not isinstance(source, (str, Path)):
        params = _field(source, "kv_transfer_params")
        path = None if params is None else params.get("hidden_states_path")
        if path is None:
            raise ValueError(
                "source: its kv_transfer_params name no hidden_states_path; start the engine with "
                'speculative_config={"method": "extract_hidden_states", …} and the '
                "ExampleHiddenStatesConnector"
            )
        request_id = _request_id(source) if request_id is None else request_id
        expected = expected or _vllm_tokens(source)
    file = Path(path)
    found = _read_tensors(file)
    states, ids = found["hidden_states"], found["token_ids"].to(torch.int64).flatten()
    if states.dim() != 3 or not states.is_floating_point():
        raise ValueError(
            f"{file}: hidden_states is {states.dtype} {tuple(states.shape)}, expected floating "
            "[tokens, layers, hidden]"
        )
    if len(states) != len(ids):
        raise ValueError(
            f"{file}: hidden_states of {len(states)} tokens, token_ids of {len(ids)}; run the "
            "engine with enable_prefix_caching=False and enable_chunked_prefill=False"
        )
    if states.shape[1] != len(layer_ids):
        raise ValueError(
            f"layer_ids: {len(layer_ids)} ({named(list(layer_ids))}), but {file} has "
            f"{states.shape[1]} layers"
        )
    if expected is not None:
        _check_tokens(ids.tolist(), expected, file)
    layers = tuple(operator.index(k) - 1 if k else EMBEDDINGS for k in layer_ids)
    return ServedStates(request_id or file.stem, ids, states, layers, "pre")


def _read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, after whoever holds its `.lock` has let go of it."""
    import fcntl

    from safetensors import SafetensorError
    from safetensors.torch import load_file

    lock = Path(f"{file}.lock")
    with open(lock, "rb") if lock.exists() else nullcontext() as held:
        if held is not None:
            fcntl.flock(held, fcntl.LOCK_SH)  # the engine writes under an exclusive lock
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file")
        try:
            found = load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{file}: not a whole safetensors file ({error})") from error
    if missing := {"hidden_states", "token_ids"} - set(found):
        raise ValueError(f"{file}: no {named(sorted(missing))} in it, but {named(sorted(found))}")
    return found


def _vllm_tokens(output: Any) -> list[list[int]] | None:
    """What an output's file may hold: the prompt, or also all of the answer that was fed."""
    prompt = _field(output, "prompt_token_ids")
    if prompt is None:
        return None
    answers = _field(output, "outputs") or ()
    answer = list(_field(answers[0], "token_ids") or ()) if answers else []
    return [list(prompt), [*prompt, *answer[:-1]]]


def _check_tokens(got: list[int], expected: list[list[int]], file: Path) -> None:
    if got in expected:
        return
    lengths = " or ".join(str(len(one)) for one in expected)
    if len(got) not in map(len, expected):
        raise ValueError(f"{file}: holds {len(got)} tokens, expected {lengths}")
    one = next(one for one in expected if len(one) == len(got))
    at = next(at for at, (a, b) in enumerate(zip(got, one, strict=True)) if a != b)
    raise ValueError(
        f"{file}: token {at} is {got[at]}, expected {one[at]}: another request's states"
    )


# SGLang


def read_sglang(
    response: Any, prompt_ids: Sequence[int] | Sequence[Sequence[int]] | None = None
) -> Any:
    """Read the states in an answer of SGLang (`/generate` or `Engine.generate`).

    They are those of the last layer after the final norm, of the prompt and of all generated
    tokens but the last, which no forward has read; an answer to `return_hidden_states="last"`
    has the last of them alone.

    Args:
        response: an answer with `meta_info["hidden_states"]`, a list of blocks [tokens, D] and
            of single states [D], in lists or arrays; or a list of answers.
        prompt_ids: the prompt's token ids (of each answer), which answers do not repeat.

    Returns:
        `ServedStates`, or a list of them.

    Raises:
        ValueError: lengths that do not match; no states in the answer.
    """
    if isinstance(response, (list, tuple)):
        prompts = [None] * len(response) if prompt_ids is None else list(prompt_ids)
        if len(prompts) != len(response):
            raise ValueError(f"prompt_ids: {len(prompts)} for {len(response)} answers")
        return [_sglang(one, ids) for one, ids in zip(response, prompts, strict=True)]
    return _sglang(response, prompt_ids)


def _sglang(response: Any, prompt_ids: Any) -> ServedStates:
    meta = _field(response, "meta_info")
    found = meta.get("hidden_states") if isinstance(meta, Mapping) else None
    if found is None or len(found) == 0:
        raise ValueError(
            "response: no hidden_states in its meta_info; start the engine with "
            "enable_return_hidden_states=True and ask with return_hidden_states=True"
        )
    name = _request_id(response)
    states = _blocks(found, name)
    prompt, made = (_count(meta, what, name) for what in ("prompt_tokens", "completion_tokens"))
    fed = prompt + max(made - 1, 0)
    ids = _sglang_tokens(response, prompt_ids, prompt, made, name)
    last_alone = len(states) == 1 and fed > 1 and len(found) == 1
    one = torch.as_tensor(found[0]).dim() == 1 if last_alone else False
    if one:
        ids = ids[-1:]
    elif len(states) != fed:
        cached = int(meta.get("cached_tokens") or 0)
        raise ValueError(
            f"request {name!r}: states of {len(states)} tokens, expected {fed} ({prompt} of the "
            f"prompt and {max(made - 1, 0)} generated)"
            + (f"; {cached} came from the prefix cache" if cached else "")
            + ": run the engine with disable_radix_cache=True and chunked_prefill_size=-1"
        )
    return ServedStates(name, ids, states[:, None], (FINAL,), "post")


def _count(meta: Mapping[str, Any], what: str, name: str) -> int:
    try:
        return int(meta[what])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"request {name!r}: its meta_info has no number of {what}, but {meta.get(what)!r:.80}"
        ) from error


def _blocks(blocks: Any, name: str) -> Tensor:
    """[T, D] of a list of [t, D] and [D]."""
    parts = []
    for number, block in enumerate(blocks):
        try:
            part = torch.as_tensor(block)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"request {name!r}: block {number} of its hidden_states is not numbers [tokens, "
                f"width]: {error}"
            ) from error
        part = part[None] if part.dim() == 1 else part
        if part.dim() != 2 or not part.is_floating_point():
            raise ValueError(
                f"request {name!r}: block {number} of its hidden_states is {part.dtype} "
                f"{tuple(part.shape)}, expected floating [tokens, width]"
            )
        parts.append(part)
    if len(widths := sorted({part.shape[1] for part in parts})) > 1:
        raise ValueError(f"request {name!r}: states of different widths, {named(widths)}")
    return torch.cat(parts)


def _sglang_tokens(response: Any, prompt_ids: Any, prompt: int, made: int, name: str) -> Tensor:
    """[fed] ids of the tokens that were fed, -1 where the answer does not say."""
    out = _field(response, "output_ids")
    out = _field(response, "token_ids") if out is None else out
    for what, ids, number in (("prompt_ids", prompt_ids, prompt), ("output_ids", out, made)):
        if ids is not None and len(ids) != number:
            raise ValueError(
                f"request {name!r}: {len(ids)} {what}, but its meta_info counts {number} tokens"
            )
    first = [-1] * prompt if prompt_ids is None else [int(at) for at in prompt_ids]
    then = [-1] * made if out is None else [int(at) for at in out]
    return torch.tensor([*first, *then[:-1]], dtype=torch.int64)


# Both


def match_requests(requests: Sequence[Any], states: Sequence[ServedStates]) -> list[ServedStates]:
    """The states of each request, in the order of `requests`, by id.

    Args:
        requests: ids, or outputs that have one (`request_id`, `id`, or `meta_info["id"]`).
        states: in any order. vLLM's files are named by the id, "-" and eight hex digits, which
            counts as that id where it is not an id of its own.

    Raises:
        ValueError: an id that comes twice, has no states, or was not asked for.
    """
    wanted = [one if isinstance(one, str) else _request_id(one) for one in requests]
    known = set(wanted)
    found = [
        one.request_id if one.request_id in known else SUFFIX.sub("", one.request_id)
        for one in states
    ]
    for name, ids in (("requests", wanted), ("states", found)):
        if twice := sorted({at for at in ids if ids.count(at) > 1}):
            raise ValueError(f"{name}: id {named(twice)} more than once")
    if missing := [at for at in wanted if at not in set(found)]:
        raise ValueError(f"states: none of request {named(missing)}")
    if other := [at for at in found if at not in known]:
        raise ValueError(f"states: of request {named(other)}, which is not among the requests")
    by_id = dict(zip(found, states, strict=True))
    return [by_id[at] for at in wanted]


def _field(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def _request_id(output: Any) -> str:
    meta = _field(output, "meta_info")
    for source, name in ((output, "request_id"), (output, "id"), (meta, "id")):
        found = None if source is None else _field(source, name)
        if found is not None:
            return str(found)
    raise ValueError(f"requests: no request_id or id in {output!r:.80}")
