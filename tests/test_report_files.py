"""What `rsm report` writes: Markdown, HTML, JSON and a plot, safe whatever the data say."""

from __future__ import annotations

import json
import re
import struct
from html.parser import HTMLParser

import pytest
from cli_support import rsm
from report_support import READ, MadeRun, noisy, score

from rsm_torch.eval.report_text import _fenced, escape


class Reader(HTMLParser):
    """Collects tags and everything that could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.loads: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.loads += [v for k, v in attrs if k in ("src", "href", "srcset", "data", "action")]
        assert not [k for k, _ in attrs if k.startswith("on")]


HOSTILE = '<script>alert("1")</script> | **x** [a](javascript:b) `c`\n# d'


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A report on 24 methods whose names and messages are hostile here and there."""
    folder = tmp_path_factory.mktemp("written")
    methods = (*(f"method-number-{i}" for i in range(22)), "$\\alpha$_x", HOSTILE)
    run = MadeRun(
        noisy, methods=methods, categories=(HOSTILE, "second"), questions=6, episodes=3,
        dataset="<b>Set</b>/../x", errors={(HOSTILE, 1): {**READ, "message": HOSTILE + "\ud800"}},
    ).write(folder / "run")  # fmt: skip
    result = rsm("report", run, "--out", folder / "out", "--json", "--baseline", methods[0])
    assert result.exit_code == 0, result.output
    return folder / "out", result


def test_json_is_one_valid_object_and_equals_the_file(written):
    out, result = written
    numbers = json.loads(result.stdout)
    assert numbers == json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert numbers["runs"][0]["manifest"]["settings"]["budgets"] == [1000, 2000]
    assert len(numbers["datasets"]["<b>Set</b>/../x"]["cells"]) == 48
    assert "NaN" not in result.stdout


def test_html_loads_nothing_and_runs_nothing(written):
    out, _ = written
    text = (out / "report.html").read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(text)
    assert "script" not in reader.tags
    assert "b" not in reader.tags
    assert reader.tags >= {"table", "img", "meta"}
    assert reader.loads
    assert all(load.startswith("data:image/png;base64,") for load in reader.loads)
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;" in text
    assert "prefers-color-scheme: dark" in text


def test_markdown_shows_texts_as_they_are(written):
    out, _ = written
    text = (out / "report.md").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "](javascript" not in text
    tables = re.findall(r"(?:^\|.*\n)+", text, re.M)
    assert len(tables) == 6  # two budgets, figures free of them, categories twice, failures
    for table in tables:
        columns = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(columns) == 1
    picture = re.search(r"!\[.*?\]\((.+?)\)", text)
    assert picture
    assert (out / picture[1]).exists()
    assert picture[1] == "pareto-b-set-b-x.png"


def test_the_plot_is_a_png_that_grows_with_the_methods(written, tmp_path):
    out, _ = written
    few = MadeRun(noisy).write(tmp_path / "few")
    assert rsm("report", few, "--out", tmp_path / "out").exit_code == 0
    sizes = []
    for folder in (tmp_path / "out", out):
        (file,) = folder.glob("*.png")
        data = file.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        sizes.append(struct.unpack(">II", data[16:24]))
    assert sizes[0][0] == sizes[1][0]
    assert sizes[0][1] < sizes[1][1]


def test_the_same_runs_give_the_same_files(tmp_path):
    run = MadeRun(noisy).write(tmp_path / "run")
    for name in ("one", "two"):
        assert rsm("report", run, "--out", tmp_path / name).exit_code == 0
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()
    assert sorted(f.name for f in (tmp_path / "one").iterdir()) == [
        "pareto-made.png", "report.html", "report.json", "report.md",
    ]  # fmt: skip


def test_tables_name_what_they_show(tmp_path):
    run = MadeRun(noisy, lambda m, q, b, s: score(m, q, b, s) + b / 1e4).write(tmp_path / "run")
    result = rsm("report", run, "--baseline", "plain", "--metric", "recall")
    text = result.stdout
    head = text[: text.index("### At 1,000 tokens")]
    assert "rsm eval --dataset made --seeds 0" in head
    assert "commit 0123456789ab; data abababababababab; python 3.11, torch 2.13; 96 rows" in head
    columns = next(line for line in text.splitlines() if line.startswith("| method"))
    assert columns == (
        "| method | failed | tokens | groups | bytes | write s | read ms | recall (n 24) | f1 (n 24) |"
    )
    assert "### recall by category. At 1,000 tokens" in text
    assert "| method | first (n 12) | second (n 12) |" in text


def test_texts_are_escaped():
    assert escape("A & B\n<i> p|q `c` [a](b) *x*") == (
        "A &amp; B &lt;i&gt; p\\|q \\`c\\` [a]\\(b) \\*x\\*"
    )
    assert _fenced("run `a` ```b```") == "````sh\nrun `a` ```b```\n````"
