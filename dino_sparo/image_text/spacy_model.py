"""Texts -> words with tags and dependencies by spaCy's English model."""

from collections.abc import Iterable, Iterator
from typing import Any

from dino_sparo.runtime.faults import MissingPackageError, require

MODEL = "en_core_web_sm"


class SpacyModel:
    """spaCy's small English model, which is loaded when the first text is read.

    Args:
        purpose: what needs it, in the plural, for messages.

    Attributes:
        record: versions, for a result file.
    """

    def __init__(self, purpose: str) -> None:
        require("spacy", purpose)
        import spacy

        if not spacy.util.is_package(MODEL):
            raise MissingPackageError(
                f"{purpose} need spaCy's model {MODEL}; install it with: python -m spacy download {MODEL}"
            )
        version = spacy.util.get_package_version(MODEL)
        self.record = {"spacy": spacy.__version__, "model": f"{MODEL} {version}"}
        self._pipeline: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # Each worker loads its own: 50 MB are more to send than to read.
        return {**self.__dict__, "_pipeline": None}

    def documents(self, texts: Iterable[str]) -> Iterator[Any]:
        """spaCy's document of every text, in batches; its tokens have `text`, `tag_`, `pos_`, `dep_` and `head`."""
        if self._pipeline is None:
            import spacy

            self._pipeline = spacy.load(MODEL, exclude=["ner", "lemmatizer"])
        yield from self._pipeline.pipe(texts)
