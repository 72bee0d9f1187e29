"""The model a user names on the command line, and what it trains on."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fxpipe.errors import CompileError
from fxpipe.models.backbones import example_inputs as backbone_inputs
from fxpipe.models.backbones import is_backbone
from fxpipe.models.pipeline_steps import training_step
from fxpipe.models.pipelines import is_pipeline


def load_model(spec: str) -> nn.Module:
    """The nn.Module that `file.py:factory` or `module:factory` names, of a pipeline its training step.

    Raises:
        CompileError: it names neither.
    """
    made = _made(spec)
    if is_pipeline(made):
        return training_step(made)
    if not isinstance(made, nn.Module):
        raise CompileError(f"{spec} must be an nn.Module or return one, got {type(made).__name__}")
    return made


def load_pipeline(spec: str) -> tuple[Any, dict[str, Any]]:
    """The pipeline that `file.py:factory` or `module:factory` names, and the arguments of its call that come with it.

    Raises:
        CompileError: it names none.
    """
    made = _made(spec)
    pipe, call = made if isinstance(made, tuple) and len(made) == 2 else (made, {})
    if not is_pipeline(pipe) or not isinstance(call, dict):
        kind = type(made).__name__
        raise CompileError(f"{spec} must return a pipeline, or a pipeline and a dict of its arguments; got {kind}")
    return pipe, dict(call)


def load_sampled(spec: str) -> tuple[Any, dict[str, Any] | None]:
    """A pipeline with the arguments of its call; or a denoiser with those of its forward, None where its config tells.

    Raises:
        CompileError: the name is of neither.
    """
    made = _made(spec)
    model, call = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        return load_pipeline(spec)
    return model, call


def served_pipeline(spec: str) -> tuple[Any, Callable[[list[str]], dict[str, Any]]]:
    """The pipeline that a server samples from, and what gives the text arguments of its call for some prompts: where
    only the pipeline is named, the prompts themselves.

    Raises:
        CompileError: the name is of no pipeline.
    """
    made = _made(spec)
    pipe, embed = made if isinstance(made, tuple) and len(made) == 2 else (made, lambda prompts: {"prompt": prompts})
    if not is_pipeline(pipe) or not callable(embed):
        raise CompileError(f"{spec} must return a pipeline, or a pipeline and a function of prompts")
    return pipe, embed


def _made(spec: str) -> Any:
    source, colon, name = spec.rpartition(":")
    if not colon or not source or not name:
        raise CompileError(f"MODEL must be file.py:factory or module:factory, got {spec!r}")
    module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    if not hasattr(module, name):
        raise CompileError(f"{source} has no {name!r}")
    made = getattr(module, name)
    if not isinstance(made, nn.Module) and not is_pipeline(made) and callable(made):
        with _users_code(f"{spec} failed"):
            made = made()
    return made


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise CompileError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(f"model_file_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look their module up by name
    sys.path.insert(0, str(path.parent))
    with _users_code(f"cannot load {path}"):
        spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, "")  # as `python -m` does: modules of the working directory
    with _users_code(f"cannot import {name}"):
        return importlib.import_module(name)


@contextmanager
def _users_code(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise CompileError(f"{what} ({last.filename}:{last.lineno}): {type(error).__name__}: {error}") from error


def example_inputs(model: nn.Module, batch_size: int) -> Any:
    """A tuple or dict of forward's arguments for `batch_size` samples: the model's own, or from a backbone's config."""
    make = getattr(model, "example_inputs", None)
    if make is not None:
        with _users_code(f"{type(model).__name__}.example_inputs failed"):
            return make(batch_size)
    if is_backbone(model):
        return backbone_inputs(model, batch_size)
    name = type(model).__name__
    raise CompileError(f"{name} says nothing of its inputs; give it a method example_inputs(batch_size)")
