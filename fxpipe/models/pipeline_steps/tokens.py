"""Captions as token ids, padded and cut as the pipelines' own `encode_prompt` does."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fxpipe.errors import CompileError


def tokenized(pipe: Any, captions: Sequence[str], lengths: Mapping[str, int], template: str) -> dict[str, Tensor]:
    """Tokens, and masks of what is no padding, [captions, length] by the input's name: `input_ids_2` are those of
    `pipe.tokenizer_2`; the first tokenizer's captions are put into the `template`.

    Raises:
        CompileError: the pipeline has no such tokenizer.
    """
    words = list(captions)
    if hasattr(pipe, "_text_preprocessing"):  # PixArt's: lower case, no space around
        words = pipe._text_preprocessing(words, clean_caption=False)
    elif clean := getattr(sys.modules[type(pipe).__module__], "prompt_clean", None):  # Wan's
        words = [clean(one) for one in words]
    found = {}
    for name in lengths:
        field = "attention_mask" if name.startswith("attention_mask") else "input_ids"
        suffix = name.removeprefix(field)
        given = words if suffix else [template.format(one) for one in words]
        found[name] = _made(pipe, f"tokenizer{suffix}", given, lengths[name])[field]
    return found


def _made(pipe: Any, name: str, words: list[str], length: int) -> Any:
    tokenizer = getattr(pipe, name, None)
    if tokenizer is None:
        raise CompileError(f"{type(pipe).__name__} has no {name}: load it with one, or make the tokens elsewhere")
    if hasattr(pipe, "maybe_convert_prompt"):  # words of textual inversion
        words = pipe.maybe_convert_prompt(words, tokenizer)
    return tokenizer(words, padding="max_length", max_length=length, truncation=True, return_tensors="pt")


def clip_length(pipe: Any, suffix: str) -> int:
    """Tokens that a CLIP reads."""
    most = int(getattr(pipe, f"text_encoder{suffix}").config.max_position_embeddings)
    tokenizer = getattr(pipe, f"tokenizer{suffix}", None)
    return most if tokenizer is None else min(most, int(tokenizer.model_max_length))
