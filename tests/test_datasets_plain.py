"""Files of turns and text as people have them: tools, logs, odd values, pipes, units of time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from datetime import UTC, datetime

import pytest
from cli_support import Words, rsm

from rsm_torch.cli import embedding
from rsm_torch.eval.datasets import DatasetError, detect, load


@pytest.fixture
def plain_words(monkeypatch):
    monkeypatch.setattr(embedding, "open_embedder", lambda spec: Words())


def read(tmp_path, content, name="chat.jsonl"):
    file = tmp_path / name
    if not isinstance(content, str):
        content = "".join(json.dumps(record) + "\n" for record in content)
    file.write_text(content)
    (episode,) = load(file)
    return episode, episode.streams[file.stem]


def test_tool_calls_are_read_and_turns_have_places(tmp_path):
    call = {"function": {"name": "book", "arguments": '{"seat":"14C"}'}}
    image = {"type": "image_url", "image_url": {"url": "x"}}
    episode, items = read(
        tmp_path,
        [
            {"role": "user", "content": "Book me a seat."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": [{"type": "text", "text": "booked"}, image]},
            {"role": "assistant", "content": None},
            {"role": "user", "content": "Thanks."},
        ],
    )
    assert [(item.step, item.text) for item in items] == [
        (1, "Book me a seat."), (2, 'book({"seat":"14C"})'), (3, 'book({"seat":"14C"})'),
        (4, "booked"), (6, "Thanks."),
    ]  # fmt: skip
    assert episode.metadata["left_out"] == {"image_url": 1, "turn without text": 1}


def test_numbers_that_turns_have_are_kept(tmp_path):
    _, items = read(tmp_path, [{"text": "a", "step": 7}, {"text": "b"}])
    assert [item.step for item in items] == [7, None]


@pytest.mark.parametrize("name", ["chat.txt", "chat.log", "chat"])
def test_text_that_opens_with_a_bracket_is_read_by_lines(tmp_path, name):
    lines = ["[12/27/20, 18:51:14] Mia: hi", "[12/27/20, 18:52:10] Tom: two", "lines", "[] end"]
    _, items = read(tmp_path, "\n".join(lines), name)
    assert [item.text for item in items] == [
        lines[0],
        "[12/27/20, 18:52:10] Tom: two\nlines",
        "[] end",
    ]
    _, items = read(tmp_path, "[2025-01-02 10:00] GET /\n\n[2025-01-02 10:01] POST /\n", name)
    assert len(items) == 2
    _, items = read(tmp_path, "[2025-01-02 10:00] GET /\n", name)
    assert len(items) == 1


def test_an_array_of_objects_is_one_whatever_the_file_is_called(tmp_path):
    _, items = read(tmp_path, '[{"text": "a"}, {"text": "b"}]', "chat.txt")
    assert [item.text for item in items] == ["a", "b"]


DEEP = "[" * 2000 + "]" * 2000


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('"session": true', "line 2: field 'session' should be an integer or a string, got True"),
        (
            '"session": {"id": 1}',
            "line 2: field 'session' should be an integer or a string, got dict",
        ),
        ('"session": 1.5', "line 2: field 'session' should be an integer or a string, got 1.5"),
        ('"session": 1e400', "line 2: field 'session' should be .*got inf"),
        ('"step": "²"', "line 2: field 'step' should be an integer, got '²'"),
        ('"step": 99999999999999999999', "line 2: field 'step' should be an integer"),
        ('"step": NaN', "line 2: field 'step' should be an integer, got nan"),
        ('"role": {"a": 1}', "line 2: field 'role' should be a string, got dict"),
        ('"stream": true', "line 2: field 'stream' should be a string, got True"),
        ('"time": NaN', "line 2: time: expected a finite number"),
        ('"time": true', "line 2: time: expected seconds"),
        ('"time": {"a": 1}', "line 2: time: expected seconds"),
        (f'"other": {DEEP}', "line 2: JSON nested too deeply"),
        (f'"step": {"9" * 5000}', "line 2: Exceeds the limit"),
    ],
)
def test_wrong_values_are_told_by_file_line_and_field(tmp_path, line, message):
    with pytest.raises(DatasetError, match=rf"chat\.jsonl, {message}") as caught:
        read(tmp_path, '{"text": "a"}\n{"text": "b", ' + line + "}\n")
    assert "\n" not in str(caught.value)


def test_a_wrong_content_is_told(tmp_path):
    with pytest.raises(DatasetError, match="field 'content' should be a string or content parts"):
        read(tmp_path, '{"content": 5}\n')


def test_deep_arrays_are_told(tmp_path):
    with pytest.raises(DatasetError, match=r"chat\.json, \[0\]: JSON nested too deeply"):
        read(tmp_path, DEEP, "chat.json")
    with pytest.raises(DatasetError, match=r"line 1: JSON nested too deeply"):
        read(tmp_path, f'{{"text": "a", "other": {DEEP}}}\n')


def test_whole_numbers_are_taken_however_they_are_written(tmp_path):
    _, items = read(
        tmp_path, [{"text": "a", "session": 1.0, "step": 2.0}, {"text": "b", "step": " 3 "}]
    )
    assert [(item.session, item.step) for item in items] == [(1, 2), (None, 3)]


def test_unused_values_never_matter(tmp_path):
    episode, (item,) = read(tmp_path, '{"text": "a", "score": NaN, "x": [Infinity], "kept": 1}\n')
    assert item.metadata == {"kept": 1}
    assert episode.metadata["left_out"] == {"value of 'score'": 1, "value of 'x'": 1}


@pytest.mark.usefixtures("plain_words")
@pytest.mark.parametrize("command", ["context", "calibrate"])
def test_lone_surrogates_are_replaced(tmp_path, command):
    file = tmp_path / "chat.jsonl"
    file.write_text('{"text": "a \\ud83d", "role": "r\\ud83d"}\n{"text": "another \\udc00 text"}\n')
    asked = ("--question", "what?") if command == "context" else ()
    result = rsm(command, file, *asked)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "time",
    [1683554160, 1683554160.0, 1683554160000, 1683554160000000, 1683554160000000000,
     "1683554160", " 1683554160000 ", "1683554160.0", "2023-05-08T13:56:00Z"],
)  # fmt: skip
def test_units_of_time_are_told_by_their_size(tmp_path, time):
    _, (item,) = read(tmp_path, [{"text": "a", "timestamp": time}])
    assert item.time == pytest.approx(datetime(2023, 5, 8, 13, 56, tzinfo=UTC).timestamp())


def test_eight_digits_are_a_date(tmp_path):
    _, (item,) = read(tmp_path, [{"text": "a", "time": "20230508"}])
    assert item.time == datetime(2023, 5, 8, tzinfo=UTC).timestamp()


@pytest.mark.usefixtures("plain_words")
def test_what_is_left_out_is_said(tmp_path):
    file = tmp_path / "chat.jsonl"
    file.write_text('{"content": "a"}\n{"content": null}\n{"content": [{"type": "image_url"}]}\n')
    result = rsm("context", file, "--question", "what?", "--json")
    assert "left out of the file: 2 turn without text, 1 image_url\n" in result.stderr
    assert json.loads(result.stdout)["left_out"] == {"turn without text": 2, "image_url": 1}


# -- pipes and terminals ----------------------------------------------------------------------

TURNS = '{"text": "The seat is 14C. 🙂"}\n{"text": "It rains."}\n'
PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from cli_support import Words
from rsm_torch.cli import embedding, main
embedding.open_embedder = lambda spec: Words()
main()
"""


def run(*arguments: str, encoding: str = "utf-8", **how):
    from paths import ROOT

    program = PROGRAM.format(tests=str(ROOT / "tests"))
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        timeout=120,
        **how,
    )


def test_standard_input_and_a_cp1252_terminal():
    done = run("context", "-", "--question", "Which seat?", encoding="cp1252", input=TURNS.encode())
    assert done.returncode == 0, done.stderr
    assert b"14C. ?" in done.stdout


@pytest.mark.usefixtures("plain_words")
def test_a_pipe_is_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    thread = threading.Thread(target=lambda: pipe.write_text(TURNS))
    thread.start()
    result = rsm("context", pipe, "--question", "Which seat?")
    thread.join()
    assert result.exit_code == 0, result.output
    assert "14C" in result.stdout
    assert "of stdin" in result.stderr


@pytest.mark.usefixtures("plain_words")
def test_an_error_in_a_pipe_names_standard_input(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    thread = threading.Thread(target=lambda: pipe.write_text('{"text": "a", "step": "x"}\n'))
    thread.start()
    result = rsm("context", pipe, "--question", "Which seat?")
    thread.join()
    assert (result.exit_code, "rsm: stdin, line 1: field 'step'" in result.stderr) == (2, True)


def test_detection_reads_no_more_than_it_must(tmp_path):
    file = tmp_path / "numbers.txt"
    file.write_text("[1, 2, 3]\n")
    assert detect(file) == "text"
