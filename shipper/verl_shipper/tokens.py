"""Texts instead of token ids (`token2text`), decoded here and not where training runs.

    tokenizer: a folder with tokenizer.json, such a file, or the name of a model in the local Hugging Face cache

Promises: nothing is downloaded; what cannot be decoded stays as it is. Needs the package `tokenizers`.
Must not know: spans, sampling. On failure to find or load a tokenizer: TokenizerError, one line for a person.
"""

from __future__ import annotations

import functools
import glob
import os

from verl_shipper.policy.traces import Decode

FILE_NAME = "tokenizer.json"
HUB_VARIABLES = (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub"))
HUB_DEFAULT = os.path.join("~", ".cache", "huggingface", "hub")


class TokenizerError(Exception):
    """No tokenizer there, or none that works."""


@functools.lru_cache(maxsize=8)  # a tokenizer takes tens of megabytes; a lane sees few models
def load_decoder(where: str | None) -> Decode:
    """What turns ids into text; it gives None for ids that the tokenizer does not have. Raises TokenizerError."""
    if where is None:
        raise TokenizerError("it needs a tokenizer; set sampling.traces.tokenizer to the model's folder")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise TokenizerError("the package `tokenizers` is missing: pip install 'verl-shipper[tokens]'") from error
    path = find_tokenizer(where)
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the package raises plain Exception
        raise TokenizerError(f"{path}: {str(error).splitlines()[0][:200]}") from error

    def decode(ids: list[int]) -> str | None:
        try:
            return str(tokenizer.decode(ids, skip_special_tokens=False))
        except (OverflowError, TypeError, ValueError):
            return None

    return decode


def find_tokenizer(where: str) -> str:
    """Path of the tokenizer's file. Raises TokenizerError."""
    place = os.path.expanduser(where)
    if os.path.isfile(place):
        return place
    candidates = [os.path.join(place, FILE_NAME)]
    for hub in _hubs():
        candidates += sorted(
            glob.glob(os.path.join(hub, f"models--{where.replace('/', '--')}", "snapshots", "*", FILE_NAME))
        )
    for candidate in candidates:
        if os.path.isfile(candidate):
            return candidate
    raise TokenizerError(f"no {FILE_NAME} in {place}, and no such model in the local Hugging Face cache")


def _hubs() -> list[str]:
    given = [os.path.join(os.environ[name], below) for name, below in HUB_VARIABLES if os.environ.get(name)]
    return [*given, os.path.expanduser(HUB_DEFAULT)]
