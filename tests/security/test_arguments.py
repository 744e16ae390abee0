"""Wrong arguments of every public verb: one TypeError or ValueError of ours, and nothing changed."""

from __future__ import annotations

import traceback
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hidden_memory_support import EXAMPLES, TEXTS, Letters, memory
from hidden_memory_support import same as same_hidden
from hidden_memory_support import whole as hidden_state
from hidden_support import WIDTH, llama
from memory_support import D, chunks, filled, same, state

from rsm_torch import Calibration, RSMConfig, StreamMemory, calibrate_tau
from rsm_torch.hidden import (
    HiddenStateMemory,
    ServedStates,
    activations,
    capture,
    load_causal_lm,
)
from rsm_torch.integrations.engines import match_requests, read_sglang, read_vllm

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of odd tensors


def wrong_values() -> list[Any]:
    """None of these is right anywhere, or it is and does no harm."""
    rows = torch.ones(3, 2, D)
    return [
        None, True, 0, -1, 2**40, 2**62, 2**64, 10**400, 10**5000, 1.5, float("nan"), float("inf"),
        "x", "", b"x", "cpu" * 99, [], [0, 0], [[0], [0, 1]], ["x"], [None], [10**400], [[[[1]]]], {},
        {"a": 1}, object(), int, range(3), Fraction(1, 3), Decimal("0.5"),
        np.zeros(3), np.int64(2**62), np.array([2**63], dtype=np.uint64), np.array(1),
        torch.zeros(0), torch.tensor(1), torch.tensor([2**62]), torch.tensor([-1]), torch.tensor([True]),
        torch.tensor([[0]]), torch.tensor([0]).to_sparse(), torch.empty(1, device="meta").long(),
        torch.ones(2, 3, D), rows * float("nan"), rows.to(torch.complex64), rows.to_sparse(), rows.long(),
        torch.empty(3, 2, D, device="meta"), rows.to(torch.float8_e4m3fn), rows[..., :5],
        torch.quantize_per_tensor(rows, 1.0, 0, torch.quint8), torch.nested.nested_tensor([rows[0]] * 3),
        [torch.tensor([1.0]), torch.tensor([1.0, 2])],
    ]  # fmt: skip


PATHS = ("path", "folder", "source", "spec", "layer_ids", "tokens")  # or beside one, so looked up


def refuses(name: str, argument: str, call) -> None:
    """Nothing but an error of ours, which says what of, or a call that is right after all."""
    try:
        call()
    except (TypeError, ValueError, KeyError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1].filename
        wrong = None if "rsm_torch" in where and ":" in str(error) else error
    except OSError as error:
        wrong = None if argument in PATHS or "too long" in str(error) else error
    else:
        wrong = None
    assert wrong is None, f"{name}({argument}=): raw {wrong!r}"


X, Q = chunks(3, 2), chunks(3, 1)[:, 0]
CONFIG = RSMConfig(D, tau=0.75)
GIVEN = {"tau": 0.5, "quantile": 0.5, "examples": 3}


def constructors():
    for field in RSMConfig.__dataclass_fields__:
        yield "RSMConfig", field, lambda v, field=field: RSMConfig(**{"dim": D} | {field: v})
    yield "RSMConfig.from_dict", "config", RSMConfig.from_dict
    for field in Calibration.__dataclass_fields__:
        for make in (lambda of: Calibration(**of), Calibration.from_dict):
            yield "Calibration", field, lambda v, field=field, make=make: make(GIVEN | {field: v})
    yield "Calibration.from_dict", "calibration", Calibration.from_dict
    yield "Calibration.load", "path", Calibration.load
    good: dict[str, Any] = {"x": torch.randn(9, 5)}
    for name in ("x", "quantile", "sample", "generator", "remove_mean", "remove_directions", "embedder",
                 "groups"):  # fmt: skip
        yield "calibrate_tau", name, lambda v, name=name: calibrate_tau(**good | {name: v})
    for name in ("config", "streams", "device", "backend", "calibration"):
        yield (
            "StreamMemory",
            name,
            lambda v, name=name: StreamMemory(**{"config": CONFIG} | {name: v}),
        )
    yield "StreamMemory.from_pretrained", "path", StreamMemory.from_pretrained


@pytest.mark.parametrize(
    ("name", "argument", "call"), [pytest.param(*c, id=f"{c[0]}-{c[1]}") for c in constructors()]
)
def test_constructors(name, argument, call):
    for value in wrong_values():
        refuses(name, argument, partial(call, value))


VERBS: dict[str, dict[str, Any]] = {
    "write": {"x": X, "streams": None, "lengths": None, "times": None, "labels": None, "ids": None,
              "check": True},
    "assign": {"x": X, "atoms": torch.zeros(3, 2, dtype=torch.int64), "streams": None,
               "lengths": None, "times": None, "labels": None, "ids": None},
    "search": {"q": Q, "streams": None, "top_atoms": 5, "top_k": 5, "atom_score": "v1",
               "chunk_score": "cosine", "check": True},
    "forget": {"ids": [0], "streams": None},
    "touch": {"ids": [0], "streams": None},
    "compact": {"streams": None, "max_atoms": 9, "max_members": None, "ttl": None, "policy": "merge",
                "members": None},
    "reset": {"streams": [0]},
    "reserve": {"chunks": 1, "atoms": None, "streams": None},
    "fork": {"src": 0, "dst": 1},
    "extract": {"streams": [0]},
    "absorb": {"source": None, "into": None},
    "members": {"stream": 0},
    "atom_labels": {"stream": 0},
    "counts": {"streams": None},
    "commit": {"plan": None},
}  # fmt: skip


@pytest.mark.parametrize("kept", ["full", "coefficients", "none"])
@pytest.mark.parametrize("verb", VERBS)
def test_verbs_of_a_stream_memory(verb, kept, tmp_path):
    good = VERBS[verb]
    for argument in good:
        target = filled(members=kept)
        before = state(target)
        for value in wrong_values():
            done = []

            def call(argument=argument, value=value, target=target, done=done):
                getattr(target, verb)(**good | {argument: value})
                done.append(True)

            refuses(verb, argument, call)
            if done:
                target = filled(members=kept)
            else:
                assert same(before, state(target)), (
                    f"{verb}({argument}={value!r:.40}) changed something"
                )


@pytest.mark.parametrize("value", [None, 1, b"x", "", "a\x00b", [], int], ids=repr)
def test_paths(value):
    kept = memory(model=MODEL)
    takers = [
        filled().save_pretrained, StreamMemory.from_pretrained, filled().absorb,
        Calibration(0.5, 0.5, 3).save, Calibration.load, kept.save_pretrained,
        lambda path: HiddenStateMemory.from_pretrained(path, MODEL, Letters()),
    ]  # fmt: skip
    if value is not None:
        takers.append(lambda path: activations(MODEL, Letters(), ["a"], 1, "mean", cache=path))
    for take in takers:
        with pytest.raises(
            (TypeError, ValueError), match=r"^(path|folder|cache|source): expected a (path|memory)"
        ):
            take(value)


# -- hidden states ---------------------------------------------------------------------------------

MODEL = llama()
IDS = torch.ones(2, 3, dtype=torch.int64)
ONE = ServedStates("a", torch.tensor([1, 2]), torch.randn(2, 1, WIDTH), (2,), "pre")


def answer(**changes: Any) -> dict[str, Any]:
    meta = {"hidden_states": [[[1.0, 2.0]]], "prompt_tokens": 1, "completion_tokens": 1, "id": "x"}
    return {"meta_info": meta | changes}


def generated(**more: Any) -> None:
    with memory(model=MODEL).while_generating(**more):
        MODEL.generate(
            input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=2, do_sample=False
        )


def captured(**more: Any) -> None:
    with capture(**more) as acts:
        acts.run(input_ids=IDS)


MADE = {
    "model": MODEL, "tokenizer": Letters(), "layer": 2, "pool": "mean", "norm": None,
    "config": None, "calibration": None, "max_atoms": 3, "streams": 1, "device": None,
    "batch_size": 2, "max_length": None, "cache": None, "keep_texts": False,
}  # fmt: skip
FUNCTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "HiddenStateMemory": (HiddenStateMemory, MADE),
    "capture": (captured, {"model": MODEL, "layers": 1, "pool": "mean", "mask": None, "span": None,
                           "norm": "pre", "stop": False, "check": True}),
    "activations": (activations, {"model": MODEL, "tokenizer": Letters(), "texts": ["ab"], "layers": 1,
                                  "pools": "mean", "max_length": None, "batch_size": 2,
                                  "progress": None}),
    "while_generating": (generated, {"streams": None, "every": None, "prompt": True, "labels": None,
                                     "ends": None, "check": True}),
    "read_vllm": (read_vllm, {"source": "/no/such/file", "layer_ids": [1], "tokens": None}),
    "read_sglang": (read_sglang, {"response": None, "prompt_ids": None}),
    "read_sglang meta": (lambda **meta: read_sglang(answer(**meta)), answer()["meta_info"]),
    "match_requests": (match_requests, {"requests": ["a"], "states": [ONE]}),
    "load_causal_lm": (load_causal_lm, {"spec": "/no/such/folder", "device": "cpu"}),
    "pool": (ONE.pool, {"layer": 2, "pool": "mean"}),
}  # fmt: skip
USERS_OWN = (
    "tokenizer",
    "layers",
    "progress",
    "pool",
)  # a callable of the user's may raise what it likes


@pytest.mark.parametrize(
    ("name", "argument"), [(n, a) for n, (_, good) in FUNCTIONS.items() for a in good]
)
def test_functions_of_hidden_states(name, argument):
    call, good = FUNCTIONS[name]
    for value in wrong_values():
        if argument in USERS_OWN and callable(value):
            continue
        if argument == "spec" and isinstance(value, str):
            continue  # a model that might be there
        refuses(name, argument, lambda value=value: call(**good | {argument: value}))


HIDDEN: dict[str, dict[str, Any]] = {
    "write": {"texts": TEXTS, "streams": None, "labels": None, "times": None, "ids": None},
    "recall": {"texts": TEXTS, "streams": None, "top_k": 5, "top_atoms": 5, "atom_score": "v1",
               "chunk_score": "cosine"},
    "write_states": {"states": torch.randn(3, 2, WIDTH), "streams": None, "lengths": None,
                     "labels": None, "times": None, "ids": None, "layer": 2, "norm": "pre"},
    "recall_states": {"states": torch.randn(3, WIDTH), "streams": None, "layer": 2, "norm": "pre",
                      "top_k": 5},
    "write_served": {"served": [ONE], "streams": None, "labels": None, "times": None, "ids": None},
    "forget": {"ids": [0], "streams": None},
    "reset": {"streams": [0]},
    "counts": {"streams": None},
}  # fmt: skip
WITH_IDS: dict[str, dict[str, Any]] = {
    "write": {"input_ids": IDS, "attention_mask": None, "streams": None},
    "recall": {"input_ids": IDS, "attention_mask": None},
}
CALIBRATE = {"quantile": 1.0, "remove_mean": True, "remove_directions": 2, "sample": 50}


@pytest.mark.parametrize(
    ("verb", "good"),
    [*HIDDEN.items(), *WITH_IDS.items(), ("calibrate", {"texts": EXAMPLES} | CALIBRATE),
     ("calibrate", {"input_ids": IDS.repeat(9, 1), "attention_mask": None} | CALIBRATE)],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)  # fmt: skip
def test_verbs_of_a_hidden_state_memory(verb, good):
    for argument in good:
        target = memory(model=MODEL, keep_texts=True)
        target.write(["one"], labels=["a"])
        if verb == "calibrate":
            target = memory(model=MODEL)
        before = hidden_state(target)
        for value in wrong_values():
            done = []

            def call(argument=argument, value=value, target=target, done=done):
                getattr(target, verb)(**good | {argument: value})
                done.append(True)

            refuses(verb, argument, call)
            if not done:
                assert same_hidden(before, hidden_state(target)), (
                    f"{verb}({argument}={value!r:.40})"
                )
            elif verb != "calibrate":
                target = memory(model=MODEL, keep_texts=True)
                target.write(["one"], labels=["a"])
                before = hidden_state(target)
            else:
                target = memory(model=MODEL)


def test_nothing_was_left_in_the_working_folder():
    assert not Path("x").exists()


# -- what was said of some of them ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: RSMConfig(4, tau=10**400), ValueError, "tau: expected a finite number, got 1000"),
        (lambda: RSMConfig(4, max_atoms=10**5000), ValueError, "max_atoms: expected an int from 1 to "
         "4611686018427387904, got a int too long to show"),
        (lambda: RSMConfig(4, ttl=float("inf")), ValueError, "ttl: expected a finite number, got inf"),
        (lambda: RSMConfig(2**24 + 1), ValueError, "dim: expected an int from 1 to 16777216"),
        (lambda: RSMConfig.from_dict({}), ValueError, "config: no dim, the width"),
        (lambda: StreamMemory(CONFIG, calibration=1), TypeError,
         "calibration: expected a Calibration, got int"),
        (lambda: StreamMemory(CONFIG, device="meta"), ValueError, "device: expected one that holds values"),
        (lambda: StreamMemory(CONFIG, streams=2**40), ValueError, "streams: expected an int from 1 to"),
        (lambda: calibrate_tau(torch.randn(9, 3), groups=[0] * 8), ValueError,
         "groups: expected one for each of 9 examples, got 8"),
        (lambda: filled().search(Q, top_k=2**40), ValueError, "top_k: expected an int from 1 to 16777216"),
        (lambda: filled().reserve(None), TypeError, "chunks: expected an int of at least 0, got None"),
        (lambda: filled().reserve(2**62), ValueError, "chunks: expected an int from 0 to 2147483647"),
        (lambda: filled().write(X.to_sparse()), TypeError, "x: expected a dense tensor with values"),
        (lambda: filled().write(X, labels=[[1], [1, 2]]), TypeError, "labels: expected numbers, got"),
        (lambda: HiddenStateMemory(None, Letters()), TypeError,
         r"model: expected a torch\.nn\.Module, got None"),
        (lambda: HiddenStateMemory(MODEL, 3, layer=2), TypeError, "tokenizer: expected a tokenizer or None"),
        (lambda: memory(model=MODEL).write(torch.tensor(1)), TypeError, "texts: expected a list of strings"),
        (lambda: read_sglang(answer(completion_tokens=2**40)), ValueError,
         "request 'x': its meta_info has no number of completion_tokens to 4194304"),
    ],
)  # fmt: skip
def test_messages_name_argument_value_and_what_was_wanted(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_what_is_right_after_all():
    assert calibrate_tau(torch.randn(9, 3), groups=[0] * 9).examples == 9
    assert StreamMemory(RSMConfig(np.int64(D)), np.int32(2)).streams == 2
    written = memory(model=MODEL).write(
        ("a", "b"), streams=torch.tensor([0, 1]), labels=np.array([1, 2])
    )
    assert written.ids.tolist() == [0, 1]
