"""`rsm inspect --web`: the page holds what the memory holds, no text gets out of its place, and a browser shows it."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from cli_support import Words, refused, rsm
from memory_support import D

from rsm_torch import AgentMemory, Item, RSMConfig, StreamMemory
from rsm_torch.cli import embedding

HOSTILE = [
    "</script><script>document.title='taken'</script>", "<img src=x onerror=\"document.title='taken'\">",
    "<!-- <script>", "\u2028\u2029 {data} {script-hash}", "\\u003c/script>", "&lt;b&gt;",
]  # fmt: skip
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(embedding, "open_embedder", lambda spec: Words())
    with AgentMemory(Words(), path=tmp_path / "m.db", tau=0.5) as made:
        made.add(
            [
                Item(f"the parcel {n} came", step=n, time=86400 * n, role="user")
                for n in range(1, 9)
            ],
            "ada",
        )
        made.add([f"a song of rain {n}" for n in range(3)], "ada")
        made.add(HOSTILE, "<b>bob</b>")
    return tmp_path / "m.db"


def data_of(page):
    return json.loads(
        re.search(r'type="application/json">(.*?)</script>', page.read_text("utf-8"), re.S)[1]
    )


def saved(memory, tmp_path, *more):
    result = rsm("inspect", memory, "--web", tmp_path / "page.html", *more)
    assert result.exit_code == 0, result.output
    return tmp_path / "page.html"


def test_the_page_holds_every_member_of_every_atom(memory, tmp_path):
    found = data_of(saved(memory, tmp_path))
    with AgentMemory(Words(), path=memory) as held:
        for stream in found["streams"]:
            items = {item.id: item for item in held.get_all(stream["name"])}
            shown = {
                text["id"]: (text["text"], spot["atom"])
                for spot in stream["map"]
                for text in spot["texts"]
            }
            assert {id: text for id, (text, _) in shown.items()} == {
                id: i.text for id, i in items.items()
            }
            for spot in stream["map"]:
                assert {items[text["id"]].atom for text in spot["texts"]} == {spot["atom"]}
            assert sum(spot["members"] for spot in stream["map"]) == stream["members"] == len(items)
            assert all(-1 <= spot[axis] <= 1 for spot in stream["map"] for axis in "xy")
        assert [stream["name"] for stream in found["streams"]] == held.streams()
        created = held.get_all("ada")[-1].created
    assert found["streams"][0]["written"] == created


def test_what_does_not_fit_is_counted(memory, tmp_path):
    found = data_of(saved(memory, tmp_path, "--texts", 4))
    for stream in found["streams"]:
        assert sum(len(spot["texts"]) for spot in stream["map"]) == 2
        assert stream["members"] > 2


def test_questions_say_what_they_get_and_why(memory, tmp_path):
    page = saved(
        memory, tmp_path, "--question", "What came at step 7?", "--question", "rain", "--stream", "ada",
        "--max-tokens", 60,
    )  # fmt: skip
    first, second = data_of(page)["answers"]
    with AgentMemory(Words(), path=memory, tokenizer=Words().tokenizer) as held:
        context = held.context("What came at step 7?", "ada", max_tokens=60)
        assert (first["text"], first["tokens"], first["budget"]) == (
            context.text,
            context.tokens,
            60,
        )
        assert [hit["id"] for hit in first["hits"]] == list(context.ids)
        plain = held.search("rain", "ada", top_k=99, addressing=False)
        assert {hit["id"]: tuple(hit["scores"]["embedding"]) for hit in second["hits"]} == {
            hit.id: (round(hit.score, 4), n)
            for n, hit in enumerate(plain, 1) if hit.id in {h["id"] for h in second["hits"]}
        }  # fmt: skip
    named = {hit["text"] for hit in first["hits"] if hit["named"]}
    assert named == {"the parcel 7 came"}
    assert set(first["rules"]) == {"embedding", "with words", "with surroundings"}


def test_a_memory_of_tensors_shows_ids(tmp_path):
    memory = StreamMemory(RSMConfig(D, 0.3), streams=3)
    memory.write(torch.randn(2, 5, D, generator=torch.Generator().manual_seed(0)), streams=[0, 2])
    memory.save_pretrained(tmp_path / "tensors")
    found = data_of(saved(tmp_path / "tensors", tmp_path))
    assert [stream["name"] for stream in found["streams"]] == ["0", "2"]
    ids = [
        text["id"]
        for stream in found["streams"]
        for spot in stream["map"]
        for text in spot["texts"]
    ]
    assert sorted(map(int, ids)) == sorted(memory.ids().tolist())


def test_an_empty_memory_has_a_page(tmp_path):
    AgentMemory(Words(), path=tmp_path / "m.db", tau=0.5).close()
    assert data_of(saved(tmp_path / "m.db", tmp_path))["streams"] == []


def test_what_is_wrong_is_told(memory, tmp_path):
    page = tmp_path / "page.html"
    assert "--web: expected a file that ends in .html" in refused(
        rsm("inspect", memory, "--web", "x.txt")
    )
    assert "say where with --web" in refused(rsm("inspect", memory, "--question", "rain"))
    assert "--texts: expected at least 1" in refused(
        rsm("inspect", memory, "--web", page, "--texts", 0)
    )
    asked = ("inspect", memory, "--web", page, "--question", "rain")
    assert "--stream: there are 2; choose one" in refused(rsm(*asked))
    assert "no stream 'cat'" in refused(rsm(*asked, "--stream", "cat"))
    assert not page.exists()


@pytest.mark.skipif(CHROMIUM is None, reason="no browser: apt-get install chromium")
def test_a_browser_shows_it(memory, tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api")
    page = saved(
        memory, tmp_path, "--question", "rain", "--question", "the parcel", "--stream", "ada"
    )
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    with sync_api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=quiet)
        shown, said = browser.new_page(), []
        shown.on("console", lambda message: said.append(message.text))
        shown.on("pageerror", lambda error: said.append(str(error)))
        shown.on(
            "request",
            lambda request: said.append(request.url) if "page.html" not in request.url else None,
        )
        shown.goto(page.as_uri())
        assert shown.title() == "Memory"
        assert shown.locator("#streams tr").count() == 2
        circles = shown.locator("#map circle")
        assert circles.count() == len(data_of(page)["streams"][0]["map"])
        circles.last.focus()
        shown.keyboard.press("Enter")
        assert "chosen" in circles.last.get_attribute("class")
        shown.locator("#members li").first.wait_for()
        before = shown.locator("#map").get_attribute("viewBox")
        shown.locator("#map").hover()
        shown.mouse.wheel(0, -300)
        shown.wait_for_function(
            f"document.getElementById('map').getAttribute('viewBox') !== {before!r}"
        )
        shown.locator("#whole").click()
        assert shown.locator("#map").get_attribute("viewBox") == before
        shown.get_by_role("button", name="the parcel", exact=True).click()
        assert (
            shown.locator("#context").inner_text().strip()
            == data_of(page)["answers"][1]["text"].strip()
        )
        shown.locator("#hits button").first.click()
        shown.locator("#filter").fill("bob")
        assert shown.locator("#streams tr").count() == 1
        shown.get_by_role("button", name="<b>bob</b>").click()
        listed = set()
        for n in range(circles.count()):
            circles.nth(n).focus()
            shown.keyboard.press("Enter")
            listed |= set(shown.locator("#members li span:last-child").all_text_contents())
        assert listed == set(HOSTILE)
        assert shown.title() == "Memory"
        assert said == []
        browser.close()
