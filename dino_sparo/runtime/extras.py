"""Packages that only some commands need -> one line that says which to install.

A module that needs such a package calls `require` before it imports it, where it needs it and not at its top, so that a
command can end with that line (`exits.errors_in_one_line`).
"""

import importlib.util

# How to install what may be missing.
INSTALL = {
    "open_clip": "pip install 'dino_sparo[clip]'",
    "entmax": "pip install 'dino_sparo[clip]'",
    "onnx": "pip install 'dino_sparo[export]'",
    "onnxscript": "pip install 'dino_sparo[export]'",
    "scipy": "pip install 'dino_sparo[objects]'",
    "pycocotools": "pip install 'dino_sparo[objects]'",
    "matplotlib": "pip install 'dino_sparo[plots]'",
    "clip_benchmark": "pip install clip-benchmark requests",
    "spacy": "pip install 'dino_sparo[parse]' && python -m spacy download en_core_web_sm",
    "nltk": "pip install nltk && python -m nltk.downloader punkt_tab",
    "openai": "pip install 'dino_sparo[parse-llm]'",
    "transformers": "pip install transformers",
    "requests": "pip install requests",
}


class MissingPackageError(ImportError):
    """A package is not installed; the message says how to install it."""


def require(package: str, purpose: str) -> None:
    """Refuse to go on without a package.

    Args:
        package: a key of `INSTALL`.
        purpose: what needs it, as the subject of a sentence in the plural.

    Raises:
        MissingPackageError: it is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise MissingPackageError(f"{purpose} need the package {package}; install it with: {INSTALL[package]}")
