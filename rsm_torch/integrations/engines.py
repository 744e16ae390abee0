"""Hidden states from serving engines: vLLM's files, SGLang's answers."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rsm_torch.checks import (
    as_count,
    as_flag,
    as_integers,
    as_list,
    as_path,
    as_tensor,
    named,
    shown,
)
from rsm_torch.files import open_regular, read_file
from rsm_torch.hidden.layers import EMBEDDINGS, FINAL
from rsm_torch.hidden.served import ServedStates
from rsm_torch.io import unpacked

LONGEST = 2**22  # tokens of a prompt or an answer
SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")  # what vLLM makes ids unique by, inside


# vLLM


def read_vllm(
    source: Any,
    layer_ids: Sequence[int],
    tokens: Sequence[int] | Tensor | None = None,
    request_id: str | None = None,
    partial: bool = False,
) -> ServedStates:
    """Read a file that vLLM's `ExampleHiddenStatesConnector` wrote, once it is whole.

    Args:
        source: the file; or an output of `LLM.generate` (or a server's answer as a dict) whose
            `kv_transfer_params` name it, which is then checked against the output's own tokens.
            vLLM names a path on this machine, and the file there is read: take outputs only from
            an engine that you trust as you trust your own files, or give the path yourself.
        layer_ids: the engine's `eagle_aux_hidden_state_layer_ids`, which the file does not hold.
            vLLM's id k is the state after k layers, `capture`'s layer k - 1; the number of layers
            is the last layer's, not normalised. 0 is "embeddings".
        tokens: the token ids that should be there.
        request_id: another name; None: the output's, or the file's name.
        partial: take fewer states than tokens as those of the last tokens, as of a prompt whose
            beginning was in the prefix cache; see `ServedStates.partial`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file that is truncated or something else; lengths that do not match.
    """
    given = as_list(layer_ids, "layer_ids", "a list of integers")
    layer_ids = [as_count(k, "layer_ids", 0) for k in given]
    expected = (
        None if tokens is None else [as_tensor(tokens, "tokens", "integers").flatten().tolist()]
    )
    path = source
    if not isinstance(source, (str, Path)):
        params = _field(source, "kv_transfer_params")
        path = params.get("hidden_states_path") if isinstance(params, Mapping) else None
        if path is None:
            raise ValueError(
                "source: its kv_transfer_params name no hidden_states_path; start the engine with "
                'speculative_config={"method": "extract_hidden_states", …} and the '
                "ExampleHiddenStatesConnector"
            )
        request_id = _request_id(source) if request_id is None else request_id
        expected = expected or _vllm_tokens(source)
    file = as_path(path, "source")
    found = _read_tensors(file)
    states, ids = found["hidden_states"], as_integers(found["token_ids"].flatten(), "token_ids", 1)
    if states.dim() != 3 or not states.is_floating_point():
        raise ValueError(
            f"{file}: hidden_states is {states.dtype} {tuple(states.shape)}, expected floating "
            "[tokens, layers, hidden]"
        )
    short = as_flag(partial, "partial") and 0 < len(states) < len(ids)
    if len(states) != len(ids) and not short:
        raise ValueError(
            f"{file}: hidden_states of {len(states)} tokens, token_ids of {len(ids)}; run the "
            "engine with enable_prefix_caching=False and enable_chunked_prefill=False, or, for "
            "pool='last', read with partial=True"
        )
    if states.shape[1] != len(layer_ids):
        raise ValueError(
            f"layer_ids: {len(layer_ids)} ({named(list(layer_ids))}), but {file} has "
            f"{states.shape[1]} layers"
        )
    if expected is not None:
        _check_tokens(ids.tolist(), expected, file)
    layers = tuple(k - 1 if k else EMBEDDINGS for k in layer_ids)
    ids = ids[len(ids) - len(states) :]
    return ServedStates(request_id or file.stem, ids, states, layers, "pre", short)


def _read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, after whoever holds its `.lock` has let go of it."""
    lock = Path(f"{file}.lock")
    with open_regular(lock, follow=True) if lock.exists() else nullcontext() as held:
        if held is not None:
            fcntl.flock(held, fcntl.LOCK_SH)  # the engine writes under an exclusive lock
        if not file.exists():
            raise FileNotFoundError(f"{file}: no such file")
        found = unpacked(file, read_file(file, None, follow=True))
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
    has the last of them alone. Of a prompt whose beginning was in the prefix cache, as its
    `cached_tokens` say, they are those of the rest (`ServedStates.partial`).

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
        lists = "a list of token ids for each answer"
        prompts = [None] * len(response)
        prompts = prompts if prompt_ids is None else as_list(prompt_ids, "prompt_ids", lists)
        if len(prompts) != len(response):
            raise ValueError(f"prompt_ids: {len(prompts)} for {len(response)} answers")
        return [_sglang(one, ids) for one, ids in zip(response, prompts, strict=True)]
    return _sglang(response, prompt_ids)


def _sglang(response: Any, prompt_ids: Any) -> ServedStates:
    meta = _field(response, "meta_info")
    found: Any = meta.get("hidden_states") if isinstance(meta, Mapping) else None
    if (
        not hasattr(found, "__getitem__")
        or isinstance(found, (str, bytes, Mapping))
        or not _len(found)
    ):
        raise ValueError(
            "response: no hidden_states in its meta_info; start the engine with "
            "enable_return_hidden_states=True and ask with return_hidden_states=True"
        )
    name = _request_id(response)
    states = _blocks(found, name)
    prompt, made = (_count(meta, what, name) for what in ("prompt_tokens", "completion_tokens"))
    fed = prompt + max(made - 1, 0)
    last_alone = len(states) == 1 and fed > 1 and _len(found) == 1
    one = torch.as_tensor(found[0]).dim() == 1 if last_alone else False
    cached = meta.get("cached_tokens")
    short = type(cached) is int and 0 < cached < fed and len(states) == fed - cached
    if not one and not short and len(states) != fed:
        raise ValueError(
            f"request {name!r}: states of {len(states)} tokens, expected {fed} ({prompt} of the "
            f"prompt and {max(made - 1, 0)} generated)"
            + (f"; {cached} came from the prefix cache" if type(cached) is int and cached else "")
            + ": run the engine with disable_radix_cache=True and chunked_prefill_size=-1"
        )
    ids = _sglang_tokens(response, prompt_ids, prompt, made, name)
    return ServedStates(name, ids[fed - len(states) :], states[:, None], (FINAL,), "post", short)


def _count(meta: Mapping[str, Any], what: str, name: str) -> int:
    found = meta.get(what)
    if type(found) is not int or not 0 <= found <= LONGEST:
        raise ValueError(
            f"request {name!r}: its meta_info has no number of {what} to {LONGEST}, but "
            f"{shown(found)}"
        )
    return found


def _blocks(blocks: Any, name: str) -> Tensor:
    """[T, D] of a list of [t, D] and [D]."""
    parts = []
    for number, block in enumerate(blocks):
        try:
            part = as_tensor(block, "block", "numbers [tokens, width]")
        except TypeError as error:
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
    parts = []
    for what, given, number in (("prompt_ids", prompt_ids, prompt), ("output_ids", out, made)):
        ids = torch.full((number,), -1) if given is None else as_integers(given, what, 1)
        if len(ids) != number:
            raise ValueError(
                f"request {name!r}: {len(ids)} {what}, but its meta_info counts {number} tokens"
            )
        parts.append(ids)
    return torch.cat([parts[0], parts[1][:-1]])


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
    requests = as_list(requests, "requests", "a list of ids or outputs")
    states = as_list(states, "states", "a list of ServedStates")
    if wrong := [one for one in states if not isinstance(one, ServedStates)]:
        raise TypeError(f"states: expected a list of ServedStates, got {shown(wrong[0])} in it")
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


def _len(blocks: Any) -> int:
    """The blocks of an answer; 0 of what has none."""
    try:
        return len(blocks)
    except (TypeError, RuntimeError):  # of a tensor without dimensions, or nested
        return 0


def _request_id(output: Any) -> str:
    meta = _field(output, "meta_info")
    for source, name in ((output, "request_id"), (output, "id"), (meta, "id")):
        found = None if source is None else _field(source, name)
        if found is not None:
            return found if isinstance(found, str) else shown(found)
    raise ValueError(f"requests: no request_id or id in {shown(output)}")
