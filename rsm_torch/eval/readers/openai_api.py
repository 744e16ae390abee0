"""A reader behind an OpenAI-compatible API: OpenAI's own, or any server's."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rsm_torch.eval.readers.prices import Price, as_price
from rsm_torch.eval.readers.protocol import Answer, Failure, Prompt
from rsm_torch.eval.readers.reply_cache import ReplyCache, content_key

# Of what a server may be asked: least and most. Below a millisecond no answer comes, and beyond
# the others a machine runs out of sockets or a person of patience.
LIMITS = {
    "timeout": (0.001, 86_400),
    "time_limit": (0.001, 86_400),
    "retries": (0, 100),
    "concurrency": (1, 1024),
}
KEY_VARIABLE = "OPENAI_API_KEY"
BASE_VARIABLE = "OPENAI_BASE_URL"


class OpenAIReader:
    """Asks a chat completions endpoint, several prompts at a time.

    Args:
        model: the server's name for the model.
        base_url: of the server, such as "http://127.0.0.1:8000/v1"; by default $OPENAI_BASE_URL,
            else OpenAI's own.
        api_key: by default $OPENAI_API_KEY. A local server takes any that is not empty.
        concurrency: prompts under way at once.
        retries: further tries after a connection failure, a time-out or status 408, 409, 429 and
            5xx, with the client's exponential backoff; what the server says in Retry-After counts.
        timeout: seconds for one try.
        time_limit: seconds for one prompt, all its tries and waits together.
        temperature: None leaves it out, for models that refuse it.
        max_tokens: the most tokens of an answer where the prompt does not say.
        params: further parameters of the request, such as {"seed": 0}.
        prices: model to `Price`; only that of `model` is used.
        cache: file of answers already given, by a hash of server, model, messages and parameters.
            None keeps them for the life of this object.

    Raises:
        ValueError: no key, no URL, or a number out of its range; before anything is asked.
        ImportError: the `openai` client is not installed.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        concurrency: int = 8,
        retries: int = 4,
        timeout: float = 60.0,
        time_limit: float = 300.0,
        temperature: float | None = 0.0,
        max_tokens: int = 256,
        params: Mapping[str, Any] | None = None,
        prices: Mapping[str, Price | Mapping[str, float]] | None = None,
        cache: str | Path | None = None,
    ):
        _check(model, concurrency, retries, timeout, time_limit, max_tokens)
        self.name, self.model = f"openai:{model}", model
        self.base_url = _url(base_url or os.environ.get(BASE_VARIABLE) or None)
        self._key = _key(api_key, self.base_url)
        self.concurrency, self.retries = concurrency, retries
        self.timeout, self.time_limit = timeout, time_limit
        self.temperature, self.max_tokens = temperature, max_tokens
        self.params = dict(params or {})
        price = (prices or {}).get(model)
        self.price = None if price is None else as_price(model, price)
        self.cache = ReplyCache(cache)
        _client_library()

    def describe(self) -> Mapping[str, Any]:
        asked = self._request(Prompt(messages=()))
        del asked["messages"]
        return {"reader": self.name, "base_url": self.base_url or "default", "request": asked}

    def answer(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """One answer for each prompt, in their order; equal prompts are asked once."""
        requests = [self._request(prompt) for prompt in prompts]
        keys = [content_key([self.base_url, request]) for request in requests]
        fresh = {
            key: request
            for key, request in zip(keys, requests, strict=True)
            if self.cache.get(key) is None
        }
        given = _finish(self._ask_all(fresh)) if fresh else {}
        answers = []
        for key in keys:
            answers.append(given.get(key) or self._cached(key))
            if key in given and given[key].text is not None:
                del given[key]  # the same prompt once more is not paid for again
        return answers

    def forget(self, prompts: Sequence[Prompt]) -> None:
        """Ask these anew the next time: their answers were of no use."""
        for prompt in prompts:
            self.cache.forget(content_key([self.base_url, self._request(prompt)]))

    def _request(self, prompt: Prompt) -> dict[str, Any]:
        # OpenAI's newer models refuse max_tokens, and few other servers know the newer name.
        limit = "max_tokens" if self.base_url else "max_completion_tokens"
        request: dict[str, Any] = {
            "model": self.model,
            "messages": prompt.sent(),
            limit: prompt.max_tokens or self.max_tokens,
            **self.params,
        }
        if self.temperature is not None:
            request.setdefault("temperature", self.temperature)
        return request

    def _cached(self, key: str) -> Answer:
        record = self.cache.get(key) or {}
        tokens = record.get("prompt_tokens"), record.get("completion_tokens")
        return Answer(record["text"], *tokens, cost=0.0 if self.price else None, cached=True)

    def _cost(self, prompt_tokens: int | None, completion_tokens: int | None) -> float | None:
        return self.price.of(prompt_tokens, completion_tokens) if self.price else None

    async def _ask_all(self, requests: Mapping[str, dict[str, Any]]) -> dict[str, Answer]:
        turns = asyncio.Semaphore(self.concurrency)
        async with _client_library().AsyncOpenAI(
            api_key=self._key,
            base_url=self.base_url,
            timeout=self.timeout,
            max_retries=self.retries,
        ) as client:

            async def one(key: str, request: dict[str, Any]) -> Answer:
                async with turns:
                    return await self._ask(client, key, request)

            answers = await asyncio.gather(*(one(*pair) for pair in requests.items()))
        return dict(zip(requests, answers, strict=True))

    async def _ask(self, client: Any, key: str, request: dict[str, Any]) -> Answer:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self.time_limit):
                reply = await client.chat.completions.create(**request)
            text, tokens = _text(reply), _usage(reply)
        except TimeoutError:
            why = Failure("TimeLimit", f"no answer within {self.time_limit:g} s, retries included")
        except _client_library().APIConnectionError as error:  # it says neither to what nor why
            cause = f" ({_one_line(error.__cause__)})" if error.__cause__ else ""
            message = f"{client.base_url}: {_one_line(error)}{cause}"
            why = Failure(type(error).__name__, message)
        except _client_library().OpenAIError as error:
            why = Failure(type(error).__name__, _one_line(error))
        except ValueError as error:  # what came is no JSON, or not a chat completion
            why = Failure("UnreadableReply", _one_line(error))
        else:
            self.cache.put(
                key, {"text": text, "prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
            )
            spent = time.perf_counter() - began
            return Answer(text, *tokens, seconds=spent, cost=self._cost(*tokens))
        return Answer(None, seconds=time.perf_counter() - began, error=why)


def check_limits(given: Mapping[str, float]) -> None:
    """Refuse a limit outside its range.

    Raises:
        ValueError: the message names it.
    """
    for name, value in given.items():
        least, most = LIMITS[name]
        if not least <= value <= most:
            unit = " seconds" if name in ("timeout", "time_limit") else ""
            got = f"{value:g}" if isinstance(value, float) else value
            raise ValueError(f"{name}: expected {least} to {most}{unit}, got {got}")


def _finish(work: Coroutine[Any, Any, dict[str, Answer]]) -> dict[str, Answer]:
    """Runs to the end, also where an event loop is running already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def _text(reply: Any) -> str:
    choices = getattr(reply, "choices", None)
    message = getattr(choices[0], "message", None) if choices else None
    text = getattr(message, "content", None)
    if not isinstance(text, str):
        why = getattr(choices[0], "finish_reason", None) if choices else None
        raise ValueError(
            f"the reply holds no text{f' (finish_reason {why!r})' if why else ''}: {reply!r:.200}"
        )
    return text


def _usage(reply: Any) -> tuple[int | None, int | None]:
    usage = getattr(reply, "usage", None)
    return getattr(usage, "prompt_tokens", None), getattr(usage, "completion_tokens", None)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _client_library() -> Any:
    try:
        import openai
    except ImportError as error:
        raise ImportError(
            "reader: openai:MODEL needs the openai client; pip install 'rsm-torch[eval]'"
        ) from error
    return openai


def _key(given: str | None, base_url: str | None) -> str:
    key = (given or os.environ.get(KEY_VARIABLE) or "").strip()
    if not key:
        remedy = "any word will do for a server that checks none" if base_url else "your key"
        raise ValueError(
            f"reader: openai:MODEL needs a key and {KEY_VARIABLE} is not set; set it ({remedy}), "
            "or use --reader none"
        )
    return key


def _url(given: str | None) -> str | None:
    if given is not None and not given.startswith(("http://", "https://")):
        raise ValueError(
            f"reader: expected a base URL such as http://127.0.0.1:8000/v1, got {given!r}; it is "
            f"{BASE_VARIABLE} where nothing else is given"
        )
    return given


def _check(
    model: str, concurrency: int, retries: int, timeout: float, time_limit: float, max_tokens: int
) -> None:
    if not model.strip():
        raise ValueError("reader: expected a model after 'openai:', got nothing")
    if max_tokens < 1:
        raise ValueError(f"max_tokens: expected at least 1, got {max_tokens}")
    check_limits(
        {"timeout": timeout, "time_limit": time_limit, "retries": retries,
         "concurrency": concurrency}
    )  # fmt: skip
