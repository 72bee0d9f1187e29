"""Autograd functions of a model's own: their gradients in any layout, and the backwards that are refused."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fxpipe
from fxpipe.errors import CaptureError, CompileError
from tests.steps import Middle, Step, Steps, batch, exact

aten = torch.ops.aten


def function(forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """The `apply` of an autograd function."""
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Own", (torch.autograd.Function,), methods).apply  # type: ignore[attr-defined]


def saving(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Of tensors, all of which its context saves, and then the result."""

    def around(ctx: Any, *given: Tensor) -> Any:
        result = forward(*given)
        ctx.save_for_backward(*given, result)
        return result

    return around


def into_zeros(ctx: Any, grad: Tensor) -> Tensor:
    whole = torch.zeros(grad.shape[0], 4, dtype=grad.dtype)
    whole[:, 1:] = grad
    return whole


def zeroed_at(grad: Tensor, weight: Tensor) -> Tensor:
    grad[weight.abs() < 0.2] = 0
    grad[0] = 0
    grad[:, torch.tensor([1, 3])] = 0
    grad[:, 1:3].zero_()
    grad.fill_diagonal_(0)
    return torch.where(weight > 0.3, torch.cat([grad[:2], torch.zeros_like(grad[2:])]), grad)


def lookup(added: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Middle:
    """Rows of a weight, whose gradient is given zeros, numbers [batch] and gradients [batch, 4] to add there."""

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        ids = ctx.saved_tensors[0]
        return None, added(torch.zeros(4, 4, dtype=grad.dtype), ids, grad)  # type: ignore[return-value]

    rows = function(lambda ctx, ids, w: (ctx.save_for_backward(ids), w[ids])[1], backward)
    return lambda s, h, y: h + rows((10 * y[:, 0]).long().remainder(4), s.a.weight)


def again(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    """As checkpoints of old do: runs the function a second time, and asks autograd for its gradients."""
    given = [one.detach().requires_grad_() for one in ctx.given]
    with torch.enable_grad():
        result = ctx.run(*given)
    found = torch.autograd.grad(result, given + ctx.weights, grads)
    del ctx.given, ctx.weights
    return None, *found


def into_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
    x = ctx.x.detach().requires_grad_()
    with torch.enable_grad():
        result = ctx.run(x)
    result.backward(grad)
    return x.grad, None


def once(ctx: Any, run: Any, x: Tensor, *weights: Tensor) -> Any:
    ctx.run, ctx.given, ctx.weights = run, [x], list(weights)
    return run(x)


straight = function(lambda ctx, x: x.round(), lambda ctx, grad: grad)
reversed_gradient = function(lambda ctx, x: x.view_as(x), lambda ctx, grad: -0.3 * grad)
clamped = function(lambda ctx, x: x.clone(), lambda ctx, grad: grad.clamp(-1e-2, 1e-2))
exponential = function(saving(torch.exp), lambda ctx, grad: grad * ctx.saved_tensors[1])
linear = function(
    saving(F.linear),
    lambda ctx, grad: (grad @ ctx.saved_tensors[1], grad.t() @ ctx.saved_tensors[0], grad.sum(0)),
)
product = function(
    saving(torch.mm), lambda ctx, grad: (grad @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ grad)
)
waves = function(
    lambda ctx, x: (ctx.save_for_backward(x), x.sin(), x.cos(), x.argmax(1))[1:],
    lambda ctx, sin, cos, place: sin * ctx.saved_tensors[0].cos() - cos * ctx.saved_tensors[0].sin(),
)
unlike = function(
    lambda ctx, x: (results := (2 * x, 3 * x), ctx.mark_non_differentiable(results[1]))[0],
    lambda ctx, two, three: 2 * two,
)
masked = function(
    lambda ctx, x: (vars(ctx).update(away=x < 0), x.relu())[1], lambda ctx, grad: grad.masked_fill_(ctx.away, 0)
)
binary = function(saving(torch.sign), lambda ctx, grad: grad.tril().masked_fill(ctx.saved_tensors[0].abs() > 0.3, 0))
zeroed = function(
    saving(F.linear),
    lambda ctx, grad: (grad @ ctx.saved_tensors[1], zeroed_at(grad.t() @ ctx.saved_tensors[0], ctx.saved_tensors[1])),
)
kinds = function(
    lambda ctx, x: (ctx.set_materialize_grads(False), 2 * x, "a", x.argmax())[1:],
    lambda ctx, two, name, place: 3 * two if name is place is None else two,
)
called = function(lambda ctx, x, module: module(x), lambda ctx, grad: (grad, None))
cut = function(lambda ctx, x: x[:, 1:].clone(), into_zeros)
checkpointed = function(once, again)
given = function(
    lambda ctx, x, other, grad: (ctx.save_for_backward(grad), x.clone())[1],
    lambda ctx, grad: (grad, ctx.saved_tensors[0], None),
)
itself = function(lambda ctx, x: (ctx.save_for_backward(x), x.clone())[1], lambda ctx, grad: ctx.saved_tensors[0])
losing = function(lambda ctx, x, loss: x.clone(), lambda ctx, grad: (grad, grad.new_full((), 0.3)))


def beside(gradient: Callable[[Tensor], Tensor]) -> Any:
    """The first of two tensors, whose gradient makes that of the second, too."""
    return function(lambda ctx, x, other: x.clone(), lambda ctx, grad: (grad, gradient(grad)))


def convolved(s: Step, x: Tensor) -> Tensor:
    return F.group_norm(F.conv1d(x[:, None], s.a.weight.view(4, 1, 4), s.a.bias, padding=2), 2).mean(1)[:, :4]


EXACT: dict[str, Middle] = {
    "straight-through": lambda s, h, y: straight(3 * h),
    "changed in place": lambda s, h, y: F.relu(straight(3 * h), inplace=True),
    "reversed": lambda s, h, y: reversed_gradient(h),
    "clamped": lambda s, h, y: clamped(h),
    "saved result": lambda s, h, y: exponential(h),
    "weights": lambda s, h, y: linear(h, s.a.weight, s.a.bias),
    "of weights": lambda s, h, y: h @ product(s.a.weight, s.a.weight),
    "several": lambda s, h, y: (lambda sin, cos, place: sin - cos * place[:, None])(*waves(h)),
    "one of several": lambda s, h, y: waves(h)[1],
    "in place": lambda s, h, y: F.pad(cut(h), (1, 0)),
    "again, of convolutions": lambda s, h, y: checkpointed(lambda x: convolved(s, x), h, *s.a.parameters()),
    "one of several kinds": lambda s, h, y: kinds(h)[0],
    "of weights, under a mask": lambda s, h, y: h @ binary(s.a.weight),
    "of weights, zeroed": lambda s, h, y: zeroed(h, s.a.weight),
    "of rows, by index_add": lookup(lambda zeros, ids, grad: zeros.index_add_(0, ids, grad)),
    "of rows, by scatter_add": lookup(
        lambda zeros, ids, grad: zeros.scatter_add(0, ids[:, None].expand_as(grad), grad)
    ),
    "of rows, by index_put": lookup(lambda zeros, ids, grad: zeros.index_put_((ids,), grad, accumulate=True)),
    "of rows, by embedding": lookup(lambda zeros, ids, grad: aten.embedding_dense_backward(grad, ids, 4, -1, False)),
    "of a loss of its own": lambda s, h, y: losing(losing(h, s.a(h).square().mean()), h.exp().sum() / len(h) ** 2),
    "of a loss of weights": lambda s, h, y: losing(losing(h, s.a.weight.square().sum()), s.a.bias.norm() / len(h)),
    "of samples' shares": lambda s, h, y: beside(lambda grad: grad * len(grad))(h, s.a(h) / len(h)),
    "of saved values alone": lambda s, h, y: given(h, s.a(h).mean(), y.sum()),
    "of what it is given": lambda s, h, y: itself(s.a(h)),
    "not differentiable": lambda s, h, y: h * unlike(s.a(h))[1],
    "weights that it is not given": lambda s, h, y: h + called(y, s.a),
    "again, of what a cast leaves": lambda s, h, y: checkpointed(
        lambda x: F.silu(s.a(x.double())), h, *s.a.parameters()
    ),
    "again": lambda s, h, y: checkpointed(lambda x: F.silu(s.a(x)), h, *s.a.parameters()),
}


@pytest.mark.parametrize("first", range(5))
def test_gradients_are_torchs(first: int) -> None:
    model = Steps(dict([*EXACT.items()][first::5]))
    program = exact(model, batch(), microbatches=3, schedule="1f1b")
    assert program.plan.staged.num_stages == 2
    found = program.run_local(*batch()).gradients
    model(*batch()).backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.allclose(found[name], gradient, rtol=1e-10, atol=1e-14), name


def in_float32(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, weight, _ = ctx.saved_tensors
    grad = grad.to(weight.dtype)
    return (grad @ weight).to(x.dtype), grad.t() @ x.to(weight.dtype)


def test_backwards_run_outside_of_the_autocast_of_forward() -> None:
    product = function(saving(lambda x, weight: x.to(weight.dtype) @ weight.t()), in_float32)
    model, inputs = Step(lambda s, h, y: product(h, s.a.weight), torch.float32), batch(dtype=torch.float32)
    program = fxpipe.compile(model, 2, example_inputs=inputs, microbatches=1, precision="bf16", budget=0)
    found = program.run_local(*inputs).gradients
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*inputs)
    loss.backward()
    assert all(torch.equal(found[name], p.grad) for name, p in model.named_parameters() if p.grad is not None)


def test_other_threads_are_left_alone_while_forward_is_traced() -> None:
    def beside() -> None:
        torch.manual_seed(0)
        x = torch.ones(2, requires_grad=True)
        reversed_gradient(x).sum().backward()
        found.put(x.grad)

    def middle(s: Step, h: Tensor, y: Tensor) -> Tensor:
        thread = Thread(target=beside)
        thread.start()
        thread.join()
        return straight(3 * h)

    found: SimpleQueue[Tensor | None] = SimpleQueue()  # a list would be put back, as what forward keeps
    exact(Step(middle), batch(), microbatches=2)
    gradients = [found.get() for _ in range(found.qsize())]
    assert gradients
    assert all(grad is not None and torch.equal(grad, torch.full((2,), -0.3)) for grad in gradients)


normed = function(lambda ctx, x: x.clone(), lambda ctx, grad: grad / grad.norm())
signed = function(lambda ctx, x: x.clone(), lambda ctx, grad: grad.sign())
filled = function(lambda ctx, x: x.clone(), lambda ctx, grad: grad.masked_fill(grad.new_ones(4) > 0, 1.0))
rounded = function(lambda ctx, x: x.clone(), lambda ctx, grad: grad.to(torch.bfloat16).to(grad.dtype))
noisy = function(lambda ctx, x: x.clone(), lambda ctx, grad: grad * torch.rand_like(grad))
decided = function(lambda ctx, x: x.clone(), lambda ctx, grad: grad if grad.sum() > 0 else -grad)
without_none = function(
    lambda ctx, x: (ctx.set_materialize_grads(False), 2 * x, 3 * x)[1:],
    lambda ctx, two, three: two * 7 if three is None else 2 * two + 3 * three,
)
keeping = function(lambda ctx, x, y: (vars(ctx).update(y=y), x * y)[1], lambda ctx, grad: (grad * ctx.y, None))
adding = function(lambda ctx, x, module: (vars(ctx).update(x=x, run=module), module(x))[1], into_grad)
twice = function(lambda ctx, x: (2 * x,) * 2, lambda ctx, one, other: 2 * one + other)
dirty = function(lambda ctx, x: (ctx.mark_dirty(x), x.mul_(2))[1], lambda ctx, grad: 2 * grad)


MIXING: list[tuple[Middle, str]] = [
    (lambda s, h, y: normed(h), "in the backward of Own, aten.linalg_vector_norm.default: it acts along"),
    (lambda s, h, y: h @ signed(s.a.weight), "in the backward of Own, aten.sign.default: it is not linear"),
    (lambda s, h, y: h @ rounded(s.a.weight), "aten.to.dtype: it rounds a sum over samples to torch.bfloat16"),
    (lambda s, h, y: h @ filled(s.a.weight), "aten.masked_fill.Scalar: .* one of another scale into one"),
    (lookup(lambda zeros, ids, grad: (zeros + 1).index_add(0, ids, grad)), "add it to zeros"),
    (lookup(lambda zeros, ids, grad: zeros.index_put((ids,), grad)), "it writes samples by number"),
    (lookup(lambda zeros, ids, grad: zeros.index_add(0, ids, grad)[ids].sum(0).expand(4, 4)), "combines samples"),
    (lambda s, h, y: beside(lambda grad: grad.sum())(h, s.a(h).sum()), "gives no sum over samples"),
    (lambda s, h, y: beside(lambda grad: grad.sum())(h, s.a(h).mean()), "gives no sum over samples"),
    (lambda s, h, y: beside(lambda grad: grad / len(grad))(h, s.a(h) / len(h)), "or not each sample's own"),
    (lambda s, h, y: beside(lambda grad: grad.sum(0))(h, s.a.bias / len(h)), "gives no sum over samples"),
]


@pytest.mark.parametrize(("middle", "says"), MIXING)
def test_backwards_that_mix_samples_are_refused_in_micro_batches(middle: Middle, says: str) -> None:
    with pytest.raises(CompileError, match=says):
        fxpipe.compile(Step(middle), 2, example_inputs=batch(), microbatches=2)


def test_backwards_that_mix_samples_run_on_the_whole_batch() -> None:
    exact(Steps({str(number): middle for number, (middle, _) in enumerate(MIXING)}), batch(), microbatches=1)


def written_later(s: Step, h: Tensor, y: Tensor) -> Tensor:
    y = y.clone()
    h = keeping(h, y)
    y[:, 1:].add_(1)
    return h


@pytest.mark.parametrize(
    ("middle", "says"),
    [
        (lambda s, h, y: without_none(h)[0], "its backward may get None for one of its results"),
        (lambda s, h, y: masked(h), "the backward of Own writes into what it is given; clone it first"),
        (lambda s, h, y: adding(h, s.a), "the backward of an autograd function adds to .grad of weights"),
        (lambda s, h, y: sum(twice(h)), "it returns one tensor twice"),
        (written_later, "what its backward reads is written to after it has run"),
        (lambda s, h, y: noisy(h), "the autograd function Own hides its gradient .* its backward draws random numbers"),
        (lambda s, h, y: decided(h), "decides by the value of a tensor at"),
        (lambda s, h, y: dirty(h * 1), "the autograd function Own .* writes into what it is given"),
        (
            lambda s, h, y: torch.func.grad(lambda x: straight(x).sum())(h),
            "autograd.Function with functorch transforms",
        ),
    ],
)
def test_refused_backwards(middle: Middle, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        fxpipe.compile(Step(middle), 2, example_inputs=batch())


def test_a_weight_that_a_backward_alone_reads_is_recomputed_around() -> None:
    reading = function(
        lambda ctx, x, layer: (vars(ctx).update(w=layer.bias), x.clone())[1], lambda ctx, g: (g * ctx.w, None)
    )
    exact(Step(lambda s, h, y: s.a(reading(h, s.norm))), batch(), microbatches=2, recompute=True)
