"""A tiny causal language model and a stub of an OpenAI-compatible server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WINDOW = 512


@cache
def tiny_tokenizer() -> Any:
    """Bytes, a few merges, and the tokens of a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(["the answer is in the memory of the agent"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", pad_token="<|end|>")


@cache
def tiny_llama(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer()), hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=WINDOW, bos_token_id=None, eos_token_id=0, pad_token_id=0,
        initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


class Reply:
    """What the stub answers: a body (JSON unless bytes), after a wait."""

    def __init__(self, body: Any, status: int = 200, wait: float = 0.0, **headers: str):
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.status, self.wait, self.headers = status, wait, headers


def completion(text: str | None, prompt_tokens: int = 10, completion_tokens: int = 2) -> dict:
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "stub",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": text},
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


class Stub:
    """A running stub: its base URL, and the requests it got."""

    def __init__(self, answer: Callable[[dict, int], Reply]):
        self.answer, self.requests = answer, []
        self.under_way = self.most_at_once = 0
        self.lock, self.closing = threading.Lock(), threading.Event()
        self.url = ""

    def take(self, body: dict) -> int:
        with self.lock:
            self.requests.append(body)
            self.under_way += 1
            self.most_at_once = max(self.most_at_once, self.under_way)
            return len(self.requests)

    def done(self) -> None:
        with self.lock:
            self.under_way -= 1


@contextmanager
def stub_server(answer: Callable[[dict, int], Reply]) -> Iterator[Stub]:
    """A server that answers request number n (from 1) with `answer(body, n)`."""
    stub = Stub(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            body = json.loads(self.rfile.read(length))
            body["authorization"], body["path"] = self.headers["Authorization"], self.path
            number = stub.take(body)
            try:
                reply = stub.answer(body, number)
                stub.closing.wait(reply.wait)
                self._send(reply)
            finally:
                stub.done()

        def _send(self, reply: Reply) -> None:
            try:
                self.send_response(reply.status)
                self.send_header("Content-Type", "application/json")
                for name, value in reply.headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(reply.body)))
                self.end_headers()
                self.wfile.write(reply.body)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # the client had waited long enough

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield stub
    finally:
        stub.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
