"""The parser by a language model: its answers, a real client on a server that fails, a cache that resumes."""

import contextlib
import gzip
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from refusals import refused

from dino_sparo.__main__ import main
from dino_sparo.oc_clip.graphs.graph import Relation, SceneGraph
from dino_sparo.oc_clip.parsers import Outcome, llm
from dino_sparo.oc_clip.parsers.command import Report, parse_rows
from dino_sparo.oc_clip.parsers.llm import AnswerCache, LanguageModelParser, LocalModel, Message, read_answer
from dino_sparo.oc_clip.parsers.rows import Row

GRAPH = {"entities": ["dog", "mat"], "relationships": [{"relationship": "on", "subject": 0, "object": 1}]}
DOG = SceneGraph(("dog", "mat"), (Relation(0, "on", 1),))


def wrapped(record: Any) -> str:
    return f"[ANS]{json.dumps(record)}[/ANS]"


# Answers.


@pytest.mark.parametrize(
    "text",
    [
        wrapped(GRAPH),
        f"Here it is:\n[ANS]\n```json\n{json.dumps(GRAPH, indent=1)}\n```\n[/ANS] I hope this helps.",
        f"I write [ANS] first. No: {wrapped({'entities': []})} {wrapped(GRAPH)}",
    ],
)
def test_the_graph_between_the_last_delimiters_is_read(text: str) -> None:
    assert read_answer(text) == (DOG, 0)


def test_unary_relations_and_and_are_dropped_and_counted() -> None:
    bad = [
        {"relationship": "running", "subject": 0, "object": None},
        {"relationship": "running", "subject": 0},
        {"relationship": "each other", "subject": 1, "object": 1},
        {"relationship": "AND ", "subject": 0, "object": 1},
    ]
    answer = {**GRAPH, "relationships": [*bad[:2], *GRAPH["relationships"], *bad[2:]]}
    assert read_answer(wrapped(answer)) == (DOG, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no JSON between"),
        (json.dumps(GRAPH), "there is no JSON between"),
        (wrapped(GRAPH)[:-10], "there is no JSON between"),
        ("[ANS]{'entities'}[/ANS]", "is not valid JSON"),
        (wrapped(["dog"]), "a scene graph is"),
        (wrapped({**GRAPH, "entities": ["dog"]}), "relation 0 is Relation"),
    ],
)
def test_an_answer_without_a_graph_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_answer(text)


def test_the_examples_of_the_prompt_follow_its_rules() -> None:
    examples = llm.PROMPT.split("Caption: ")[1:]
    for example in examples:
        graph, dropped = read_answer(example)
        caption = example.splitlines()[0].lower()
        assert dropped == 0
        assert all(phrase in caption for phrase in graph.entities)
    assert len(examples) == 3


# One caption after the other, without a server.


class Model:
    """Answers in turn; remembers what it was asked."""

    def __init__(self, *answers: str | Exception) -> None:
        self.answers, self.asked = list(answers), list[list[Message]]()

    def __call__(self, messages: list[Message]) -> str:
        self.asked.append(messages)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def parsed(model: Model, folder: Path, *captions: str) -> list[Outcome]:
    return list(LanguageModelParser(model, "m", folder / "cache.sqlite").parse_all(iter(captions)))


def test_an_answer_that_cannot_be_read_is_asked_for_once_more(tmp_path: Path) -> None:
    model = Model("garbage", wrapped(GRAPH))
    assert parsed(model, tmp_path, "a dog on a mat") == [Outcome(DOG)]
    assert [len(messages) for messages in model.asked] == [2, 4]
    assert model.asked[1][2] == {"role": "assistant", "content": "garbage"}
    assert "there is no JSON between" in model.asked[1][3]["content"]


def test_a_cached_answer_is_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(wrapped(GRAPH))
    assert parsed(model, tmp_path, "a", "b", "a") == [Outcome(DOG)] * 3
    assert parsed(model, tmp_path, "b", "c") == [Outcome(DOG)] * 2
    asked = [messages[1]["content"] for messages in model.asked]
    assert asked == ["Caption: a", "Caption: b", "Caption: c"]
    monkeypatch.setattr(llm, "PROMPT_VERSION", "another")
    parsed(model, tmp_path, "b")
    assert len(model.asked) == 4
    keys = {LanguageModelParser(model, name, tmp_path / "cache.sqlite").key("b") for name in ("m", "n")}
    assert len(keys) == 2, "another model answers anew"


def test_only_answers_are_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dino_sparo.runtime.logs.PROGRESS_SECONDS", -1.0)
    answers = [wrapped(GRAPH), *[llm.UnansweredError("too many requests")] * 3, wrapped(GRAPH)]
    parser = LanguageModelParser(Model(*answers), "m", tmp_path / "cache.sqlite")
    rows = [Row(f"a dog on mat {number}") for number in range(5)]
    with caplog.at_level("INFO"):
        parse_rows(rows, parser, tmp_path / "g.jsonl", Report(16, 16))
    done = [record.message.split(",")[0] for record in caplog.records if record.message.startswith("parsing: ")]
    assert done == ["parsing: 0 of 5", "parsing: 1 of 5"]


def test_answers_of_many_threads_are_all_kept(tmp_path: Path) -> None:
    with AnswerCache(tmp_path / "c.sqlite") as cache:
        keys = [f"{number:064x}" for number in range(24)]
        threads = [threading.Thread(target=cache.add, args=(key, key * 100)) for key in keys]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [cache.get(key) for key in keys] == [key * 100 for key in keys]
    with AnswerCache(tmp_path / "c.sqlite") as cache:
        assert [cache.get(key) for key in keys] == [key * 100 for key in keys]


def test_a_cache_that_is_no_database_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "cache.sqlite").write_text('{"key": "00"}\n' * 100)
    with pytest.raises(llm.MendableError, match=r"cache\.sqlite cannot be read .*move it away or give another --cache"):
        parsed(Model(wrapped(GRAPH)), tmp_path, "a dog")


def test_a_local_model_answers_greedily(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {}

    def pipeline(task: str, **_: Any) -> Any:
        def generate(messages: list[Message], **given: Any) -> Any:
            options.update(given)
            return [{"generated_text": [*messages, {"role": "assistant", "content": wrapped(GRAPH)}]}]

        return generate

    transformers = ModuleType("transformers")
    transformers.__spec__ = ModuleSpec("transformers", None)
    transformers.pipeline = pipeline  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    assert read_answer(LocalModel("folder")([{"role": "user", "content": "Caption: a"}])) == (DOG, 0)
    assert options["do_sample"] is False


# The real client and a real server.

NUMBER = 12


class FakeServer(ThreadingHTTPServer):
    """Answers about `thing N`. What fails for which N is a table; every failure of a status happens `times` times.

    Attributes:
        failures: caption -> list of statuses and texts that come first.
        asked: captions in the order of the requests.
        other: a server that this one redirects to.
        sent: bytes of a flood.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.failures: dict[str, list[int | str]] = {}
        self.asked: list[str] = []
        self.lock, self.sent = threading.Lock(), 0
        self.other = self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.answer(200, b"<html>This server has a page here.</html>")

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert request["temperature"] == 0
        caption = request["messages"][1]["content"].removeprefix("Caption: ")
        with self.server.lock:
            self.server.asked.append(caption)
            failures = self.server.failures.get(caption, [])
            failure = failures.pop(0) if failures else None
        if isinstance(failure, int):
            self.answer(failure, {"error": {"message": f"status {failure}"}})
            return
        if failure in self.odd:
            with contextlib.suppress(ConnectionError):  # the client ends first
                self.odd[failure](self)
            self.close_connection = True
            return
        if failure is not None and failure.startswith("{"):
            self.answer(200, failure.encode())
            return
        if failure == "page":
            self.answer(200, b"<html>Welcome</html>")
            return
        entity = caption.removeprefix("a ")
        good = wrapped({"entities": [entity], "relationships": []})
        text = {"cut": good[:-8], "garbage": "I am sorry."}.get(failure, failure) if failure else good
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        self.answer(200, {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})

    def answer(self, status: int, content: dict[str, Any] | bytes) -> None:
        is_page = isinstance(content, bytes)
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if is_page else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("retry-after-ms", "1")
        self.end_headers()
        self.wfile.write(body)

    def drip(self) -> None:
        for letter in "HTTP/1.1 200 OK\r\nX: " + 200 * "x":
            self.wfile.write(letter.encode())
            time.sleep(0.05)

    def drip_body(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(200):
            self.wfile.write(b" ")
            time.sleep(0.05)

    def flood(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(1000):
            self.wfile.write(b" " * 10**6)
            self.server.sent += 10**6

    def packed(self) -> None:
        body = gzip.compress(b" " * 10**7)
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    def redirect(self) -> None:
        other = self.server.other.url + "/chat/completions"
        self.wfile.write(f"HTTP/1.1 307 Other\r\nLocation: {other}\r\nContent-Length: 0\r\n\r\n".encode())

    odd: ClassVar = {**{"drip": drip, "drip_body": drip_body, "flood": flood, "packed": packed, "redirect": redirect}}

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[FakeServer]:
    pytest.importorskip("openai", reason="pip install 'dino_sparo[test]'")
    fake = FakeServer()
    thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield fake
    fake.shutdown()
    thread.join()
    fake.server_close()


def run(url: str, folder: Path, name: str = "g") -> dict[str, Any]:
    (folder / "c.txt").write_text("".join(f"a thing {number}\n" for number in range(NUMBER)))
    words = ["parse", "--captions", str(folder / "c.txt"), "--output", str(folder / f"{name}.jsonl"), "--parser", "llm"]
    summary: dict[str, Any] = main([*words, "--server", url, "--model", "m", "--concurrency", "3"])
    return summary


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_server_that_cannot_be_reached_ends_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openai", reason="pip install 'dino_sparo[test]'")
    monkeypatch.setattr(llm, "BACK_OFFS", 0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with refused("start the server, or correct the address"):
        run(url, tmp_path)
    assert f"--server {url} cannot be reached" in caplog.messages[-1]
    assert not (tmp_path / "g.jsonl.errors.jsonl").exists()


def test_a_server_that_fails_now_and_then_gives_every_graph(server: FakeServer, tmp_path: Path) -> None:
    server.failures = {
        "a thing 1": [429],
        "a thing 3": [500, 503, 429, 500, 502],
        "a thing 5": ["garbage"],
        "a thing 7": ["cut"],
    }
    summary = run(server.url, tmp_path)
    assert summary["complete"]
    assert [line["caption"] for line in lines_of(tmp_path / "g.jsonl")] == [f"a thing {n}" for n in range(NUMBER)]
    assert [line["entities"] for line in lines_of(tmp_path / "g.jsonl")] == [[f"thing {n}"] for n in range(NUMBER)]
    assert server.asked.count("a thing 3") == 1 + llm.BACK_OFFS
    assert summary["parser"] == {"parser": "llm", "model": "m", "prompt": llm.PROMPT_VERSION}


def test_what_is_left_undone_is_listed_and_asked_again_by_the_next_run(server: FakeServer, tmp_path: Path) -> None:
    server.failures = {"a thing 2": [500] * 6, "a thing 4": ["garbage", "cut"], "a thing 6": [400, 400]}
    summary = run(server.url, tmp_path)
    assert not summary["complete"]
    assert {key: summary["this_run"][key] for key in ("parsed", "undone", "unreadable")} == {
        **{"parsed": NUMBER - 3, "undone": 1, "unreadable": 2}
    }
    errors = lines_of(tmp_path / "g.jsonl.errors.jsonl")
    assert [(line["caption"], line["undone"]) for line in errors] == [
        ("a thing 2", True),
        ("a thing 4", False),
        ("a thing 6", False),
    ]
    assert "no JSON between" in errors[1]["problem"]
    asked = len(server.asked)
    summary = run(server.url, tmp_path)
    assert summary["complete"]
    assert summary["counts"]["captions"] == NUMBER
    assert len(server.asked) == asked + 3
    assert not (tmp_path / "g.jsonl.errors.jsonl").exists()


def test_a_refused_key_ends_the_run_in_one_line(
    server: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.failures = {f"a thing {number}": [401] for number in range(NUMBER)}
    with refused("check --server, --model and the environment variable OPENAI_API_KEY"):
        run(server.url, tmp_path)
    assert "answers 401 for model 'm'" in caplog.messages[-1]
    assert len(server.asked) < NUMBER


def test_a_run_that_was_ended_goes_on_to_the_same_file_and_asks_nothing_twice(
    server: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(server.url, tmp_path, "whole")
    server.asked.clear()
    server.failures = {"a thing 8": [401]}
    with pytest.raises(SystemExit):
        run(server.url, tmp_path)
    assert 0 < len((tmp_path / "g.jsonl").read_text().splitlines()) <= 8
    with (tmp_path / "g.jsonl").open("a") as file:
        file.write('{"caption": "a thi')
    run(server.url, tmp_path)
    assert (tmp_path / "g.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert sorted(server.asked) == sorted([*(f"a thing {n}" for n in range(NUMBER)), "a thing 8"])


MESSAGES = [{"role": "system", "content": ""}, {"role": "user", "content": "Caption: a thing"}]


def test_the_time_of_a_whole_request_is_bounded(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header comes letter by letter, and the second time the body."""
    monkeypatch.setattr(llm, "BACK_OFFS", 1)
    server.failures = {"a thing": ["drip", "drip_body"]}
    start = time.monotonic()
    with pytest.raises(llm.UnansweredError, match="did not answer in the seconds of --timeout_s"):
        llm.Server(server.url, "m", timeout_s=0.3)(MESSAGES)
    assert 0.6 < time.monotonic() - start < 4
    assert len(server.asked) == 2


@pytest.mark.parametrize("kind", ["flood", "packed"])
def test_an_endless_answer_is_not_read_to_its_end(server: FakeServer, kind: str) -> None:
    server.failures = {"a thing": [kind]}
    with pytest.raises(llm.MendableError, match="answers, but not in OpenAI's protocol"):
        llm.Server(server.url, "m")(MESSAGES)
    assert server.sent < 50 * 10**6


@pytest.mark.parametrize(("failure", "status"), [(403, 403), (404, 404), ("redirect", 307)])
def test_an_unknown_model_is_refused_and_a_redirect_is_not_followed(
    server: FakeServer, failure: int | str, status: int
) -> None:
    server.failures, server.other = {"a thing": [failure]}, FakeServer()
    with pytest.raises(llm.MendableError, match=rf"answers {status} for model 'm': .*check --server"):
        llm.Server(server.url, "m")(MESSAGES)
    assert not server.other.asked
    server.other.server_close()


@pytest.mark.parametrize(
    "answer",
    [
        *('{"choices": "x"}', '{"choices": 3}', '{"choices": {"a": 1}}', '{"choices": [1]}', '{"choices": [null]}'),
        *('{"choices": [{"message": "x"}]}', '{"choices": [{"message": null}]}', '{"choices": [{}]}', "{}"),
        '{"choices": [{"message": {"content": 3}}]}',
        '{"choices": [{"message": {"content": [{"type": "text", "text": "x"}]}}]}',
        '{"choices": ' + 100_000 * "[",
        "page",
    ],
)
def test_an_answer_of_odd_types_is_one_line(server: FakeServer, answer: str) -> None:
    server.failures = {"a thing": [answer]}
    with pytest.raises(llm.MendableError, match="answers, but not in OpenAI's protocol") as caught:
        llm.Server(server.url, "m")(MESSAGES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("answer", ['{"choices": []}', '{"choices": [{"message": {"content": null}}]}'])
def test_an_answer_without_text_is_empty(server: FakeServer, answer: str) -> None:
    server.failures = {"a thing": [answer]}
    assert llm.Server(server.url, "m")(MESSAGES) == ""
