"""Texts instead of token ids (`token2text`), decoded here and not where training runs.

    tokenizer: a folder with tokenizer.json, such a file, or the name of a model in the local Hugging Face cache

Promises: nothing is downloaded; what cannot be decoded stays as it is. Needs the package `tokenizers`; a model that has
only a tokenizer of its own kind (tokenizer.model and the like) needs `transformers`, where that is installed.
Must not know: spans, sampling. On failure to find or load a tokenizer: TokenizerError, one line for a person.
"""

from __future__ import annotations

import functools
import glob
import os
from typing import Any

from verl_shipper.policy.answers import Decode

FILE_NAME = "tokenizer.json"
OTHER_NAMES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
HUB_VARIABLES = (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub"))
HUB_DEFAULT = os.path.join("~", ".cache", "huggingface", "hub")


class TokenizerError(Exception):
    """No tokenizer there, or none that works."""


@functools.lru_cache(maxsize=8)  # a tokenizer takes tens of megabytes; a lane sees few models
def load_decoder(where: str | None) -> Decode:
    """What turns ids into text; it gives None for ids that the tokenizer does not have. Raises TokenizerError."""
    if where is None:
        raise TokenizerError("it needs a tokenizer; set sampling.traces.tokenizer to the model's folder")
    path = find_tokenizer(where)
    return _fast(path) if path.endswith(".json") else _of_its_own_kind(path)


def _fast(path: str) -> Decode:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise TokenizerError("the package `tokenizers` is missing: pip install 'verl-shipper[tokens]'") from error
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the package raises plain Exception
        raise TokenizerError(f"{path}: {_first_line(error)}") from error
    return _decoding_by(tokenizer)


def _of_its_own_kind(folder: str) -> Decode:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise TokenizerError(f"no {FILE_NAME} in {folder}; its own kind needs the package `transformers`") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise TokenizerError(f"{folder}: {_first_line(error)}") from error
    return _decoding_by(tokenizer)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def _decoding_by(tokenizer: Any) -> Decode:
    """The method that both packages' tokenizers have; None for ids that are not theirs."""

    def decode(ids: list[int]) -> str | None:
        try:
            return str(tokenizer.decode(ids, skip_special_tokens=False))
        except (OverflowError, TypeError, ValueError, IndexError):
            return None

    return decode


def find_tokenizer(where: str) -> str:
    """Path of the tokenizer's file, or of the folder where one of another kind lies. Raises TokenizerError."""
    place = os.path.expanduser(where)
    if os.path.isfile(place):
        return place
    folders = [place]
    for hub in _hubs():
        folders += sorted(glob.glob(os.path.join(hub, f"models--{where.replace('/', '--')}", "snapshots", "*")))
    for folder in folders:
        if os.path.isfile(os.path.join(folder, FILE_NAME)):
            return os.path.join(folder, FILE_NAME)
    for folder in folders:
        if any(os.path.isfile(os.path.join(folder, name)) for name in OTHER_NAMES):
            return folder
    raise TokenizerError(f"no {FILE_NAME} in {place}, and no such model in the local Hugging Face cache")


def _hubs() -> list[str]:
    given = [os.path.join(os.environ[name], below) for name, below in HUB_VARIABLES if os.environ.get(name)]
    return [*given, os.path.expanduser(HUB_DEFAULT)]
