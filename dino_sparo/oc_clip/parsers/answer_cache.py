"""Answers of a language model <-> a file that only grows, so that no caption is asked about twice."""

import json
import os
import threading
from pathlib import Path

from dino_sparo.data.sources.limits import parse_object
from dino_sparo.oc_clip.graphs.files import JsonLines, read_lines


class AnswerCache:
    """Answers in a file that only grows; used within `with`, by several threads. Without `with` it keeps nothing.

    Args:
        path: created if need be.
    """

    lines: JsonLines | None = None

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, threading.Lock()
        # Where an answer lies, not the answer: there may be millions.
        self.spans: dict[bytes, tuple[int, int]] = {}

    def __enter__(self) -> "AnswerCache":
        self.lines = JsonLines(self.path)
        for number, offset, line in read_lines(self.path):
            key = parse_object(line, f"{self.path}:{number}").get("key", "")
            self.spans[bytes.fromhex(key)] = (offset, len(line))
        return self

    def __exit__(self, *error: object) -> None:
        if self.lines is not None:
            self.lines.__exit__(*error)
            self.lines = None

    def get(self, key: str) -> str | None:
        """The answer, if there is one."""
        span = self.spans.get(bytes.fromhex(key))
        if span is None or self.lines is None:
            return None
        return str(json.loads(os.pread(self.lines.descriptor, span[1], span[0]))["answer"])

    def add(self, key: str, caption: str, answer: str) -> None:
        """Keep an answer."""
        if self.lines is None:
            return
        with self.lock:
            start = os.lseek(self.lines.descriptor, 0, os.SEEK_END)
            self.lines.write({"key": key, "caption": caption, "answer": answer})
            self.spans[bytes.fromhex(key)] = (start, os.lseek(self.lines.descriptor, 0, os.SEEK_END) - start)
