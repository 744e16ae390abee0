"""Conversations and trajectories as other programs write them, as turns (see `plain`).

| written by | a record | a turn |
|---|---|---|
| OpenAI's fine-tuning files, and others | `messages`, also under `conversation` or `traj` (tau-bench) | a message |
| ChatGPT's export | `mapping`, a tree of messages | one on the way from `current_node` up to the root |
| Claude's export | `chat_messages` | a message: `sender`, `content` or `text`, `created_at` |
| ShareGPT | `conversations` | `from`, `value` |
| SWE-agent | `trajectory` | a step: thought, action, observation |
| tau2-bench | `simulations`, each with `messages` | a message |
| OpenHands | an event, one record each | what was said, done or seen |

Each conversation is a stream of its own, named by its title and id, or by its place in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rsm_torch.eval.datasets.episode import DatasetError
from rsm_torch.eval.datasets.fields import optional, required

Turns = Iterator[tuple[str, Any]]  # the place of a turn, and its fields
MESSAGES = ("messages", "conversation", "traj")
SAID_IN = ("content", "thought", "command", "code", "path", "url")  # OpenHands' arguments


def turns_of(record: Any, place: str, number: int) -> Turns | None:
    """The turns of a conversation or trajectory; None of what is none.

    Args:
        place: of the record in its file, for errors.
        number: of the record in its file, from 1.

    Raises:
        DatasetError: while turns are read: a field is missing or of another kind.
    """
    if not isinstance(record, dict):
        return None
    return next((read(record, place, number) for kind, read in KINDS if kind(record)), None)


def _messages(record: dict[str, Any], place: str, number: int) -> Turns:
    field = next(name for name in MESSAGES if isinstance(record.get(name), list))
    stream = _name(record, number, "id", "task_id", "trial")
    for at, message in enumerate(record[field]):
        yield _turn(message, f"{place}, {field}[{at}]", stream)


def _sharegpt(record: dict[str, Any], place: str, number: int) -> Turns:
    stream, roles = _name(record, number, "id"), {"human": "user", "gpt": "assistant"}
    for at, message in enumerate(record["conversations"]):
        where = f"{place}, conversations[{at}]"
        role = required(message, "from", str, where)
        said = required(message, "value", str, where)
        yield where, {"role": roles.get(role, role), "text": said, "stream": stream}


def _chatgpt(record: dict[str, Any], place: str, number: int) -> Turns:
    stream = _name(record, number, "title", "conversation_id", "id")
    nodes, at = record["mapping"], required(record, "current_node", str, place)
    path: list[tuple[str, Any]] = []
    while at is not None:
        where = f"{place}, mapping[{at!r:.60}]"
        if len(path) > len(nodes):
            raise DatasetError(f"{where}: its parents go round in a circle")
        if not isinstance(at, str) or not isinstance(nodes.get(at), dict):
            raise DatasetError(f"{where}: no such message, though another names it")
        path.append((where, nodes[at].get("message")))
        at = nodes[at].get("parent")
    for where, message in reversed(path):
        if message is None:  # the root
            continue
        author, about = (optional(message, name, dict, where) for name in ("author", "metadata"))
        if about.get("is_visually_hidden_from_conversation"):
            continue
        content = optional(message, "content", dict, where)
        said = content.get("parts") or content.get("text")
        turn = {"role": author.get("role"), "content": said, "time": message.get("create_time")}
        yield where, {**turn, "id": message.get("id"), "stream": stream}


def _claude(record: dict[str, Any], place: str, number: int) -> Turns:
    stream = _name(record, number, "name", "uuid")
    for at, message in enumerate(record["chat_messages"]):
        where = f"{place}, chat_messages[{at}]"
        role = required(message, "sender", str, where)
        said = message.get("content") or message.get("text")
        turn = {"role": "user" if role == "human" else role, "content": said, "stream": stream}
        yield where, {**turn, "time": message.get("created_at"), "id": message.get("uuid")}


def _swe_agent(record: dict[str, Any], place: str, number: int) -> Turns:
    stream = _name(record, number, "instance_id", "environment")
    for at, step in enumerate(record["trajectory"]):
        where = f"{place}, trajectory[{at}]"
        parts = [
            (head, optional(step, name, str, where).strip())
            for head, name in (("", "thought"), ("Action: ", "action"), ("Observation: ", "observation"))
        ]  # fmt: skip
        said = "\n".join(f"{head}{text}" for head, text in parts if text)
        yield where, {"text": said, "step": at + 1, "stream": stream}


def _tau2(record: dict[str, Any], place: str, number: int) -> Turns:
    for at, one in enumerate(record["simulations"]):
        where = f"{place}, simulations[{at}]"
        messages = required(one, "messages", list, where)
        stream = _name(one, at + 1, "task_id", "id")
        for n, message in enumerate(messages):
            yield _turn(message, f"{where}, messages[{n}]", stream)


def _openhands(record: dict[str, Any], place: str, number: int) -> Turns:
    done = record.get("action") or record.get("observation")
    given = optional(record, "args", dict, place)
    said = [record.get("content"), *(given.get(name) for name in SAID_IN)]
    parts = list(dict.fromkeys(text.strip() for text in said if isinstance(text, str)))
    if not any(parts):
        parts = [optional(record, "message", str, place)]
    head = f"{'Action' if record.get('action') else 'Observation'}: {done}\n"
    text = "\n".join(part for part in parts if part)
    turn = {"text": text if done == "message" or not text else head + text}
    about = {
        "role": record.get("source"),
        "time": record.get("timestamp"),
        "step": record.get("id"),
    }
    yield place, {**turn, **about}


def _turn(message: Any, place: str, stream: str) -> tuple[str, Any]:
    return place, {**message, "stream": stream} if isinstance(message, dict) else message


def _name(record: dict[str, Any], number: int, *fields: str) -> str:
    """What names a conversation: the first of these fields with the others in brackets."""
    first, *others = [
        str(record[name]) for name in fields if record.get(name) not in (None, "")
    ] or [f"conversation {number}"]
    return f"{first} ({', '.join(others)})" if others else first


def _list(*names: str) -> Callable[[dict[str, Any]], bool]:
    return lambda record: any(isinstance(record.get(name), list) for name in names)


def _is_trajectory(record: dict[str, Any]) -> bool:
    steps = record.get("trajectory")
    return isinstance(steps, list) and all(
        isinstance(s, dict) and "thought" in s for s in steps[:1]
    )


def _is_event(record: dict[str, Any]) -> bool:
    return "source" in record and ("action" in record or "observation" in record)


KINDS: tuple[tuple[Callable[[dict[str, Any]], bool], Callable[[Any, str, int], Turns]], ...] = (
    (lambda record: isinstance(record.get("mapping"), dict), _chatgpt),
    (_list("chat_messages"), _claude),
    (_list("conversations"), _sharegpt),
    (_list("simulations"), _tau2),
    (_is_trajectory, _swe_agent),
    (_list(*MESSAGES), _messages),
    (_is_event, _openhands),
)  # fmt: skip
