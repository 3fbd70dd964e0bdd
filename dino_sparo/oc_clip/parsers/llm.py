"""Caption -> scene graph by a language model: a server with OpenAI's protocol, or a local model of transformers.

    prompt, caption -> answer with [ANS]...[/ANS]     a `Complete`: `Server` or `LocalModel`
    answer -> graph                                   `read_answer`
    captions -> graphs, concurrently, in order        `LanguageModelParser`

The paper parses with Llama 3 70B. It shows the rules of its prompt and one of its examples (OC-CLIP, appendix A.6). Our
`prompt.txt` has the same schema, delimiters and rules, in our words and with our examples.
"""

import asyncio
import hashlib
import logging
import os
import re
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from dino_sparo.oc_clip.graphs.graph import SceneGraph
from dino_sparo.oc_clip.parsers import Outcome, Parser
from dino_sparo.runtime.faults import MendableError, UserError, require
from dino_sparo.runtime.files import parse_json

BACK_OFFS = 5
MAX_ANSWER_TOKENS, MAX_ANSWER_BYTES = 1024, 10**6
CAPTIONS_PER_THREAD = 16  # submitted at a time
NO_RELATIONS = ("and", "or", ",", "&")

Message = dict[str, str]
Complete = Callable[[list[Message]], str]

PROMPT = Path(__file__).with_name("prompt.txt").read_text(encoding="utf-8")
# Answers to another prompt are not taken from the cache.
PROMPT_VERSION = hashlib.sha256(PROMPT.encode()).hexdigest()[:12]


class UnansweredError(RuntimeError):
    """The server gave no answer after all back-offs; a later run may succeed."""


def read_answer(text: str) -> tuple[SceneGraph, int]:
    """The graph between the last delimiters of an answer, and the number of dropped relations (unary or "and").

    Raises:
        ValueError: there are no delimiters, or no graph between them.
    """
    answers = re.findall(r"\[ANS\]((?:(?!\[ANS\]).)*)\[/ANS\]", text, re.DOTALL)
    if not answers:
        raise UserError("there is no JSON between [ANS] and [/ANS]")
    try:
        record = parse_json(re.sub(r"^\s*```(?:json)?|```\s*$", "", answers[-1]))
    except ValueError as error:
        raise UserError(f"the text between [ANS] and [/ANS] is not valid JSON ({error})") from error
    listed = record.get("relationships") if isinstance(record, dict) else None
    if not isinstance(listed, list):
        return SceneGraph.from_json(record), 0
    relations = [entry for entry in listed if not (isinstance(entry, dict) and _is_no_relation(entry))]
    return SceneGraph.from_json({**record, "relationships": relations}), len(listed) - len(relations)


def _is_no_relation(entry: dict[str, Any]) -> bool:
    """Whether a relation is unary, or "and"."""
    subject, other = entry.get("subject"), entry.get("object")
    predicate = str(entry.get("relationship")).strip().lower()
    return None in (subject, other) or subject == other or predicate in NO_RELATIONS


def _bounded_client(timeout_s: float) -> Any:
    """HTTP for `openai` with a limit to the time of a whole request and to the size of its answer; no redirects."""
    import openai

    class Client(openai.DefaultAsyncHttpxClient):
        async def send(self, request: Any, **options: Any) -> Any:
            try:
                return await asyncio.wait_for(self._send(request, {**options, "stream": True}), timeout_s)
            except asyncio.TimeoutError as error:
                httpx = sys.modules[type(request).__module__.partition(".")[0]]  # or httpx2, as openai's version says
                raise httpx.ReadTimeout("--timeout_s is over", request=request) from error

        async def _send(self, request: Any, options: dict[str, Any]) -> Any:
            request.headers["Accept-Encoding"] = "identity"  # a packed answer may be a thousand times as long
            response, content = await super().send(request, **options), bytearray()
            async for part in response.aiter_raw():
                content += part[:MAX_ANSWER_BYTES]
                if len(content) > MAX_ANSWER_BYTES:  # what is left is not valid JSON
                    break
            await response.aclose()
            headers = {name: value for name, value in response.headers.items() if name != "content-encoding"}
            return type(response)(response.status_code, headers=headers, content=bytes(content), request=request)

    return Client(follow_redirects=False)


class Server:
    """A server with OpenAI's protocol; the key comes from OPENAI_API_KEY.

    Args:
        url: such as `http://localhost:8000/v1`.
        model: its name on the server.
        timeout_s: seconds after which a request is repeated.
    """

    def __init__(self, url: str, model: str, timeout_s: float = 120.0) -> None:
        require("openai", "graphs of the parser llm")

        self.model, self.url = model, url
        for name in ("httpx", "httpx2", "openai"):  # a line per request
            logging.getLogger(name).setLevel(logging.WARNING)
        key = os.environ.get("OPENAI_API_KEY") or "none"
        self.options: dict[str, Any] = {"base_url": url, "api_key": key, "timeout": timeout_s, "max_retries": BACK_OFFS}

    def __call__(self, messages: list[Message]) -> str:
        """The model's answer, greedy.

        Raises:
            MendableError: the server cannot be reached, has another protocol, refuses the key, does not know the model,
                or sends to another address.
            UnansweredError: all back-offs ended in too many requests, faults or time-outs.
            UserError: the server refuses this request.
        """
        import openai

        try:
            return self._content(asyncio.run(self._ask(messages)))
        except openai.APIStatusError as error:
            status, reason = error.status_code, _one_line(error)
            if status == 429 or status >= 500:
                raise UnansweredError(reason) from error
            if status < 400 or status in (401, 403, 404):
                raise MendableError(
                    f"{self.url} answers {status} for model {self.model!r}: {reason}; check --server, --model and the "
                    "environment variable OPENAI_API_KEY"
                ) from error
            raise UserError(f"the server refuses the request: {reason}") from error
        except openai.APITimeoutError as error:
            raise UnansweredError("the server did not answer in the seconds of --timeout_s") from error
        except openai.APIConnectionError as error:
            raise MendableError(
                f"--server {self.url} cannot be reached ({_one_line(error.__cause__ or error)}); start the server, or "
                "correct the address and its port. The same command resumes"
            ) from error

    async def _ask(self, messages: Any) -> bytes:
        import openai

        http = _bounded_client(self.options["timeout"])
        async with openai.AsyncOpenAI(http_client=http, **self.options) as client:
            answer: Any = await client.chat.completions.with_raw_response.create(
                model=self.model, messages=messages, temperature=0.0, max_tokens=MAX_ANSWER_TOKENS
            )
        return answer.http_response.content

    def _content(self, answer: bytes) -> str:
        """The text in an answer; empty if the model gave none."""
        try:
            choices = parse_json(answer)["choices"]
            content = choices[0]["message"].get("content") if choices else None
            if not isinstance(content, str | None):
                raise TypeError(f"content is a {type(content).__name__}")
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise MendableError(
                f"{self.url} answers, but not in OpenAI's protocol ({_one_line(error)}); correct --server: it "
                "often ends with /v1"
            ) from error
        return content or ""


class LocalModel:
    """A chat model of transformers on this machine, by folder or by name on the Hugging Face hub."""

    def __init__(self, model: str) -> None:
        require("transformers", "graphs of local language models")
        import transformers

        self.pipeline = transformers.pipeline("text-generation", model=model, torch_dtype="auto")
        self.lock = threading.Lock()

    def __call__(self, messages: list[Message]) -> str:
        """The model's answer, greedy."""
        with self.lock:
            outputs = self.pipeline(messages, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
        return str(outputs[0]["generated_text"][-1]["content"])


class AnswerCache:
    """Answers in an SQLite database, so that no caption is asked about twice. Runs and threads may share one.

    Used within `with`, which creates the file if need be.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, threading.Lock()
        self.database: Any = None

    def __enter__(self) -> "AnswerCache":
        self.database = sqlite3.connect(self.path, timeout=60, isolation_level=None, check_same_thread=False)
        self._execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer BLOB)")
        return self

    def __exit__(self, *error: object) -> None:
        self.database.close()

    def get(self, key: str) -> str | None:
        """The answer, if there is one."""
        row = self._execute("SELECT answer FROM answers WHERE key = ?", key)
        return None if row is None else str(row[0].decode("utf-8", "surrogatepass"))

    def add(self, key: str, answer: str) -> None:
        """Store an answer at once."""
        content = answer.encode("utf-8", "surrogatepass")
        self._execute("INSERT OR REPLACE INTO answers (key, answer) VALUES (?, ?)", key, content)

    def _execute(self, statement: str, *values: Any) -> Any:
        """The first row of the result, or None."""
        try:
            with self.lock:
                return self.database.execute(statement, values).fetchone()
        except sqlite3.DatabaseError as error:
            raise MendableError(
                f"the answers in {self.path} cannot be read or written ({error}); free some space if its disk is full; "
                "if the file is damaged, move it away or give another --cache"
            ) from error


class LanguageModelParser(Parser):
    """Captions -> graphs, several at a time."""

    def __init__(self, complete: Complete, model: str, cache: Path, concurrency: int = 1) -> None:
        self.complete, self.model, self.concurrency = complete, model, concurrency
        self.record = {"parser": "llm", "model": model, "prompt": PROMPT_VERSION}
        self.answers = AnswerCache(cache)

    def parse_all(self, captions: Iterator[str]) -> Iterator[Outcome]:
        """The outcome of every caption, in order; an error cancels the requests that have not begun."""
        with self.answers, ThreadPoolExecutor(self.concurrency) as threads:
            while some := list(islice(captions, CAPTIONS_PER_THREAD * self.concurrency)):
                yield from threads.map(self.parse, some)

    def parse(self, caption: str) -> Outcome:
        """Ask once, and once more if the answer is unreadable."""
        key = self.key(caption)
        if (text := self.answers.get(key)) is not None:
            graph, dropped = read_answer(text)
            return Outcome(graph, dropped=dropped)
        prompt = [{"role": "system", "content": PROMPT}, {"role": "user", "content": f"Caption: {caption}"}]
        problem, further = "", list[Message]()
        for _ in range(2):
            try:
                text = self.complete([*prompt, *further])
                graph, dropped = read_answer(text)
            except UnansweredError as error:
                return Outcome(None, str(error), is_unanswered=True)
            except ValueError as error:
                problem = str(error)
                again = f"That cannot be read: {problem}. Write the JSON object again, between [ANS] and [/ANS]."
                further = [{"role": "assistant", "content": text or ""}, {"role": "user", "content": again}]
            else:
                self.answers.add(key, text)
                return Outcome(graph, dropped=dropped)
        return Outcome(None, problem)

    def key(self, caption: str) -> str:
        """Hash of caption, model and prompt."""
        return hashlib.sha256("\0".join((caption, self.model, PROMPT_VERSION)).encode("utf-8", "replace")).hexdigest()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
