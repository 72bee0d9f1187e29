"""Capture: inputs, outputs, batch sizes, regions; what a graph cannot say is refused in one clear sentence."""

import json
import random
import re
import uuid
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import Node
from torch.compiler import is_compiling
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from transformers import BatchEncoding
from transformers.utils.import_utils import is_tracing

import fxpipe
from fxpipe.capture import Capture, capture, private
from fxpipe.capture.fingerprint import graph_fingerprint
from fxpipe.capture.inputs import call_of, describe
from fxpipe.capture.model_call import ModelCall
from fxpipe.capture.surroundings import Surroundings
from fxpipe.errors import CaptureError, CompileError
from fxpipe.options import given_device
from fxpipe.run.verification import Tolerance, compare, tolerance_of
from tests.steps import Middle, Step, batch, exact


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def captured(model: nn.Module, inputs: Any) -> Capture:
    return capture(ModelCall(model, *describe(model, *call_of(inputs), None)))


class Small(nn.Module):
    """Two layers; a test gives the rest of forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    def run(self, x: Tensor) -> Tensor:
        return self.b(F.silu(self.a(x)))  # type: ignore[no-any-return]


# Batch sizes


def per_sample(s: Step, h: Tensor, y: Tensor) -> Tensor:
    for _ in [(2, 2)] * h.shape[0]:
        h = h * 1.1
    return h


def test_what_divides_by_the_rows_of_a_part_of_the_batch_is_priced() -> None:
    def middle(s: Step, h: Tensor, y: Tensor) -> Tensor:  # of frozen values; one sample has no pair
        return h * y.reshape(-1, 2, 4).repeat_interleave(2, 0).flatten(0, 1)[: y.shape[0]]

    exact(Step(middle), batch(), microbatches=6)


class ByName(Small):
    """Takes whatever it is given by name."""

    def forward(self, **batch: Tensor) -> Tensor:
        return (self.run(batch["x"]) * batch["factor"]).square().mean()


def test_the_first_of_inputs_by_name_has_the_batch() -> None:
    assert describe(ByName(), (), {"x": noise(6, 4), "factor": noise(1)}, None)[0].batch_size == 6


class Warmed(Small):
    def forward(self, **batch: Tensor) -> Tensor:
        return self.run(batch["x"]).square().mean() * (batch["step"] / 10).clamp(max=1.0)


def test_an_input_by_name_is_none_of_verifications_own() -> None:
    exact(Warmed(), {"x": noise(6, 4), "step": torch.tensor(3)}, microbatches=2)


def is_number_to_json(size: Any) -> bool:
    try:
        return bool(json.dumps(size))
    except TypeError:
        return False


def when(test: Callable[[int], bool]) -> Middle:
    return lambda s, h, y: h * 2 if test(h.shape[0]) else h * 3


@pytest.mark.parametrize(
    ("middle", "fixed"),
    [
        (per_sample, True),
        (lambda s, h, y: torch.cat([h[i : i + 1] * (i + 1) for i in range(h.shape[0])]), True),
        (when(lambda size: size == 6), True),
        (when(lambda size: numpy.array([size, 2]).dtype == numpy.int64), True),
        (when(lambda size: len(str(torch.Size([size, 4]))) == 18), True),
        (when(is_number_to_json), True),
        (lambda s, h, y: h * 2 if len(h) is len(y) else h, True),
        (lambda s, h, y: h * 2 if str(h.shape) else h, False),
        (lambda s, h, y: h * ([(1.1, 2)] * h.shape[0])[0][0], False),
        (when(lambda size: size == 5), False),
        (when(lambda size: size > 4), False),
        (when(lambda size: size > 9), False),
        (when(lambda size: size % 2 == 0), False),
        (when(lambda size: isinstance(size, int)), False),
        (when(lambda size: type(size) is int), False),
    ],
)
def test_batch_sizes_that_forward_asks_for(middle: Middle, fixed: bool) -> None:
    program = exact(Step(middle), batch(), microbatches=None if fixed else 3)
    assert len(program.plan.microbatch_sizes) == (1 if fixed else 3)
    assert (not program.capture.batch) == fixed
    if fixed:
        assert "only batches of 6, in one micro-batch" in program.capture.notes[0]
        assert "test_capture.py:" in program.capture.notes[0]
        assert program.capture.notes[0] in program.plan.notes


def test_fixed_batch_takes_one_microbatch() -> None:
    with pytest.raises(CompileError, match=r"only batches of 6.*cut into 2 micro-batches: pass microbatches=1"):
        fxpipe.compile(Step(per_sample), 2, example_inputs=batch(), microbatches=2)


@pytest.mark.parametrize(("size", "microbatches"), [(1, None), (2, 2), (5, 3), (7, 4)])
def test_any_batch_in_any_microbatches(size: int, microbatches: int | None) -> None:
    exact(Step(lambda s, h, y: h.softmax(-1)), batch(size), microbatches=microbatches)


class WithTable(Small):
    """The table's rows are as many as the samples in some of the tests."""

    def forward(self, x: Tensor, table: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.run(x) + table[None], y)


def test_unbatched_input_with_as_many_rows_as_samples() -> None:
    program = exact(WithTable(), (noise(6, 6, 4), noise(6, 4), noise(6, 6, 4)), microbatches=3)
    assert [leaf.name for leaf in program.capture.inputs.leaves if leaf.batched] == ["x", "y"]


# Inputs


@dataclass
class Inputs:
    x: Tensor
    extra: dict[str, Tensor]
    scale: float = 1.0


Pair = namedtuple("Pair", "x y")


class Nested(Small):
    def forward(self, inputs: Inputs, pairs: list[Any], *rest: Tensor) -> Tensor:
        x = self.run(inputs.x) * inputs.scale + inputs.extra["text"]
        for value in rest:
            x = x * value
        return F.mse_loss(x + pairs[0].x, pairs[0].y)


def test_nested_inputs() -> None:
    inputs = Inputs(noise(6, 4), {"text": noise(6, 4)}, 2.0)
    program = exact(Nested(), (inputs, [Pair(noise(6, 4), noise(6, 4))], noise(6, 4)))
    names = ["inputs.x", "inputs.extra.text", "inputs.scale", "pairs.0.x", "pairs.0.y", "args_2"]
    assert [leaf.name for leaf in program.capture.inputs.leaves] == names


class OfText(Small):
    """Of tensors by name, within an input."""

    def forward(self, text: Mapping[str, Tensor], y: Tensor) -> Tensor:
        return F.mse_loss(self.run(text["x"]) + text["more"], y)


@pytest.mark.parametrize("kind", [BatchEncoding, UserDict, MappingProxyType, partial(defaultdict, None)])
def test_mappings_of_any_kind_are_inputs(kind: Callable[[Any], Any]) -> None:
    x, more, y = noise(6, 4), noise(6, 4), noise(6, 4)
    program = exact(OfText(), {"text": kind({"x": x, "more": more}), "y": y})
    assert [leaf.name for leaf in program.capture.inputs.leaves] == ["text.x", "text.more", "y"]
    assert program.verify(text=kind({"more": more, "x": x}), y=y).ok


class OfList(Small):
    def forward(self, xs: list[Tensor], y: Tensor) -> Tensor:
        return F.mse_loss(torch.stack([self.run(x).mean(0) for x in xs]), y)


def test_a_ragged_list_is_told_as_such() -> None:
    inputs = [noise(1, 4), noise(2, 4), noise(3, 4)], noise(3, 4)
    with pytest.raises(CompileError, match=r"input xs is ragged: .*xs.1': \(2, 4\).*pad its tensors to one size"):
        fxpipe.compile(OfList(), 2, example_inputs=inputs)
    exact(OfList(), inputs, batch_size=3, microbatches=1)


class Options(Small):
    def forward(self, x: Tensor, *, y: Tensor, mode: str = "a", weight: Tensor | None = None, **more: Any) -> Tensor:
        x = self.run(x) * 2 if mode == "b" else self.run(x)
        return F.mse_loss(x if weight is None else x * weight, y)


GOOD = {"x": noise(6, 4), "y": noise(6, 4)}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mode": "b"}, "input mode was compiled as 'a', called with 'b'.*leave it out of batches"),
        ({"weight": noise(6, 4)}, r"input weight was compiled as None, called with a tensor \[6, 4\]"),
        ({"extra": noise(6, 4)}, r"inputs \['x', .*'extra'\] are not the compiled ones"),
        ({"x": noise(6, 5)}, r"a batch of x \[6, 5\], y \[6, 4\]: compiled are batches of x \[6, 4\], y \[6, 4\];"),
        ({"x": noise(6, 5, 4)}, r"input x must be \['batch', 4\] torch.float64, got \[6, 5, 4\]"),
        ({"x": noise(6, 4).float()}, r"got \[6, 4\] torch.float32"),
        ({"x": None}, "input x must be a tensor, got NoneType"),
        ({"x": noise(5, 4)}, "inputs disagree on the batch size"),
        ({"x": noise(7, 4), "y": noise(7, 4)}, "the batch has 7 samples, the program was compiled for 6: compile with"),
    ],
)
def test_calls_that_differ_from_the_compiled_one(change: dict[str, Any], says: str) -> None:
    program = fxpipe.compile(Options(), 1, example_inputs=GOOD, shapes="fixed")
    with pytest.raises(CompileError, match=says):
        program.run_local(**GOOD | change)
    with pytest.raises(CompileError, match="missing a required"):
        program.run_local(y=noise(6, 4))


@pytest.mark.parametrize("value", [nn.Linear(2, 2), object(), noise(6, 4).numpy(), {1, 2}])
def test_inputs_that_hide_what_is_inside_are_refused(value: Any) -> None:
    with pytest.raises(CompileError, match=f"input extra is a {type(value).__name__}: an input must be"):
        fxpipe.compile(Options(), 2, example_inputs=GOOD | {"extra": value})


class Mixed(Small):
    def forward(self, x: Tensor, t: Tensor, i: Tensor, none: None, flag: bool, y: Tensor) -> Tensor:
        return F.mse_loss(self.run(x) * t + i, y * 2 if flag else y)


@pytest.mark.parametrize(
    "x", [noise(6, 4).requires_grad_(), noise(4, 6).t(), noise(1, 4).expand(6, 4), noise(6, 8)[:, ::2]]
)
def test_example_tensors_of_any_kind(x: Tensor) -> None:
    exact(Mixed(), (x, noise(), torch.arange(6)[:, None], None, True, noise(6, 4)))


def test_nested_keys_in_any_order() -> None:
    class Nest(Small):
        def forward(self, batch: dict[str, Any], y: Tensor) -> Tensor:
            first, second = batch.values()  # in the order of the compiled call
            return F.mse_loss(self.run(first) * 2 + second["text"] - second["image"], y)

    x, text, image, y = noise(6, 4), noise(6, 4), noise(6, 4), noise(6, 4)
    inputs = {"batch": {"x": x, "more": {"text": text, "image": image}}, "y": y}
    program = exact(Nest(), inputs)
    other = {"batch": {"more": {"image": image, "text": text}, "x": x}, "y": y}
    assert program.run_local(**other).loss == program.run_local(**inputs).loss
    with pytest.raises(CompileError, match=r"inputs \['batch.x', 'batch.more.image', 'y'\] are not the compiled ones"):
        program.run_local(batch={"more": {"image": image}, "x": x}, y=y)


@dataclass(frozen=True)
class Counted:
    """A dataclass with a field that its constructor does not take."""

    x: Tensor
    y: Tensor
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", 4)


def test_dataclasses_leave_no_trace_in_torch() -> None:
    class Reads(Small):
        def forward(self, pair: Counted) -> Tensor:
            assert isinstance(pair, Counted)
            return F.mse_loss(self.run(pair.x) * pair.rows, pair.y)

    known = set(pytree.SUPPORTED_NODES)
    pair = Counted(noise(6, 4), noise(6, 4))
    for _ in range(2):
        program = exact(Reads(), (pair,))
    assert [leaf.name for leaf in program.capture.inputs.leaves] == ["pair.x", "pair.y", "pair.rows"]
    assert set(pytree.SUPPORTED_NODES) == known
    assert pytree.tree_leaves(pair) == [pair]


# What the model and the inputs are made of


def linear(**options: Any) -> nn.Module:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4, dtype=torch.float64, **options)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.a(x), y)

    return Plain()


def fake() -> nn.Module:
    with FakeTensorMode():
        return linear()


def half_on_meta() -> nn.Module:
    step = Step(lambda s, h, y: h)
    step.b.to("meta")
    return step


def lazy() -> nn.Module:
    step = linear()
    step.a = nn.LazyLinear(4)
    return step


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (fake, r"a.weight is a fake tensor; build the model under torch.device\('meta'\)"),
        (torch.inference_mode()(linear), "a.weight was made under inference_mode"),
        (lazy, "a.weight has no shape yet"),
        (half_on_meta, "b.bias is on the meta device, norm.num_batches_tracked is not; materialise all"),
    ],
)
def test_models_without_usable_weights(make: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        fxpipe.compile(make(), 2, example_inputs=batch())


def test_only_shapes_of_example_inputs_are_read() -> None:
    x, y = batch()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    program = fxpipe.compile(linear(), 2, example_inputs=(fake, y.to("meta")))
    assert program.verify(x, y).ok
    for given in ((fake, y), (x, y.to("meta"))):
        with pytest.raises(CompileError, match="holds no values"):
            program.run_local(*given)
    with pytest.raises(CompileError, match="on the meta device"):
        fxpipe.compile(linear(device="meta"), 2, example_inputs=(x, y)).run_local(x, y)
    with pytest.raises(CompileError, match="input x is a sparse_coo tensor; pass a dense one"):
        fxpipe.compile(linear(), 2, example_inputs=(x.to_sparse(), y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_models_of_any_precision(dtype: torch.dtype) -> None:
    exact(Step(lambda s, h, y: h.sigmoid(), dtype), batch(dtype=dtype))


# Outputs


class Returns(Small):
    def __init__(self, output: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.output(F.mse_loss(self.run(x), y), x)


@pytest.mark.parametrize(
    "output",
    [
        lambda loss, x: {"loss": loss, "x": x},
        lambda loss, x: (loss, x),
        lambda loss, x: loss[None],
        lambda loss, x: namedtuple("Output", "x loss")(x, loss),  # type: ignore[call-arg]
        lambda loss, x: OrderedDict(x=x, loss=loss),
    ],
)
def test_losses_in_any_wrapping(output: Callable[[Tensor, Tensor], Any]) -> None:
    exact(Returns(output), (noise(6, 4), noise(6, 4)))


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (lambda loss, x: x, r"\['batch', 4\] torch.float64"),
        (lambda loss, x: None, "NoneType"),
        (lambda loss, x: loss.long(), r"\[\] torch.int64"),
        (lambda loss, x: (x, loss), r"\['batch', 4\]"),
    ],
)
def test_outputs_without_a_loss_are_refused(output: Callable[[Tensor, Tensor], Any], found: str) -> None:
    with pytest.raises(CaptureError, match=f"must return a scalar loss .*got {found}"):
        fxpipe.compile(Returns(output), 2, example_inputs=(noise(6, 4), noise(6, 4)))


def test_assertions_that_no_rank_checks_are_told() -> None:
    def middle(s: Step, h: Tensor, y: Tensor) -> Tensor:
        torch._assert_async(h.isfinite().all(), "not finite")
        torch.ops.aten._functional_assert_async(h.isfinite().all(), "not finite", torch.empty(0))
        torch._check(h.sum().item() < 1e9)
        torch._check(h.shape[1] > 1)
        torch._assert_scalar(h.shape[0] < 99, "many samples")
        return h

    program = exact(Step(middle), batch())
    told = [note.split("aten.")[1] for note in program.plan.notes if "left out" in note]
    names = "_assert_async.msg", "_functional_assert_async.msg", "_assert_scalar.default"
    assert told == [f"{name} is left out: no rank checks it" for name in names]


# Regions


def autocast(s: Step, h: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            frozen = s.a(h)
        with torch.autocast("cpu", enabled=False):
            squares = (h.view(-1, 2, 2) @ h.view(-1, 2, 2)).flatten(1)
        out = s.a(squares)
        out += 1
        out[:, 0] = frozen[:, 0]
    with torch.autocast("cuda", enabled=False):
        return h + out + frozen


def test_no_grad_and_autocast_inside_autocast() -> None:
    program = exact(Step(autocast, torch.float32), batch(dtype=torch.float32))
    marks = [(bool(n.meta.get("no_grad")), n.meta.get("autocast")) for n in program.capture.graph.nodes]
    assert (True, ("cpu", torch.bfloat16, True)) in marks
    assert (False, ("cpu", torch.bfloat16, False)) in marks


@pytest.mark.parametrize(
    "same", [Tensor.double, Tensor.cpu, Tensor.positive, lambda h: h.type_as(h), lambda h: h.flatten(1), Tensor.detach]
)
def test_what_gives_back_its_operand_under_no_grad_leaves_that_its_gradient(same: Callable[[Tensor], Tensor]) -> None:
    def middle(s: Step, h: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(h)
        with torch.no_grad():
            noted = same(h).sin()
        return s.a(h) * noted

    exact(Step(middle), batch(), microbatches=2, schedule="1f1b")


def test_surroundings_of_compile_do_not_matter() -> None:
    with torch.no_grad():
        exact(Step(lambda s, h, y: h * 2), batch())
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CaptureError, match=r"outside torch.autocast"):
        fxpipe.compile(Step(lambda s, h, y: h), 2, example_inputs=batch())


class Remembers(Small):
    """Keeps what it once computed."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not hasattr(self, "angles"):
            self.angles = torch.arange(4).double().cos()
        return F.mse_loss(self.run(x) * self.angles, y)


def test_what_a_forward_that_is_refused_has_added_is_gone() -> None:
    step = Step(added)
    names = [*step.state_dict()]
    with pytest.raises(CaptureError):
        captured(step, batch())
    assert [*step.state_dict()] == names
    step(*batch())
    exact(step, batch())


def test_model_is_as_before() -> None:
    model, inputs = Remembers(), (noise(6, 4), noise(6, 4))
    model.b.eval()
    state = random.getstate(), torch.get_rng_state(), {n: t.clone() for n, t in model.state_dict().items()}
    program = fxpipe.compile(model, 2, example_inputs=inputs)
    assert not hasattr(model, "angles")
    assert program.verify(*inputs).ok
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (model.training, model.b.training) == (True, False)
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])
    assert all(torch.equal(t, state[2][n]) for n, t in model.state_dict().items())


def test_weights_are_frozen_for_a_pass_without_gradients() -> None:
    """As adapters are that are off for a reference."""

    def middle(s: Step, h: Tensor, y: Tensor) -> Tensor:
        s.a.requires_grad_(False)
        with torch.no_grad():
            reference = s.a(y)
        s.a.requires_grad_(True)
        return h * reference + s.a(h)

    model = Step(middle)
    exact(model, batch(), microbatches=2)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_weights_that_are_frozen_for_a_part_of_forward_get_no_gradient_of_it() -> None:
    """As a discriminator's are for its generator's loss."""

    def middle(s: Step, h: Tensor, y: Tensor) -> Tensor:
        for one in (s.a, s.lines, s.attention):
            one.requires_grad_(False)
        seen = s.attention(*[s.lines(s.a(h)[:, None])[0]] * 3)[0][:, 0] + h @ s.a.weight.T
        weight = s.a.weight.contiguous()  # itself
        for one in (s.a, s.lines, s.attention):
            one.requires_grad_(True)
        return seen + h @ weight + s.attention(*[s.lines(s.a(y)[:, None])[0]] * 3)[0][:, 0]

    model = Step(middle)
    model.lines = nn.GRU(4, 4, batch_first=True, dtype=torch.float64)
    exact(model, batch(), microbatches=2)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_reentrant_checkpoints_have_torchs_gradients(given: bool) -> None:
    """None for the weights inside, where nothing that is given has one."""
    model = Step(lambda s, h, y: h + checkpoint(lambda t: F.silu(s.c(t)), h if given else y, use_reentrant=True))
    model.c = nn.Linear(4, 4).double()
    found = exact(model, batch(), microbatches=2).run_local(*batch()).gradients
    model(*batch()).backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert ("c.weight" in wanted) == given
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.allclose(found[name], gradient, rtol=1e-10, atol=1e-14)


def written(s: Step, h: Tensor, y: Tensor) -> Tensor:
    table = torch.zeros(4)
    before = table[:1].clone()
    table[:2].fill_(3.0)
    table[0] += table[1]
    return h * float(table[0]) + before.item()


def written_from_buffer(s: Step, h: Tensor, y: Tensor) -> Tensor:
    table = torch.zeros_like(s.scale)
    table += s.scale
    table[1:] = 2 * s.scale[1:]
    return h * table[0].item() * float(table[2])


@pytest.mark.parametrize(
    "middle",
    [
        lambda s, h, y: h * float(torch.linspace(0, 1, 10)[3]),
        lambda s, h, y: h * torch.tensor([1.0, 2.0])[1].item() * torch.arange(4).tolist()[3],
        lambda s, h, y: sum((s.a(h) * time for time in (0.5 * torch.ones(3)).numpy()), h),
        lambda s, h, y: s.a(h) if torch.tensor([1.0, 2.0]).sum() > 1 else h,
        lambda s, h, y: h * s.scale.max().item() * int(s.table.sum()),
        lambda s, h, y: torch.cat(h.split(torch.full((1,), len(h)).tolist())),
        lambda s, h, y: s.drop(h) if torch.rand(1) > 0.0 else h,
        lambda s, h, y: s.drop(h) if torch.rand(1) < 0.0 else h,
        written,
        written_from_buffer,
    ],
)  # fmt: skip
def test_numbers_that_are_known_are_read(middle: Middle) -> None:
    exact(Step(middle), batch(), microbatches=2)


def test_a_size_that_a_truth_is_filled_with_is_no_number() -> None:
    with pytest.raises(CaptureError, match="depends on what a tensor holds"):
        captured(Step(lambda s, h, y: h * torch.full((1,), len(h), dtype=torch.bool).item()), batch())


# Refusals


def hooked(s: Step, h: Tensor, y: Tensor) -> Tensor:
    h.register_hook(lambda gradient: 2 * gradient)
    return h


def penalty(s: Step, h: Tensor, y: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(h.sum(), s.a.weight, create_graph=True)
    return h + gradient.sum()


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def frozen_in_forward(s: Step, h: Tensor, y: Tensor) -> Tensor:
    s.a.requires_grad_(False)
    h = Product.apply(h, s.a.weight)
    s.a.requires_grad_(True)
    return h


def left_frozen(s: Step, h: Tensor, y: Tensor) -> Tensor:
    s.b.requires_grad_(False)
    return h


def hooked_node(s: Step, h: Tensor, y: Tensor) -> Tensor:
    assert h.grad_fn is not None
    h.grad_fn.register_prehook(lambda gradients: tuple(2 * one for one in gradients))
    return h * 1


def kept_otherwise(s: Step, h: Tensor, y: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept.bfloat16(), lambda kept: kept.double()):
        return h * h


def packed(s: Step, h: Tensor, y: Tensor) -> Tensor:
    rows = nn.utils.rnn.pack_padded_sequence(h[:, :, None], torch.full((len(h),), 4), batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(rows, batch_first=True)[0][:, :, 0]


def data_set(s: Step, h: Tensor, y: Tensor) -> Tensor:
    s.a.weight.data = s.a.weight.data / 2
    return s.a(h)


def replaced_buffer(s: Step, h: Tensor, y: Tensor) -> Tensor:
    s.scale = s.scale * 0.9 + h.detach().mean(0)
    return h * s.scale


def added(s: Step, h: Tensor, y: Tensor) -> Tensor:
    if not hasattr(s, "late"):
        s.late = nn.Parameter(torch.ones(4, dtype=h.dtype))
    return h * s.late


@pytest.mark.parametrize(
    ("middle", "says"),
    [
        (added, "forward adds or removes 'late', a parameter of the model"),
        (lambda s, h, y: h if y.sum() > 0 else 2 * h, r"decides by the value of a tensor at .*test_capture.py:\d+"),
        (lambda s, h, y: h * y.sum().item(), "aten.item.default: its result's size or value depends"),
        (lambda s, h, y: h * len(h.repeat(99, 1).tolist()), r"reads the values of a tensor .* by .tolist\(\)"),
        (lambda s, h, y: h * float(h.detach().numpy()[0, 0]), r"reads the values of a tensor .* by .numpy\(\)"),
        (lambda s, h, y: h * numpy.asarray(h.detach()).max(), r"reads the values of a tensor .* by .__array__"),
        (lambda s, h, y: h * float(s.a.weight[0, 0].detach()), "decides by the value of a tensor"),
        (lambda s, h, y: h if torch.rand(1) > 0.5 else s.a(h), "decides by the value of a tensor"),
        (lambda s, h, y: h + y[y > 0].cumsum(0).sum(), "aten.index.Tensor: its result's size or value depends"),
        (lambda s, h, y: h * y[y > -9].reshape(h.shape), "aten.index.Tensor: .*or gather by argsort"),
        (lambda s, h, y: h * y[0].int().bincount().sum(), "aten.bincount.default: its result's size"),
        (lambda s, h, y: h + y.nonzero().sum(), "aten.nonzero.default: its result's size or value depends"),
        (frozen_in_forward, "an autograd function reads a parameter that forward freezes for a while"),
        (left_frozen, "forward sets requires_grad=False on a parameter"),
        (hooked, "a gradient hook on a tensor cannot be captured"),
        (hooked_node, "a gradient hook on a tensor cannot be captured"),
        (kept_otherwise, "hooks on the tensors that a backward keeps"),
        (lambda s, h, y: h.as_strided(h.shape, (1, 6)), r"calls as_strided\(\) at .*may lie otherwise in memory"),
        (lambda s, h, y: h + (y * (y > 0)).to_sparse().to_dense(), "to_sparse.default: its result is no dense tensor"),
        (penalty, "gradients computed inside forward"),
        (packed, r"packed sequences have sizes that lengths decide; run the recurrent layer on the padded ones"),
        (data_set, r"forward sets the .data of a tensor.*copy_ under torch.no_grad\(\)"),
        (replaced_buffer, r"forward replaces its buffer 'scale'.*write into it \(copy_, add_\)"),
        (lambda s, h, y: s.a(h[:, :3]), r"module a: forward fails at .*linear.py:|module a: forward fails"),
        (lambda s, h, y: checkpoint(s.a, h[:, :3], use_reentrant=False), r"module a: forward fails.*reduction dim"),
    ],
)  # fmt: skip
def test_refusals(middle: Middle, says: str) -> None:
    with pytest.raises(CaptureError, match=says) as error:
        captured(Step(middle), batch())
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
    assert str(error.value).startswith("module ")


class Padded(nn.Module):
    """A frozen encoder of padded samples, whose places are averaged, padded ones too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2).double()
        self.encoder.requires_grad_(False).eval()
        self.last = nn.Linear(4, 4).double()

    def forward(self, x: Tensor, y: Tensor, padding: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.encoder(x, src_key_padding_mask=padding).mean(1)), y)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_that_leaves_out_padding_by_the_masks_values_is_refused() -> None:
    model, inputs = Padded(), {"x": noise(4, 3, 4), "y": noise(4, 4), "padding": torch.zeros(4, 3, dtype=torch.bool)}
    inputs["padding"][1, 1:] = True
    with pytest.raises(CaptureError, match=r"module encoder: .* set its use_nested_tensor = False"):
        fxpipe.compile(model, 2, example_inputs=inputs)
    zeros = model(**inputs).item()
    model.encoder.use_nested_tensor = False
    report = exact(model, inputs, microbatches=2).verify(**inputs)
    assert report.loss == pytest.approx(model(**inputs).item(), rel=1e-10)
    assert report.loss != pytest.approx(zeros, rel=1e-3)


def test_an_array_is_told_as_such() -> None:
    with pytest.raises(CompileError, match="input x is a ndarray: an input must be a tensor"):
        fxpipe.compile(Step(lambda s, h, y: h), 2, example_inputs=(numpy.ones((4, 4)), numpy.ones((4, 4))))


@pytest.mark.parametrize("middle", [lambda s, h, y: h if y.sum() > 0 else 2 * h, lambda s, h, y: s.a(h[:, :3])])
def test_failed_trials_leave_no_noise_and_no_hooks(middle: Middle, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError):
        captured(Step(middle), batch())
    assert capfd.readouterr() == ("", "")
    private.require_no_modes(AssertionError)


@pytest.mark.parametrize(
    "middle",
    [
        lambda s, h, y: s.norm.eval()(h),
        lambda s, h, y: h / s.a.weight.data.norm() + (h.data.round() - h.data),
        lambda s, h, y: h if h.is_contiguous() and y.is_contiguous() else h.contiguous(),
        lambda s, h, y: h.view(-1, 2, 2).flatten(1) if h.stride()[1] == 1 else h.reshape(-1, 2, 2).flatten(1),
        lambda s, h, y: h * s.a.weight.as_strided((4,), (5,)),
        lambda s, h, y: h * (2 if type(h) is Tensor and type(s.a.weight) is nn.Parameter else 3),
        lambda s, h, y: h if torch.compiler.is_compiling() or torch.compiler.is_exporting() else 2 * h,
        lambda s, h, y: h if torch.compiler.is_compiling() or y.sum() < 99 else 2 * h,
        lambda s, h, y: h * (2 if torch.compiler.is_compiling() is False else 3) * (2 + (is_compiling() | False)),
        lambda s, h, y: h if is_tracing(h) in (True, False) else s.a(h),
        lambda s, h, y: h * (2 if h.grad_fn is s.a(h).grad_fn or type(h.grad_fn).__name__ == "_Node" else 3),
        lambda s, h, y: h * (2 if h.grad_fn is h.grad_fn and isinstance(h.grad_fn, Node) else 3),
        lambda s, h, y: (s.tail if hasattr(s, "tail") else s.add_module("tail", nn.Tanh()) or s.tail)(h),
        lambda s, h, y: h * float(s.table.numpy()[1] + numpy.asarray(s.table).sum()) * len(s.table.tolist()),
        lambda s, h, y: h * F.binary_cross_entropy_with_logits(h, y.sigmoid(), (y > 0).type_as(h), reduction="none"),
    ],
)
def test_what_looks_like_a_refusal_and_is_none(middle: Middle) -> None:
    exact(Step(middle), batch())


@pytest.mark.parametrize(
    ("asks", "says"),
    [
        (lambda s, h, y: y.numpy(), r"reads the values of a tensor .* by .numpy"),
        (lambda s, h, y: torch.equal(y, y), "decides by the value of a tensor"),
        (lambda s, h, y: y.data_ptr(), "forward fails.*Cannot access data pointer"),
        (lambda s, h, y: torch.nested.nested_tensor([*y]), "forward fails.*UnsupportedOperatorException"),
        (lambda s, h, y: h.register_hook(lambda gradient: 2 * gradient), "a gradient hook on a tensor"),
        (lambda s, h, y: torch.manual_seed(0), "forward calls manual_seed"),
        (lambda s, h, y: torch.randn(4, generator=torch.Generator()), "a torch.Generator passed inside the model"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_a_trace_fails_at_is_refused_where_forward_catches_it(asks: Middle, says: str) -> None:
    def caught(s: Step, h: Tensor, y: Tensor) -> Tensor:
        try:
            return h if asks(s, h, y) is None else 2 * h
        except Exception:
            return 3 * h

    with pytest.raises(CaptureError, match=says):
        captured(Step(caught), batch())


@pytest.mark.parametrize(
    "drawn", [lambda: perf_counter(), lambda: uuid.uuid4().int % 10**9, lambda: random.SystemRandom().random()]
)
def test_what_is_another_one_at_every_call_is_refused(drawn: Callable[[], float]) -> None:
    with pytest.raises(CaptureError, match=r"something else whenever it is called, by a clock, .*test_capture.py:\d+"):
        captured(Step(lambda s, h, y: h * drawn()), batch())


@dataclass(frozen=True)
class Config:
    times: int = 2


def test_dataclasses_and_what_is_called_time_need_no_second_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    traces, export = [], torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda *args, **named: traces.append(0) or export(*args, **named))
    step = Step(lambda s, h, y: h * s.config.times + s.time(h))
    step.config, step.time = Config(), nn.Linear(4, 4)  # type: ignore[assignment]
    captured(step.double(), batch())
    assert len(traces) == 1


def test_a_clock_may_be_looked_at() -> None:
    exact(Step(lambda s, h, y: h if perf_counter() > 0 else 2 * h), batch())


def test_what_a_step_fails_at_too_may_be_caught() -> None:
    def caught(s: Step, h: Tensor, y: Tensor) -> Tensor:
        try:
            return h.sum(7)
        except IndexError:
            return h.softmax(1)

    exact(Step(caught), batch())


@pytest.mark.parametrize(
    "asks",
    [
        lambda h: h.is_contiguous(),
        lambda h: h.is_contiguous(memory_format=torch.channels_last),
        lambda h: h.stride()[1] == 1,
        lambda h: h.stride(-1) == 1,
        lambda h: h.dim_order() == (0, 1, 2, 3),
    ],
)
def test_what_is_decided_by_how_tensors_lie_in_memory_is_refused(asks: Callable[[Tensor], bool]) -> None:
    step = Step(lambda s, h, y: h * 2 if asks(h.view(-1, 2, 1, 2)) else h)
    with pytest.raises(CaptureError, match=r"forward asks .* at .*test_capture.py:\d+ how a tensor lies in memory"):
        captured(step, batch())


def test_a_copy_where_a_tensor_lies_otherwise_is_the_same_unless_it_is_written() -> None:
    step = Step(lambda s, h, y: s.a(h if h.is_contiguous() else h.clone()))
    assert captured(step, batch())
    written = Step(lambda s, h, y: (h if h.is_contiguous() else h.clone()).mul_(2) + h)
    with pytest.raises(CaptureError, match=r"forward asks .* how a tensor lies in memory"):
        captured(written, batch())


def test_what_is_made_like_a_value_has_no_gradient_of_it() -> None:
    middle: Middle = lambda s, h, y: s.a(h + torch.ones_like(s.b(h)).cumsum(1))  # noqa: E731
    exact(Step(middle), batch(), microbatches=2, schedule="wave")


def test_hooks_on_parameters_and_modules_are_refused() -> None:
    step = Step(lambda s, h, y: h)
    handle = step.a.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(CaptureError, match=r"parameter a.weight: a gradient hook.*change .grad after each step"):
        captured(step, batch())
    handle.remove()
    everywhere = nn.modules.module.register_module_full_backward_hook(lambda *arguments: None)
    with pytest.raises(CaptureError, match="a backward hook of all modules"):
        captured(step, batch())
    everywhere.remove()
    step.a.register_full_backward_hook(lambda *arguments: None)
    with pytest.raises(CaptureError, match="module a: a backward hook"):
        captured(step, batch())


# Verification


def planted(**changes: Any) -> Any:
    """A verification of two gradients, with something changed on our side."""
    reference = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([[3.0]])}
    ours = {name: g for name, g in {**reference, **changes.get("gradients", {})}.items() if g is not None}
    theirs = {name: g for name, g in {**reference, **changes.get("theirs", {})}.items() if g is not None}
    loss = torch.tensor(changes.get("loss", 1.0))
    return compare(loss, ours, (torch.tensor(changes.get("their_loss", 1.0)), theirs, 0), 0, 1e-6)


NAN = float("nan")


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": NAN},
        {"loss": NAN, "their_loss": NAN},
        {"loss": float("inf"), "their_loss": float("inf")},
        {"loss": 1.001},
        {"gradients": {"a": torch.tensor([1.0, NAN])}},
        {"gradients": {"a": torch.tensor([1.0, NAN])}, "theirs": {"a": torch.tensor([1.0, NAN])}},
        {"gradients": {"a": torch.tensor([1.0, -2.1])}},
        {"gradients": {"a": None}},
        {"theirs": {"a": None}},
        {"gradients": {"a": None, "a.": torch.tensor([1.0, -2.0])}},
        {"gradients": {"a": torch.tensor(1.0)}, "theirs": {"a": torch.tensor([1.0, 1.0])}},
        {"gradients": {"b": torch.tensor([[3.0]]).double()}},
        {"gradients": {"tiny": None}, "theirs": {"tiny": torch.tensor([1e-12])}},
    ],
)
def test_verification_sees_what_is_wrong(changes: dict[str, Any]) -> None:
    report = planted(**changes)
    assert not report.ok
    assert "NOT EXACT" in str(report)


@pytest.mark.parametrize("changes", [{}, {"gradients": {"zero": torch.zeros(2)}}, {"theirs": {"zero": torch.zeros(2)}}])
def test_verification_accepts_what_is_right(changes: dict[str, Any]) -> None:
    report = planted(**changes)
    assert report.ok
    assert report.max_grad_error == 0.0


@pytest.mark.parametrize(("loss", "ok"), [(1e-17, True), (1e-10, False)])
def test_a_loss_that_is_nothing_is_judged_beside_gradients(loss: float, ok: bool) -> None:
    gradients = {"weight": torch.ones(2)}
    report = compare(torch.tensor(loss), gradients, (torch.tensor(-1e-17), gradients, 0), 0, 1e-10)
    assert report.ok is ok


def test_a_loss_that_one_device_has_no_number_for_is_told_as_such() -> None:
    for loss in (1.0, torch.nan):
        report = planted(loss=loss, their_loss=torch.nan)
        assert not report.ok
        assert re.fullmatch(r"NOT EXACT: loss .* against nan on one device, which is not finite; .*", str(report))


def test_a_tolerance_says_what_widens_it() -> None:
    mixed = captured(Step(lambda s, h, y: h + s.a(h).float().sin().double()), batch())
    tolerance = tolerance_of(mixed.graph)
    assert tolerance.value == 1e-4
    assert re.search(r"float32 in module .*, aten.to.dtype, and 1 more operations", tolerance.widened_by)
    one = torch.tensor(1.0)
    text = str(compare(one, {}, (one, {}, 0), 0, tolerance))
    assert text.endswith(f"tolerance 1e-04, for {tolerance.widened_by}")
    assert tolerance_of(captured(Step(lambda s, h, y: h), batch()).graph) == Tolerance(1e-10)
    model = Step(lambda s, h, y: h * s.factor)
    model.factor = nn.Parameter(torch.ones(4))
    of_gradient = tolerance_of(captured(model, batch()).graph)
    assert (of_gradient.value, of_gradient.widened_by) == (1e-4, "float32 in module (the model itself), factor")
    assert str(planted()).endswith("tolerance 1e-06")


def test_steps_of_several_gpus_are_told_from_each_other_by_nothing_but_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of the ranks of a launch, which agree on one plan."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    graphs = [fx.Graph() for _ in range(2)]
    for rank, graph in enumerate(graphs):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert given_device("cuda") == torch.device("cuda", rank)
        graph.call_function(torch.ops.aten.arange.default, (4,), {"device": given_device("cuda")})
    first, second = map(graph_fingerprint, graphs)
    assert first == second
    graphs[0].call_function(torch.ops.aten.arange.default, (4,), {"device": torch.device("cpu")})
    graphs[1].call_function(torch.ops.aten.arange.default, (4,), {"device": given_device("cuda")})
    assert graph_fingerprint(graphs[0]) != graph_fingerprint(graphs[1])
    assert Surroundings(torch.device("cuda", 0)).digest != Surroundings(torch.device("cuda", 1)).digest
