"""The one place that knows whether OR-tools are there: loading them takes a third of a second."""

from importlib.util import find_spec

from fxpipe.errors import CompileError


def require_solver() -> None:
    """Raise CompileError, with the remedy, where OR-tools are not installed."""
    if find_spec("ortools") is None:
        raise CompileError(
            "searching for a schedule needs OR-tools, which are not installed; run pip install ortools, "
            "or take the best of the named and list schedules with a budget of 0 seconds"
        )
