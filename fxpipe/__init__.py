"""fxpipe compiles diffusion models for several devices."""

from typing import Any

__all__ = ["CaptureError", "CompileError", "FxpipeError", "RunError", "ScheduleError", "compile"]

from fxpipe.errors import CaptureError, CompileError, FxpipeError, RunError, ScheduleError


def __getattr__(name: str) -> Any:
    # `compile` pulls in torch, the passes and the cost models: loaded on first use, so that reading a plan stays light.
    if name == "compile":
        from fxpipe.compiler import compile

        return compile
    raise AttributeError(f"module 'fxpipe' has no attribute {name!r}")
