"""The U-Net cut by hand into two stages, as torch's pipelines need it: units in a row, values threaded through.

    stage 0    time, in, down 0 ... down 7                 -> hidden, time embedding, every open skip
    stage 1    down 8 ... mid ... up 14, out               -> prediction

A unit takes the state (hidden, skips) and returns the next. What crosses the cut is contiguous both ways: torch sends
gradients as they are, and gloo takes no others.
"""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.racing.model import RacedStep

State = tuple[Tensor, tuple[Tensor, ...]]
"""The hidden values and the open skips, the last of which may be the same tensor."""


class ContiguousGradient(torch.autograd.Function):
    """The value as it is; its gradient as gloo takes it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.contiguous()


class Layer(nn.Module):
    """A ResNet block, its transformer where it has one."""

    def __init__(self, resnet: nn.Module, attention: nn.Module | None, takes_skip: bool) -> None:
        super().__init__()
        self.resnet, self.attention, self.opens_skip = resnet, attention, not takes_skip

    def forward(self, state: State, time: Tensor, text: Tensor) -> State:
        hidden, skips = state
        if not self.opens_skip:
            hidden, skips = torch.cat([hidden, skips[-1]], dim=1), skips[:-1]
        hidden = self.resnet(hidden, time)
        if self.attention is not None:
            hidden = self.attention(hidden, encoder_hidden_states=text, return_dict=False)[0]
        return hidden, (*skips, hidden) if self.opens_skip else skips


class Resampled(nn.Module):
    """A downsampler, whose result is a skip, or an upsampler."""

    def __init__(self, sampler: nn.Module, opens_skip: bool) -> None:
        super().__init__()
        self.sampler, self.opens_skip = sampler, opens_skip

    def forward(self, state: State, time: Tensor, text: Tensor) -> State:
        hidden = self.sampler(state[0])
        return hidden, (*state[1], hidden) if self.opens_skip else state[1]


class Ends(nn.Module):
    """The first convolution, the middle, or the last layers."""

    def __init__(self, which: str, *parts: nn.Module) -> None:
        super().__init__()
        self.which, self.opens_skip, self.parts = which, which == "in", nn.ModuleList(parts)

    def forward(self, state: State, time: Tensor, text: Tensor) -> State:
        hidden, skips = state
        if self.which == "mid":
            return self.parts[0](hidden, time, encoder_hidden_states=text), skips
        for part in self.parts:
            hidden = part(hidden)
        return hidden, (hidden,) if self.opens_skip else skips


def units(step: RacedStep) -> list[nn.Module]:
    """Of the U-Net, in order; each a place to cut before."""
    net, found = step.unet, list[nn.Module]()
    found.append(Ends("in", net.conv_in))
    for block in net.down_blocks:
        found += _layers(block, takes_skip=False)
        found += [Resampled(one, True) for one in block.downsamplers or ()]
    found.append(Ends("mid", net.mid_block))
    for block in net.up_blocks:
        found += _layers(block, takes_skip=True)
        found += [Resampled(one, False) for one in block.upsamplers or ()]
    return [*found, Ends("out", net.conv_norm_out, net.conv_act, net.conv_out)]


def _layers(block: Any, takes_skip: bool) -> list[Layer]:
    attentions = getattr(block, "attentions", None) or [None] * len(block.resnets)
    return [Layer(*pair, takes_skip) for pair in zip(block.resnets, attentions, strict=True)]


class Stage(nn.Module):
    """The units before the cut, or after it. The first stage makes the time embedding; text is given to both."""

    def __init__(self, step: RacedStep, cut: int, is_first: bool) -> None:
        super().__init__()
        before, after = units(step)[:cut], units(step)[cut:]
        self.units = nn.ModuleList(before if is_first else after)
        self.is_first, self.hidden_is_skip = is_first, before[-1].opens_skip
        self.time, self._of_time = (step.unet.time_embedding, step.unet.get_time_embed) if is_first else (None, None)

    def forward(self, *given: Tensor, text: Tensor, timesteps: Tensor) -> Any:
        """Noisy latents [B, 4, H, W] to what crosses the cut, or that to the prediction [B, 4, H, W]."""
        if self.time is not None and self._of_time is not None:
            time = self.time(self._of_time(sample=given[0], timestep=timesteps))
            state: State = given[0], ()
        else:
            time, *skips = (ContiguousGradient.apply(value) for value in given)
            state = skips[-1], tuple(skips if self.hidden_is_skip else skips[:-1])
        for unit in self.units:
            state = unit(state, time, text)
        hidden, skips = state
        if not self.is_first:
            return hidden
        crossing = (time, *skips) if self.hidden_is_skip else (time, *skips, hidden)
        return tuple(value.contiguous() for value in crossing)
