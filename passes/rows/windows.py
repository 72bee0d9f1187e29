"""Convolutions, pools and resizing along the rows: how many rows of its neighbours a patch needs.

                      patch has rows [a, b), gives [a/s, b/s)                    above      below
conv, stride s        row j reads  j*s - p ... j*s - p + d*(k-1)                 p          d*(k-1) - p - s + 1
transposed conv       row i gives  i*s - p ... i*s - p + d*(k-1)                 (d*(k-1) - p) // s     (p-1) // s + 1
upsampling by r       row j reads  j // r                                        none
 linear, r = 2 ** n   row j reads  the two around (j + 1/2) / r - 1/2            1                          1

So a 3x3 convolution with stride 2 needs no row below, a 1x1 one none at all. At the image's borders the rows that are
not there are what the operation pads with: above as many as it reads, below as many as its last row asks for.
"""

import math
from typing import Any

import torch

from passes.operations import FACTORIES
from passes.rows.how import Found, Padded, Resized, Same, Window
from passes.rows.layout import NeedRows, NoRule, Part, RowCall, Rows, shape_of

aten = torch.ops.aten
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_CONV = {"conv1d": aten.conv1d.default, "conv2d": aten.conv2d.default, "conv3d": aten.conv3d.default}


def _plain(call: RowCall, spatial: int) -> tuple[Rows, Part, int]:
    """The operand's rows, in order and in one of its `spatial` last dimensions, and which of these."""
    node, state = call.first()
    place = state.dim - (len(shape_of(node)) - spatial)
    if place < 0 or state.plain is None:
        raise NoRule("its rows are not in one spatial dimension")
    return state, state.plain, place


def _each(value: Any, spatial: int) -> list[int]:
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * spatial if len(values) == 1 else values


def _window(
    call: RowCall, state: Rows, kernel: int, stride: int, dilation: int, top: int, target: Any,
    changes: dict[str, Any], fill: float | str = 0.0, width: int | None = None,
) -> Found:  # fmt: skip
    """An operation whose row j reads rows from j*stride - top on; where it has a `width`, its last dimension is rows of
    so many entries."""
    part, reach = state.parts[0], dilation * (kernel - 1)
    if part.inner % stride:
        raise NeedRows(stride // math.gcd(part.inner, stride), f"stride {stride}")
    dim, each = (state.dim, 1) if width is None else (call.value.ndim - 1, width)
    inner, num_rows = part.inner // stride, call.value.shape[dim] // each
    short = call.units.short(inner, num_rows)
    if not 0 <= short < inner:
        raise NoRule("its result has another number of rows")
    rows = part.size(call.units.count)
    end = max(0, (num_rows - 1) * stride + reach + 1 - top - rows)
    below = max(0, reach - top - stride + 1)
    result = Part("rows", inner, 1, short).times(each)
    return Found(Rows(dim, (result,)), Window(top, below, end, target, changes, fill))


def convolution(call: RowCall) -> Found:
    node, state = call.first()
    a, spatial = call.arguments, int(call.name[-2])
    if state.dim == 0 and len(shape_of(node)) == spatial + 2:  # rows are samples of it
        return Found(state)
    state, _, place = _plain(call, spatial)
    kernel, stride, dilation = shape_of(a["weight"])[2:], _each(a["stride"], spatial), _each(a["dilation"], spatial)
    padding = _padding(a["padding"], kernel, dilation, place)
    changes = {"padding": [0 if dim == place else p for dim, p in enumerate(padding)]}
    top = padding[place] + state.pad[0]
    fill = 0.0 if state.mode == "constant" else state.mode
    return _window(call, state, kernel[place], stride[place], dilation[place], top, _CONV[call.name], changes, fill)


def _padding(given: Any, kernel: tuple[int, ...], dilation: list[int], place: int) -> list[int]:
    """Of each spatial dimension: what is padded before it, which is also what is padded after it but for the rows."""
    if not isinstance(given, str):
        return _each(given, len(kernel))
    reach = [0 if given == "valid" else d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    if any(r % 2 for dim, r in enumerate(reach) if dim != place):
        raise NoRule("it pads another dimension more after it than before it")
    return [r // 2 for r in reach]


def pool(call: RowCall) -> Found:
    """`max_pool` and `avg_pool`."""
    a, spatial = call.arguments, int(call.name[-2])
    state, _, place = _plain(call, spatial)
    kernel, padding = _each(a["kernel_size"], spatial), _each(a["padding"], spatial)
    stride = _each(a["stride"], spatial) if a["stride"] else kernel
    dilation = _each(a.get("dilation", 1), spatial)
    average = call.name.startswith("avg")
    if a["ceil_mode"] or (average and any(padding) and not a["count_include_pad"]):
        raise NoRule("its windows at the border count other entries")
    changes = {"padding": [0 if dim == place else p for dim, p in enumerate(padding)]}
    fill = 0.0 if average else float("-inf")
    return _window(
        call, state, kernel[place], stride[place], dilation[place], padding[place], call.node.target, changes, fill
    )


def unfolded(call: RowCall) -> Found:
    """`im2col`: every window is an entry of the last dimension, those of a row after each other."""
    state, _, place = _plain(call, 2)
    names = "kernel_size", "stride", "dilation", "padding"
    (kernel, *over), (stride, *to), (dilation, *apart), (top, *side) = (_each(call.arguments[one], 2) for one in names)
    if place:
        raise NoRule("its windows follow each other along another dimension first")
    width = (shape_of(call.node.all_input_nodes[0])[-1] + 2 * side[0] - apart[0] * (over[0] - 1) - 1) // to[0] + 1
    changes = {"padding": [0, *side]}
    return _window(call, state, kernel, stride, dilation, top, call.node.target, changes, width=width)


def transposed(call: RowCall) -> Found:
    a, spatial = call.arguments, int(call.name[-2])
    state, part, place = _plain(call, spatial)
    kernel, stride = shape_of(a["weight"])[2:][place], _each(a["stride"], spatial)[place]
    reach = _each(a["dilation"], spatial)[place] * (kernel - 1)
    padding, extra = _each(a["padding"], spatial), _each(a["output_padding"], spatial)
    top, inner, size = padding[place], part.inner * stride, call.value.shape[state.dim]
    short = call.units.short(inner, size)
    above, below = max(0, (reach - top) // stride), (top - 1) // stride + 1
    reached = (below - 1) * stride + reach + 1 - top  # of the rows that follow a patch's own, by what is in reach
    if not 0 <= short < inner or reached < max(0, part.short * stride - short):
        raise NoRule("its result has another number of rows")
    padding[place] = extra[place] = 0
    changes = {"padding": padding, "output_padding": extra}
    how = Window(above, below, below, call.node.target, changes, skip=top + above * stride)
    return Found(Rows(state.dim, (Part("rows", inner, 1, short),)), how)


def padded(call: RowCall) -> Found:
    """Rows around the rows are left to the convolutions that read them; for others what is around belongs to no row."""
    node, state = call.first()
    pad, ndim = list(call.arguments["pad"]), len(shape_of(node))
    place = 2 * (ndim - 1 - state.dim)
    if place >= len(pad) or pad[place : place + 2] == [0, 0]:
        return Found(state)
    mode = call.arguments.get("mode", "constant")
    if mode not in ("constant", "reflect", "replicate"):
        raise NoRule("it pads the rows with others than zeros or its own")
    above, below = pad[place : place + 2]
    if min(above, below) < 0:
        raise NoRule("it takes some of the rows")
    readers = [RowCall(user, call.states, call.units) for user in call.node.users]
    readers = [reader for reader in readers if reader.name not in FACTORIES]
    zeros = call.arguments.get("value") in (None, 0)
    without = {"pad": [*pad[:place], 0, 0, *pad[place + 2 :]]}
    if zeros and state.plain is not None and state.dim >= 2 and all(_pads_later(reader, mode) for reader in readers):
        return Found(Rows(state.dim, state.parts, (above, below), mode), Same(without))
    if mode != "constant" or state.pad != (0, 0):
        raise NoRule("it pads the rows, for others than convolutions")
    ends = [[Part("whole", size)][: bool(size)] for size in (above, below)]
    return Found(Rows.of(state.dim, (*ends[0], *state.parts, *ends[1])), Padded(without))


def _pads_later(reader: RowCall, mode: str) -> bool:
    """Whether a convolution can pad in its operand's place: with zeros, or where it has no zeros of its own."""
    zeros = mode == "constant" or not any(_each(reader.arguments.get("padding", [0]), 1))
    return reader.name in CONVOLUTIONS and zeros and not isinstance(reader.arguments["padding"], str)


def nearest(call: RowCall) -> Found:
    """Upsampling by copies of rows, seen by doing it to the rows' numbers; the last copies may be missing."""
    node, _ = call.first()
    shape = shape_of(node)
    state, part, _ = _plain(call, len(shape) - 2)
    size, before = call.value.shape[state.dim], shape[state.dim]
    times = -(-size // before)
    numbers = torch.arange(float(before)).reshape([-1, *[1] * (len(shape) - 1 - state.dim)]).expand([1, 1, *shape[2:]])
    name = next(iter(call.arguments))
    done = call.node.target(**{**call.arguments, name: numbers})  # type: ignore[operator]
    seen = done.movedim(state.dim, 0).flatten(1)[:, 0]
    if not torch.equal(seen, (torch.arange(size) // times).to(seen.dtype)):
        raise NoRule("its rows are no copies of rows")
    short = part.inner * times * call.units.count - size
    if not 0 <= short < part.inner * times:
        raise NoRule("its result has another number of rows")
    result = Rows(state.dim, (Part("rows", part.inner * times, 1, short),))
    if "output_size" not in call.arguments:
        raise NoRule("its result's size is not among its arguments")
    others = [done.shape[dim] / shape[dim] for dim in range(2, len(shape)) if dim != state.dim]
    if not all(ratio.is_integer() for ratio in others) and call.arguments["output_size"] is None:
        raise NoRule("it scales another dimension by no whole number")
    scales = {key: None for key in call.arguments if key.startswith("scale")}
    return Found(result, Resized("output_size", times, scales))


def linear(call: RowCall) -> Found:
    """Rows between rows: more of them by a power of two, where the weights of two rows are the same in every patch; or
    fewer, by a whole number: each lies in the middle of so many rows of one patch."""
    node, _ = call.first()
    sizes, out, a = shape_of(node)[2:], call.value.shape[2:], call.arguments
    state, part, place = _plain(call, len(sizes))
    scales = a.get("scale_factors") or [after / before for before, after in zip(sizes, out, strict=True)]
    pairs = [*zip(sizes, out, scales, strict=True)]  # 13 columns to 15: by 15 / 13 these are 14
    even = all(before / after == 1 / scale and int(before * scale) == after for before, after, scale in pairs)
    times, step = max(1, round(scales[place])), max(1, round(1 / scales[place]))
    if a["align_corners"] or "scale_factors" not in a or not even or times & (times - 1):
        raise NoRule("its rows lie between others than a patch's would")
    if out[place] * step != sizes[place] * times:
        raise NoRule("its result has another number of rows")
    if part.inner % step:
        raise NeedRows(step // math.gcd(part.inner, step), f"one of {step} rows")
    inner = part.inner // step * times
    result = Rows(state.dim, (Part("rows", inner, 1, call.units.short(inner, out[place])),))
    changes = {"output_size": None, "scale_factors": scales}
    if times == 1:
        return Found(result, Same(changes))
    return Found(result, Window(1, 1, 1, call.node.target, changes, "replicate", skip=times))


def shuffled(call: RowCall) -> Found:
    """`pixel_shuffle` and `pixel_unshuffle`."""
    node, state = call.first()
    ndim, part = len(shape_of(node)), state.plain
    if state.dim < ndim - 3:
        return Found(state)
    if state.dim != ndim - 2 or part is None:
        raise NoRule("it moves the rows")
    after, before = call.value.shape[state.dim], shape_of(node)[state.dim]
    if after >= before:
        times = after // before
        return Found(Rows(state.dim, (part.times(times),)))
    step = before // after
    if part.inner % step or part.short % step:
        if part.inner % step == 0:
            raise NoRule("its last rows are no whole blocks")
        raise NeedRows(step, f"blocks of {step} rows")
    return Found(Rows(state.dim, (Part("rows", part.inner // step, 1, part.short // step),)))
