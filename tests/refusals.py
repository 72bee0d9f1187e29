"""What is refused, as text."""

from collections.abc import Callable, Mapping

import pytest

from fxpipe.errors import CompileError


def refusals(calls: Mapping[str, Callable[[], object]]) -> str:
    """A line for each of the calls, all of which must raise CompileError."""
    texts = []
    for name, call in calls.items():
        with pytest.raises(CompileError) as refusal:
            call()
        texts.append(f"{name}: {refusal.value}")
    return "\n\n".join(texts) + "\n"
