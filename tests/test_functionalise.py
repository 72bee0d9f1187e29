"""In-place operations: the functional graph gives what the model gives, or the model is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.capture import capture
from fxpipe.capture.inputs import describe
from fxpipe.capture.model_call import ModelCall
from fxpipe.errors import CaptureError
from tests.steps import Middle, Step, Steps, batch, exact


def write_slice(s: Step, h: Tensor, y: Tensor) -> Tensor:
    h[:, 0] = y[:, 1]
    return h


def two_views(s: Step, h: Tensor, y: Tensor) -> Tensor:
    first, second = h[:, :2], h[:, 1:3]
    first.mul_(2)
    return torch.cat([second, first], 1) + h


def read_view_after_base(s: Step, h: Tensor, y: Tensor) -> Tensor:
    view = h.view(-1, 2, 2)
    h.add_(1)
    return h + view.flatten(1)


def transposed(s: Step, h: Tensor, y: Tensor) -> Tensor:
    h.view(-1, 2, 2).transpose(1, 2)[:, 0].mul_(3)
    return h


def permuted(s: Step, h: Tensor, y: Tensor) -> Tensor:
    h.view(-1, 2, 2).permute(2, 0, 1)[0] += y[:, :2]
    return h


def by_index(s: Step, h: Tensor, y: Tensor) -> Tensor:
    h[:, torch.tensor([0, 2])] = y[:, :2]
    return h


def by_mask(s: Step, h: Tensor, y: Tensor) -> Tensor:
    h[y > 0] = 0.5
    return h.masked_fill_(y < -1, 0.3)


def by_row_mask(s: Step, h: Tensor, y: Tensor) -> Tensor:
    h[y[:, 0] > 0] = 0.5
    return h


def rows_by_mask(s: Step, h: Tensor, y: Tensor) -> Tensor:
    h[y[:, 0] > 0] = s.a.bias
    rows = y[:, 1] > 0
    h[rows] = y[rows]
    return h


def entries_by_mask(s: Step, h: Tensor, y: Tensor) -> Tensor:
    below, above, other = y < -1, y > 1, s.b(y)
    h[y[:, 0] > 0] *= 0.0
    h[below] = other[below] * 2 - 0.5
    with torch.no_grad():
        chosen = other[above]
    h[above] = chosen
    return h


def scattered(s: Step, h: Tensor, y: Tensor) -> Tensor:
    return h.scatter_(1, torch.zeros_like(y[:, :1], dtype=torch.long), y[:, :1])


def copied(s: Step, h: Tensor, y: Tensor) -> Tensor:
    h[:, 1:].copy_(y[:, :1])
    return h


def filled(s: Step, h: Tensor, y: Tensor) -> Tensor:
    h[:, 3].fill_(2.0)
    h[:, 0].zero_()
    return h


def filled_along_a_diagonal(s: Step, h: Tensor, y: Tensor) -> Tensor:
    mask = torch.zeros(4, 4, dtype=h.dtype)
    mask[:3, :2] = -1.0
    mask[:3, :2].fill_diagonal_(0.5)
    return h @ mask


def assembled(s: Step, h: Tensor, y: Tensor) -> Tensor:
    out = h.new_empty(h.shape)
    out[..., ::2] = h[:, :2]
    out[..., 1::2] = h[:, 2:]
    out[:, :1] += y[:, :1]
    return out


def narrowed(s: Step, h: Tensor, y: Tensor) -> Tensor:
    h.narrow(1, -2, 2).mul_(3)
    return h


def pieces_under_no_grad(s: Step, h: Tensor, y: Tensor) -> Tensor:
    z = y * 2
    with torch.no_grad():
        first, second = z.chunk(2, 1)
        second.mul_(first)
        b, c = z.unbind(1)[1:3]
        b.add_(c)
        e, f = z.split([1, 3], 1)
        f.mul_(e)
    return h * z + torch.cat([second, first], 1)


def out_argument(s: Step, h: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        out = torch.empty_like(y)
        torch.add(y, 1, out=out)
        torch.mul(out, y, out=out)
    return h + out


def no_grad_on_frozen(s: Step, h: Tensor, y: Tensor) -> Tensor:
    z = y * 2
    with torch.no_grad():
        z.clamp_(0, 1)
        z[:, 0] = 3
    return h * z


def constant_in_forward(s: Step, h: Tensor, y: Tensor) -> Tensor:
    factors = torch.tensor([1.0, 2, 3, 4], dtype=h.dtype)
    factors += 1
    return h * factors


def cast_that_changes_nothing(s: Step, h: Tensor, y: Tensor) -> Tensor:
    h.to(h.dtype).mul_(2)
    return h


def cast_that_copies(s: Step, h: Tensor, y: Tensor) -> Tensor:
    other = h.to(torch.float32)
    other.mul_(2)
    return h + other.double()


def keeps_its_type(s: Step, h: Tensor, y: Tensor) -> Tensor:
    positive = y.clone()
    positive.gt_(0)
    half = y.float()
    half.add_(y)
    return h * positive + half


def inactive_dropout(s: Step, h: Tensor, y: Tensor) -> Tensor:
    same = F.dropout(h, 0.5, training=False)
    same += 1
    return h


def activations(s: Step, h: Tensor, y: Tensor) -> Tensor:
    return F.silu(F.leaky_relu(h, 0.2, inplace=True)) + h


def changed_shape(s: Step, h: Tensor, y: Tensor) -> Tensor:
    h = h * 1
    h.unsqueeze_(1).squeeze_(1)
    return h.t_().t_()


def of_several_results(s: Step, h: Tensor, y: Tensor) -> Tensor:
    values, _ = h.view(-1, 2, 2).max(1)
    values.mul_(2)
    return torch.cat([values, values], 1)


def reshape_that_copies(s: Step, h: Tensor, y: Tensor) -> Tensor:
    copy = h.view(-1, 2, 2).transpose(1, 2).reshape(-1, 4)
    copy.add_(1)
    return h + copy


def logical(s: Step, h: Tensor, y: Tensor) -> Tensor:
    mask = y > 0
    mask.logical_not_()
    mask |= y < -1
    return h * mask


def views_of_views(s: Step, h: Tensor, y: Tensor) -> Tensor:
    view = h[:, 1:3]
    column = view[:, 0]
    h.mul_(2)
    column.add_(1)
    view.mul_(3)
    return h + column[:, None]


def complex_entries(s: Step, h: Tensor, y: Tensor) -> Tensor:
    """As where a spectrum's low frequencies alone are kept."""
    spectrum = torch.fft.fft(h)
    low = torch.zeros_like(spectrum)
    low[..., :2] = spectrum[..., :2] * torch.complex(h, y)[..., 2:].conj()
    low[..., -1] = spectrum[..., -1].conj()
    low.narrow(-1, 1, 2).mul_(2)
    return h + torch.fft.ifft(low).real


def write_buffer(s: Step, h: Tensor, y: Tensor) -> Tensor:
    s.scale += 1
    return h * s.scale


def write_parameter(s: Step, h: Tensor, y: Tensor) -> Tensor:
    view = s.b.weight.view(-1)
    with torch.no_grad():
        s.b.weight[1:].clamp_(-0.3, 0.3)
    return h * view[:4] + h @ s.b.weight.detach()


def write_parameter_after_it_is_read(s: Step, h: Tensor, y: Tensor) -> Tensor:
    h = h @ s.b.weight.clone()
    s.attention.in_proj_bias.detach()[0] = 3
    s.b.bias.data.mul_(0.5)
    return h


def swapped_buffers(s: Step, h: Tensor, y: Tensor) -> Tensor:
    one, other = s.norm.running_mean, s.norm.running_var
    h = h * one.clone() + other.clone()
    before = one.clone()
    one.copy_(other)
    other.copy_(before)
    return h * torch.add(s.scale, 1, out=s.scale)


EXACT: list[Middle] = [
    write_slice, two_views, read_view_after_base, transposed, permuted, by_index, by_mask, by_row_mask,
    rows_by_mask, entries_by_mask, scattered, copied, filled,
    filled_along_a_diagonal, assembled, narrowed, pieces_under_no_grad, out_argument, no_grad_on_frozen,
    constant_in_forward, cast_that_changes_nothing, keeps_its_type, inactive_dropout, activations, changed_shape,
    of_several_results, reshape_that_copies, logical, views_of_views, complex_entries,
    write_buffer, write_parameter, write_parameter_after_it_is_read, swapped_buffers,
]  # fmt: skip


@pytest.mark.parametrize("middles", [*(EXACT[first::4] for first in range(4)), [cast_that_copies]])
def test_in_place_operations_are_exact(middles: list[Middle]) -> None:
    program = exact(Steps({middle.__name__: middle for middle in middles}), batch(), microbatches=3)
    for node in program.capture.graph.nodes:
        assert not getattr(getattr(node.target, "_schema", None), "is_mutable", False), node


def write_under_no_grad(s: Step, h: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        h.clamp_(0, 1)
    return h


def copy_under_no_grad(s: Step, h: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        h.copy_(y)
    return h


def write_through_detach(s: Step, h: Tensor, y: Tensor) -> Tensor:
    h.detach()[:, 0].mul_(2)
    return h


def write_input(s: Step, h: Tensor, y: Tensor) -> Tensor:
    y += 1
    return h


def write_view_of_input(s: Step, h: Tensor, y: Tensor) -> Tensor:
    y[:, 0] = 1
    return h


def write_attribute(s: Step, h: Tensor, y: Tensor) -> Tensor:
    s.table.to(h.dtype)[0] += 1
    return h + s.table


def write_parameter_by_chance(s: Step, h: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        s.a.weight.add_(torch.randn(4))
    return h


def write_parameter_between(s: Step, h: Tensor, y: Tensor) -> Tensor:
    h = h @ s.b.weight.clone()
    with torch.no_grad():
        s.b.weight.clamp_(-1, 1)
    return h


def write_parameter_by_another(s: Step, h: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        s.b.weight.lerp_(s.attention.out_proj.weight, 0.1)
    return h


def write_buffer_by_several(s: Step, h: Tensor, y: Tensor) -> Tensor:
    s.scale.copy_((s.a.bias + s.b.bias).detach())
    return h


def write_buffer_with_gradient(s: Step, h: Tensor, y: Tensor) -> Tensor:
    s.scale.copy_(s.b.weight.mean(0))
    return h


def write_buffer_that_a_gradient_needs(s: Step, h: Tensor, y: Tensor) -> Tensor:
    h = torch.mul(*torch.broadcast_tensors(h, s.scale.view(-1)))
    s.scale.data.mul_(0.5)
    return h


def write_in_checkpoint(s: Step, h: Tensor, y: Tensor) -> Tensor:
    return checkpoint(lambda t: t * s.scale.add_(1), h, use_reentrant=False)


def write_what_is_a_number(s: Step, h: Tensor, y: Tensor) -> Tensor:
    h = h * s.scale[0].item()
    s.scale += 1
    return h


def resize(s: Step, h: Tensor, y: Tensor) -> Tensor:
    z = y.clone()
    z.resize_(2, 2)
    return h + z.sum()


def write_expanded(s: Step, h: Tensor, y: Tensor) -> Tensor:
    h[:, :1].expand(-1, 4).unsqueeze(0)[0].add_(1)
    return h


@pytest.mark.parametrize(
    ("middle", "says"),
    [
        (write_under_no_grad, "aten.clamp_.default: it writes under no_grad"),
        (copy_under_no_grad, "aten.copy_.default: it writes under no_grad"),
        (write_through_detach, "through a detached tensor, into a value that requires grad"),
        (write_input, "into the input 'y' in place; clone it first"),
        (write_view_of_input, "into the input 'y' in place"),
        (write_attribute, "changes the constant 'table'"),
        (write_parameter_by_chance, r"changes the parameter 'a.weight' by .* drawn; do that after"),
        (write_parameter_between, r"changes the parameter 'b.weight', which forward also reads as it was before"),
        (write_parameter_by_another, r"changes the parameter 'b.weight' by another, 'attention.out_proj.weight'; do"),
        (
            write_buffer_by_several,
            r"the buffer 'scale' by 2 parameters that are trained, .* ranks \('b.bias', 'a.bias', ",
        ),
        (write_buffer_with_gradient, r"'scale' to a value that requires grad, .*write it under torch.no_grad\(\)"),
        (write_buffer_that_a_gradient_needs, r"'scale', which the gradient of aten.mul.Tensor needs as it was, in mod"),
        (write_in_checkpoint, "changes the buffer 'scale' within a checkpoint, whose backward would write again"),
        (write_what_is_a_number, "forward reads 'scale' as a number, and writes into it"),
        (resize, "aten.resize_.default: no functional form"),
        (write_expanded, "view aten.expand.default has no functional form"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_writes_that_a_graph_cannot_say_are_refused(middle: Middle, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        fxpipe.compile(Step(middle), 2, example_inputs=batch())


def test_write_that_nobody_reads_is_no_reason_to_refuse() -> None:
    def middle(s: Step, h: Tensor, y: Tensor) -> Tensor:
        z = h * 2
        with torch.no_grad():
            h.zero_()
        return z

    exact(Step(middle), batch())


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t[1:],
    lambda t: t[:, ::2],
    lambda t: t[-1],
    lambda t: t.select(-1, 0),
    lambda t: t.transpose(0, -1),
    lambda t: t.reshape(-1),
    lambda t: t.unsqueeze(0),
    lambda t: t.flatten(),
    lambda t: t.contiguous(),
    lambda t: t.narrow(0, 0, 1),
    lambda t: t.view_as(t),
]
WRITES: list[Callable[[Tensor, Tensor], Any]] = [
    lambda t, other: t.mul_(1.5),
    lambda t, other: t.add_(other.sum()),
    lambda t, other: t.copy_(other.mean() + t.detach()),
    lambda t, other: t.fill_(0.25),
    lambda t, other: t.neg_(),
]


class Script(nn.Module):
    """Views and writes in a given order; the loss reads every tensor that was made."""

    def __init__(self, lines: list[tuple[int, int, int]]) -> None:
        super().__init__()
        self.lines = lines
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        tensors = [self.weight * x[0], self.weight + x[1]]
        for what, a, b in self.lines:
            one, other = tensors[a % len(tensors)], tensors[b % len(tensors)]
            if what < len(VIEWS) and one.ndim >= 2:
                tensors.append(VIEWS[what](one))
            else:
                WRITES[what % len(WRITES)](one, other)
        return sum(((i + 1.0) * t.sin().sum() for i, t in enumerate(tensors)), x.sum())


LINES = st.lists(
    st.tuples(st.integers(0, len(VIEWS) + 6), st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=12
)


@settings(max_examples=10)
@given(LINES)
def test_random_views_and_writes_give_what_eager_gives(lines: list[tuple[int, int, int]]) -> None:
    model, x = Script(lines), torch.randn(2, 3, 4, dtype=torch.float64)
    try:
        expected = model(x)
    except IndexError:  # the last of nothing
        reject()
    (gradient,) = torch.autograd.grad(expected, model.weight)
    spec, examples = describe(model, (x,), {}, None)
    captured = capture(ModelCall(model, spec, examples))
    run = fx.Interpreter(fx.GraphModule(nn.Module(), captured.graph))
    given_ = [model.weight if n.meta["kind"] == "parameter" else x for n in captured.graph.find_nodes(op="placeholder")]
    loss = run.run(*given_)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    found = torch.autograd.grad(loss, model.weight)[0]
    torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12, equal_nan=True)  # the mean of nothing is none
