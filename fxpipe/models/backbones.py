"""A bare diffusers backbone as a training step: predict, mean squared error, inputs made from the config.

    UNet2DConditionModel(sample, timestep, encoder_hidden_states)        ->  a prediction
    PredictionStep(that)(target, sample=, timestep=, ...)                ->  a loss
    example_inputs(that, batch_size=4)  ->  target [4, 4, 64, 64], sample [4, 4, 64, 64], timestep [4], ...

One table says what each argument's name means, in terms of the config's own keys. An argument that is not in the table
and has no default cannot be invented: the error names it, and the user passes `example_inputs`. The sizes of example
inputs (image, frames, tokens) come from the config where it states them; where it does not they are small stand-ins, so
plan for your own sizes with your own inputs.
"""

import copy
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxpipe.capture import private
from fxpipe.capture.inputs import signature_of
from fxpipe.errors import CompileError
from fxpipe.models.backbone_inputs import ARGUMENTS, Sizes

SAMPLE_NAMES = ("sample", "hidden_states", "input_ids", "x")
# micro_conds: UVit2DModel, which knows no time
_CONDITION_NAMES = {"timestep", "timesteps", "t", "r", "timestep_ratio", "micro_conds"}


class PredictionStep(nn.Module):
    """One training step of a backbone: its prediction's mean squared error against `target`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, target: Tensor, **inputs: Any) -> Tensor:
        """The scalar loss; `target` has the prediction's shape, `inputs` are the backbone's arguments by name."""
        return nn.functional.mse_loss(prediction_of(self.model(**inputs)), target)

    def example_inputs(self, batch_size: int) -> dict[str, Any]:
        """Keyword arguments of `forward` for `batch_size` samples; see `example_inputs`."""
        return example_inputs(self.model, batch_size)


def is_backbone(model: object) -> bool:
    """Whether `model` predicts: an `nn.Module` with a `.config` that takes a sample and a time under diffusers' names.

    That admits every denoiser of diffusers, and models written alike; it leaves out VAEs and text encoders (no time)
    and ControlNets (their outputs are residuals for another model). diffusers need not be installed.
    """
    return takes_sample_and_time(model) and "controlnet_cond" not in signature_of(model).parameters


def takes_sample_and_time(model: object) -> TypeGuard[nn.Module]:
    """Whether `model` is a backbone, a ControlNet, or both in one."""
    if not isinstance(model, nn.Module) or not isinstance(getattr(model, "config", None), Mapping):
        return False
    names = signature_of(model).parameters.keys()
    return bool(names & {*SAMPLE_NAMES} and names & _CONDITION_NAMES)


def example_inputs(
    model: nn.Module, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Keyword arguments of `PredictionStep(model)` for `batch_size` samples: `target` and the backbone's arguments.

    Same values on every call. `device` and `dtype` are the model's unless given, `meta` and fake models included.
    Raises CompileError for an argument that cannot be made from the signature and the config.
    """
    state = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    device, dtype = device or state.device, dtype or state.dtype
    sizes = Sizes.of(model, batch_size, dtype)
    inputs = {}
    for parameter in sizes.arguments.values():
        value = ARGUMENTS[parameter.name](sizes) if parameter.name in ARGUMENTS else None
        if value is not None:
            inputs[parameter.name] = pytree.tree_map_only(Tensor, lambda t: t.to(device), value)
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            raise CompileError(
                f"{type(model).__name__} needs {parameter.name!r}, which cannot be made from its config; "
                "pass example_inputs, a dict with `target` and the model's own arguments"
            )
    shape = _prediction_shape(model, inputs)
    return {"target": sizes.noise(*shape).to(device), **inputs}


def prediction_of(output: Any) -> Tensor:
    """The predicted tensor in a model's output: a tensor, a tuple, or a dataclass (`.sample`, or its first field)."""
    if isinstance(output, Mapping):
        output = output["sample"] if "sample" in output else next(iter(output.values()))
    if isinstance(output, tuple):
        output = output[0]
    output = getattr(output, "sample", output)
    if not isinstance(output, Tensor):
        kind = type(output).__name__
        raise CompileError(
            f"the model returns {kind}, no tensor to compare with a target; wrap it in a step of your own"
        )
    return output


def row_inputs(model: nn.Module, example: Mapping[str, Any]) -> dict[str, int]:
    """The inputs of a denoiser that have rows, and which dimension these are: of one that is no diffusers backbone, its
    first image or video.

    Of a packed image (`img_ids`) every token is a row of its own, of a signal every entry. A list of samples has rows
    in each, which has no batch.

    Raises:
        CompileError: the model is no such backbone and is given no image, or predicts something without rows.
    """
    found = ([key for key in example if key.partition(".")[0] == name] for name in SAMPLE_NAMES)
    names = next(filter(None, found), [])
    if not names or not isinstance(getattr(model, "config", None), Mapping):
        says = "where its image's rows are is not known; pass sample={name of the input: row dimension}"
        return image_rows(model, example, says)
    layout = Sizes.of(model, 1, torch.float32).layout
    return {name: _row_dimension(model, name, example[name], layout) for name in names}


def named_rows(rows: Mapping[str, int], example: Mapping[str, Tensor]) -> dict[str, int]:
    """Row dimensions that somebody has named, counted from the first one; those that no input has as they are."""
    return {name: dim + _from_end(dim, example.get(name)) for name, dim in rows.items()}


def _from_end(dim: int, value: Tensor | None) -> int:
    return value.ndim if value is not None and -value.ndim <= dim < 0 else 0


def _row_dimension(model: nn.Module, name: str, value: Tensor, layout: str) -> int:
    layout = layout.removeprefix("B") if "." in name else layout
    layout = layout if value.ndim == len(layout) else layout.replace("C", "")
    dim = next((layout.index(letter) for letter in "HNL" if letter in layout), None)
    if dim is not None and value.ndim == len(layout):
        return dim
    if value.ndim + ("." in name) in (4, 5, 6):  # an image, a video, or several, all the same
        return value.ndim - 2
    raise CompileError(
        f"{type(model).__name__}: its {name} {_describe(value)} has no rows that are known; if it has some, pass "
        "sample={name of the input: row dimension}"
    )


def image_rows(
    module: nn.Module, call: Mapping[str, Any], says: str = "no input of it is an image; leave it whole: vae=False"
) -> dict[str, int]:
    """The input that has rows: the first image [B, C, H, W] or video [B, C, F, H, W].

    Raises:
        CompileError: there is none, which it `says`.
    """
    for name, value in call.items():
        if isinstance(value, Tensor) and value.ndim in (4, 5):
            return {name: value.ndim - 2}
    raise CompileError(f"{type(module).__name__}: {says}")


def _prediction_shape(model: nn.Module, inputs: dict[str, Any]) -> torch.Size:
    """Shape of the prediction: no memory and no arithmetic.

    A copy of the modules (not of the weights) runs: some models keep what they once computed, such as rotary factors,
    and would keep tensors without memory. It runs on the meta device, where an operation takes a tenth of the time,
    and where it cannot, as with constants of its own on the CPU, on fake tensors, which tell why.
    """
    weights = [*model.parameters(), *model.buffers()]
    mode = next(filter(None, map(private.mode_of, weights)), None)
    if mode is None:
        try:
            shell = copy.deepcopy(model, {id(t): torch.empty_like(t, device="meta") for t in weights})
            metas = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), inputs)
            with torch.device("meta"), torch.no_grad():
                return prediction_of(shell(**metas)).shape
        except Exception:
            mode = private.fake_mode()
    try:
        shell = copy.deepcopy(model, {id(t): t for t in weights})
        fakes = pytree.tree_map_only(Tensor, mode.from_tensor, inputs)
        with mode, torch.no_grad():
            return prediction_of(shell(**fakes)).shape
    except CompileError:
        raise
    except private.VALUE_ERRORS as error:
        what = getattr(error, "func", error)
        raise CompileError(
            f"{type(model).__name__} takes decisions by tensor values ({what}), so no graph fits all inputs; "
            "use a version of it whose shapes and branches depend on the inputs' shapes only"
        ) from error
    except Exception as error:
        made = ", ".join(f"{name} {_describe(value)}" for name, value in inputs.items())
        raise CompileError(
            f"{type(model).__name__} does not run on the inputs made from its config ({made}): "
            f"{str(error) or type(error).__name__}; "
            "pass example_inputs, a dict with `target` and the model's own arguments"
        ) from error


def _describe(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__
