"""Conversations and trajectories as other programs write them, and questions of one's own."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest

from rsm_torch.eval.datasets import DatasetError, detect, load

NODE = {"content_type": "text"}


def said(role, text, parent, **more):
    message = {
        "id": f"m-{text}",
        "author": {"role": role},
        "content": {**NODE, "parts": [text]},
        **more,
    }
    return {"message": message, "parent": parent, "children": []}


CHATGPT = {
    "title": "Trip", "conversation_id": "c1", "current_node": "n4",
    "mapping": {
        "n0": {"message": None, "parent": None, "children": ["n1"]},
        "n1": said("system", "hidden", "n0", metadata={"is_visually_hidden_from_conversation": True}),
        "n2": said("user", "Where to?", "n1", create_time=1700000000.5),
        "n3": said("assistant", "An answer that was asked again", "n2"),
        "n4": said("assistant", "Lyon", "n2", create_time=1700000001.0),
    },
}  # fmt: skip
CLAUDE = {
    "uuid": "u1", "name": "Trip",
    "chat_messages": [
        {"uuid": "a", "sender": "human", "text": "Where to?", "created_at": "2024-05-01T10:00:00Z"},
        {"uuid": "b", "sender": "assistant", "text": "",
         "content": [{"type": "text", "text": "Lyon"}]},
    ],
}  # fmt: skip
SHAREGPT = {"id": "s1", "conversations": [
    {"from": "human", "value": "Where to?"}, {"from": "gpt", "value": "Lyon"}]}  # fmt: skip
FINE_TUNING = {"messages": [
    {"role": "user", "content": "Where to?"}, {"role": "assistant", "content": "Lyon"}]}  # fmt: skip
TAU = {"task_id": 3, "trial": 0, "reward": 1.0, "info": {}, "traj": FINE_TUNING["messages"]}
TAU2 = {
    "tasks": [],
    "simulations": [{"id": "x", "task_id": "7", "messages": FINE_TUNING["messages"]}],
}
SWE = {
    "environment": "repo", "history": [], "info": {},
    "trajectory": [
        {"thought": "Where to?", "action": "ls", "observation": "a.py", "response": "…", "state": "{}"},
        {"thought": "Lyon", "action": "", "observation": None, "response": "…"},
    ],
}  # fmt: skip
OPENHANDS = [
    {"id": 0, "source": "user", "timestamp": "2025-01-01T00:00:00", "action": "message",
     "args": {"content": "Where to?"}, "message": "Where to?"},
    {"id": 1, "source": "agent", "action": "run", "args": {"command": "ls", "thought": "Lyon"}},
    {"id": 2, "source": "agent", "observation": "run", "content": "a.py", "extras": {}, "cause": 1},
    {"id": 3, "source": "environment", "observation": "agent_state_changed", "content": "",
     "message": "", "extras": {}},
]  # fmt: skip


def written(tmp_path, document, form, name="export.json"):
    file = tmp_path / name
    if form == "lines":
        records = document if isinstance(document, list) else [document]
        text = "".join(json.dumps(record) + "\n" for record in records)
    else:
        text = json.dumps(document, indent=2 if form == "many lines" else None)
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("form", ["one line", "many lines", "lines"])
@pytest.mark.parametrize(
    ("document", "stream", "turns"),
    [
        ([CHATGPT], "Trip (c1)", [("user", "Where to?"), ("assistant", "Lyon")]),
        (CHATGPT, "Trip (c1)", [("user", "Where to?"), ("assistant", "Lyon")]),
        ([CLAUDE], "Trip (u1)", [("user", "Where to?"), ("assistant", "Lyon")]),
        ([SHAREGPT], "s1", [("user", "Where to?"), ("assistant", "Lyon")]),
        (FINE_TUNING, "conversation 1", [("user", "Where to?"), ("assistant", "Lyon")]),
        ([TAU], "3 (0)", [("user", "Where to?"), ("assistant", "Lyon")]),
        (TAU2, "7 (x)", [("user", "Where to?"), ("assistant", "Lyon")]),
        (SWE, "repo", [(None, "Where to?\nAction: ls\nObservation: a.py"), (None, "Lyon")]),
        (OPENHANDS, "export", [
            ("user", "Where to?"), ("agent", "Action: run\nLyon\nls"), ("agent", "Observation: run\na.py")]),
    ],
    ids=["chatgpt", "one", "claude", "sharegpt", "fine-tuning", "tau", "tau2", "swe", "openhands"],
)  # fmt: skip
def test_exports(tmp_path, document, stream, turns, form):
    file = written(tmp_path, document, form)
    assert detect(file) == "turns"
    (episode,) = load(file)
    assert list(episode.streams) == [stream]
    assert [(item.role, item.text) for item in episode.streams[stream]] == turns


def test_times_ids_and_several_conversations(tmp_path):
    other = {**CHATGPT, "conversation_id": "c2"}
    (episode,) = load(written(tmp_path, [CHATGPT, other, CLAUDE], "one line"))
    assert list(episode.streams) == ["Trip (c1)", "Trip (c2)", "Trip (u1)"]
    first = episode.streams["Trip (c1)"][0]
    assert (first.time, first.step, first.metadata["id"]) == (1700000000.5, 1, "m-Where to?")
    assert episode.streams["Trip (u1)"][0].time == 1714557600.0
    (lines,) = load(written(tmp_path, [FINE_TUNING, FINE_TUNING], "lines", "a.jsonl"))
    assert list(lines.streams) == ["conversation 1", "conversation 2"]


def test_a_traj_file_is_read_whatever_its_name_says(tmp_path):
    (episode,) = load(written(tmp_path, SWE, "many lines", "django.traj"))
    assert [item.step for item in episode.streams["repo"]] == [1, 2]


def broken(**changed):
    return {**CHATGPT, "mapping": {**CHATGPT["mapping"], **changed}}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (broken(n2={"message": None, "parent": "gone"}), r"mapping\['gone'\]: no such message"),
        (broken(n2=said("user", "x", "n4")), "its parents go round in a circle"),
        ({**CHATGPT, "current_node": 3}, "field 'current_node' should be a string"),
        ({**CLAUDE, "chat_messages": [{"text": "x"}]}, r"chat_messages\[0\]: field 'sender' is missing"),
        ({**SHAREGPT, "conversations": ["x"]}, r"conversations\[0\]: expected an object"),
        ({**FINE_TUNING, "messages": ["x"]}, r"messages\[0\]: expected an object, got str"),
        ({**SWE, "trajectory": [{"thought": 3}]}, r"trajectory\[0\]: field 'thought' should be a string"),
        ({"messages": []}, "the file is empty"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_by_place(tmp_path, document, message):
    with pytest.raises(DatasetError, match=message):
        list(load(written(tmp_path, document, "one line"), "turns"))


def test_lines_that_begin_with_a_time_have_it(tmp_path):
    file = tmp_path / "run.log"
    file.write_text(
        "[2025-03-01 09:00:00] started\n  and more\n[2025-03-01T09:00:01,500] done\n[warn] odd\n"
        "[12/27/20, 18:51] Mia: hi\n"
    )
    (episode,) = load(file)
    assert [(item.time, item.text) for item in episode.streams["run"]] == [
        (1740819600.0, "started\n  and more"), (1740819601.5, "done"), (None, "[warn] odd"),
        (None, "[12/27/20, 18:51] Mia: hi"),
    ]  # fmt: skip


# -- questions of one's own ------------------------------------------------------------------------

OWN = [
    {"stream": "ada", "id": "a1", "text": "I live in Lyon."},
    {"stream": "ada", "id": 2, "text": "I like tea."},
    {"stream": "ada", "question": "Where?", "answer": "Lyon", "evidence": ["a1"], "category": "fact"},
    {"stream": "bob", "text": "Hello."},
    {"stream": "ada", "text": "  "},
    {"stream": "ada", "id": "a3", "text": "I moved to Lille."},
    {"stream": "ada", "question": "And now?", "answer": 5, "evidence": ["a3", 2], "id": "late", "time": 9},
]  # fmt: skip


def own(tmp_path, *more):
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in [*OWN, *more]))
    return file


def test_questions_see_what_stands_above_them(tmp_path):
    (episode,) = load(own(tmp_path))
    first, second = episode.questions
    assert (first.text, first.reference, first.evidence, first.after) == (
        "Where?",
        "Lyon",
        ("a1",),
        2,
    )
    assert (first.id, first.category, first.stream) == ("q1", "fact", "ada")
    assert (second.reference, second.evidence, second.after) == ("5", ("a3", "2"), 3)
    assert (second.id, second.time) == ("late", 9)
    assert episode.evidence_key == "id"
    assert [item.text for item in episode.streams["ada"]][-1] == "I moved to Lille."


def test_episodes_part_a_file(tmp_path):
    file = tmp_path / "own.jsonl"
    records = [{**record, "episode": f"e{n}"} for n in range(2) for record in OWN]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert [(e.id, len(e.questions)) for e in load(file)] == [("e0", 2), ("e1", 2)]
    assert [e.id for e in load(file, episode="e1")] == ["e1"]
    assert "episode" not in next(load(file)).streams["ada"][0].metadata


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"stream": "cat", "question": "Who?"}, "line 8: it is asked of stream 'cat', of which there is no"),
        ({"stream": "bob", "question": "Who?", "evidence": ["a1"]}, "line 8: evidence 'a1' is the id of no"),
        ({"stream": "ada", "question": "Who?", "evidence": "a1"}, "line 8: field 'evidence' should be a list"),
        ({"stream": "ada", "question": "Who?", "evidence": [1.5]}, "line 8: field 'evidence' should be ids"),
        ({"stream": "ada", "question": "Who?", "id": "q1"}, "line 8: question 'q1' is there already: .*line 3"),
        ({"stream": "ada", "question": " "}, "line 8: field 'question' should be a question"),
        ({"stream": "ada", "question": 3}, "line 8: field 'question' should be a string"),
    ],
)  # fmt: skip
def test_a_wrong_question_is_told_by_file_and_line(tmp_path, record, message):
    with pytest.raises(DatasetError, match=rf"own\.jsonl, {message}"):
        list(load(own(tmp_path, record)))


# -- damage ----------------------------------------------------------------------------------------

FILES = {
    "chatgpt": [CHATGPT], "claude": [CLAUDE], "sharegpt": [SHAREGPT], "messages": [FINE_TUNING],
    "tau": [TAU], "tau2": [TAU2], "swe": [SWE], "openhands": OPENHANDS, "own": OWN,
}  # fmt: skip
VALUES = (None, 5, True, "x", [], ["x"], {}, {"x": 1}, [[]], float("inf"))


def damaged(document):
    """The document with each of its values, one at a time, replaced or left out."""

    def ways(value, way):
        keys = (
            value
            if isinstance(value, dict)
            else range(len(value))
            if isinstance(value, list)
            else ()
        )
        for key in keys:
            yield (*way, key)
            yield from ways(value[key], (*way, key))

    for *way, last in ways(document, ()):
        for new in (*VALUES, ...):
            copy = deepcopy(document)
            holder = copy
            for key in way:
                holder = holder[key]
            if new is ...:
                del holder[last]
            else:
                holder[last] = new
            yield copy


@pytest.mark.parametrize("form", FILES)
def test_a_damaged_file_is_read_or_refused_by_its_place(tmp_path, form):
    file = written(tmp_path, FILES[form], "one line")
    assert list(load(file, "turns"))
    refused = []
    for document in damaged(FILES[form]):
        file.write_text(json.dumps(document))
        try:
            list(load(file, "turns"))
        except DatasetError as error:
            refused.append(str(error))
    assert len(refused) > 5
    assert all(str(file) in message for message in refused)
