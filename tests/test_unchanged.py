"""A model that is set otherwise after it was compiled: seen before the next step, refused where it makes another."""

import copy
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CaptureError, RunError
from fxpipe.run.local_engine import LocalEngine

SCALE = 1.0
loss = 0.0  # a global of that name is none of forward's, which names an attribute


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Layers(nn.Module):
    """Two layers and a dropout, weighted by numbers that are kept in several places."""

    wide = False

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(dropout)
        self.register_buffer("shift", torch.zeros(4))
        self.more = nn.Sequential()
        self.weight, self.options, self.step, self.loss = 1.0, {"power": 2}, 0, None
        self.table, self.places = numpy.ones(2), {1, 2}
        factor = 1.0

        def set_factor(value: float) -> None:
            nonlocal factor
            factor = value

        self.set_factor, self.scaled = set_factor, lambda h: factor * h

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.tanh(self.first(x) + self.shift))
        h = self.last(h) * (2 if self.wide else 1) * SCALE * torch.ones(())
        h = self.scaled(self.more(h)) * float(self.table[0]) * (2 if 3 in self.places else 1)
        return self.weight * h.pow(self.options["power"]).mean() if self.loss is None else self.loss


def engine_of(model: nn.Module) -> LocalEngine:
    batch = (torch.randn(4, 4, dtype=torch.float64),)
    return fxpipe.compile(model, 2, example_inputs=batch, schedule="1f1b", cache=False).local_engine()


@pytest.fixture
def batch() -> tuple[Tensor]:
    torch.manual_seed(1)
    return (torch.randn(4, 4, dtype=torch.float64),)


def set_global(model: Layers) -> None:
    global SCALE
    SCALE = 2.0


def set_data(model: Layers) -> None:
    model.first = model.first.float()


def copy_weights(model: Layers) -> None:
    vars(model.first)["_parameters"] = {n: nn.Parameter(p.detach().clone()) for n, p in model.first.named_parameters()}


CHANGES: list[tuple[Callable[[Layers], Any], str]] = [
    (lambda m: setattr(m, "weight", 0.5), r"\(the model itself\): weight was 1.0 and is 0.5, since .* something else"),
    (lambda m: setattr(m, "weight", numpy.float64(0.5)), r"weight was 1.0 and is np.float64\(0.5\), since"),
    (lambda m: m.table.fill(2), r"table has other values, since .* something else"),
    (lambda m: m.places.add(3), r"places\[3\] was not there and is 3"),
    (lambda m: m.set_factor(0.5), r"set_factor.factor was 1.0 and is 0.5"),
    (lambda m: m.options.update(power=4), r"options\['power'\] was 2 and is 4"),
    (lambda m: setattr(Layers, "wide", True), r"Layers.wide was False and is True"),
    (set_global, r"tests.test_unchanged.SCALE was 1.0 and is 2.0"),
    (lambda m: m.eval(), r"training was True and is False, and 4 more changes"),
    (lambda m: setattr(m.drop, "p", 0.1), r"module drop: p was 0.5 and is 0.1"),
    (lambda m: setattr(m, "drop", nn.Identity()), r"drop was a Dropout and is a Identity"),
    (lambda m: setattr(m, "drop", nn.Dropout(0.1)), r"drop is another Dropout"),
    (lambda m: m.last.register_forward_hook(lambda *a: 2 * a[-1]), r"module last: _forward_hooks.* is a function"),
    (lambda m: m.last.register_full_backward_hook(lambda *a: None), "forward cannot be captured so: .*backward hook"),
    (lambda m: m.last.weight.register_hook(lambda g: 2 * g), "last.weight has a gradient hook"),
    (lambda m: setattr(m.last, "bias", nn.Parameter(m.last.bias.detach().clone())), "last.bias .* another tensor"),
    (lambda m: m.load_state_dict({**m.state_dict(), "shift": torch.ones(4)}, assign=True), "is another tensor"),
    (lambda m: setattr(m, "shift", torch.ones(4)), "shift of the model is another tensor"),
    (lambda m: setattr(m.last, "__class__", Doubled), r"module last: its class or its __dict__ is another one"),
    (lambda m: m.more.append(nn.Tanh()), r"module more: 0 was not there and is a Tanh"),
    (lambda m: torch.set_default_dtype(torch.float64), "the default dtype was .*float32 and is torch.float64"),
    (copy_weights, "first.weight .* another tensor"),
    (set_data, "first.weight of the model was torch.float64, and is now torch.float32"),
    (lambda m: m.first.requires_grad_(False), "2 parameters .* trained otherwise .* frozen.* or compile again"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), CHANGES)
def test_a_model_that_makes_another_step_is_refused(
    change: Callable[[Layers], Any], says: str, batch: tuple[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Layers, "wide", False)
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    model = Layers(0.5).double()
    engine = engine_of(model)
    engine.step(batch)
    try:
        change(model)
        with pytest.raises(RunError, match=says):
            engine.step(batch)
    finally:
        torch.set_default_dtype(torch.float32)
    assert engine.step_index == 1


def test_a_weight_of_two_layers_that_becomes_two_is_refused(batch: tuple[Tensor]) -> None:
    model = Layers().double()
    model.last.weight = model.first.weight
    engine = engine_of(model)
    engine.step(batch)
    model.last.weight = nn.Parameter(model.first.weight.detach().clone())
    with pytest.raises(RunError, match=r"last\.weight of the model, which was first\.weight, is another tensor, since"):
        engine.step(batch)


def test_another_layer_in_the_place_of_a_name_that_forward_does_not_read_is_no_change(
    batch: tuple[Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    model = Layers().double()
    model.also = model.last
    engine = engine_of(model)
    engine.step(batch)
    model.also = copy.deepcopy(model.last)
    expected, _ = torch.autograd.grad(model(*batch), [model.last.weight, model.last.bias])
    model.zero_grad()
    engine.step(batch)
    torch.testing.assert_close(model.last.weight.grad, expected)
    assert model.also.weight.grad is None

    caplog.clear()
    model.register_buffer("spare", torch.ones(()))  # so that all tensors are looked at again
    engine.step(batch)
    assert "also" not in caplog.text


def test_another_buffer_in_the_place_of_a_second_name_is_refused(batch: tuple[Tensor]) -> None:
    """Which of its names forward reads is not known."""

    class Scaled(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("one", torch.ones(()))
            self.register_buffer("two", self.one)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.two

    model = Scaled().double()
    model.two = model.one
    engine = engine_of(model)
    engine.step(batch)
    model.two = model.one * 3
    with pytest.raises(RunError, match=r"two of the model is another tensor than the one that is trained or read"):
        engine.step(batch)


def test_what_makes_the_same_step_is_no_change(batch: tuple[Tensor]) -> None:
    global loss
    model = Layers().double()
    engine = engine_of(model)
    for number in range(3):
        model.train(number % 2 == 0)  # its dropout drops nothing
        model.step = number  # which forward does not read
        loss = engine.step(batch).item()
    model.weight = 0.5
    torch.testing.assert_close(engine_of(model).step(batch), model(*batch).detach())
    model.weight = 1.0
    engine.step(batch)


class Tables(Layers):
    """Keeps tables of constants and of a buffer, one of them by the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.turns = dict[int, Tensor](), None

    def forward(self, x: Tensor) -> Tensor:
        if self.turns is None or len(self.turns) != x.shape[-1]:
            self.turns = torch.arange(x.shape[-1], dtype=x.dtype).cos() + self.shift[: x.shape[-1]]
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
        h = self.last(self.tables[x.shape[1]] @ torch.tanh(self.first(x) * self.turns) + self.shift)
        return h.square().mean()


def test_tables_that_forward_keeps_from_call_to_call_are_no_change() -> None:
    """Whoever fills them: verify leaves none, an evaluation of the model, of other sizes too, may."""
    model, batch = Tables().double(), (torch.randn(4, 3, 4, dtype=torch.float64),)
    program = fxpipe.compile(model, 2, example_inputs=batch, schedule="1f1b", microbatches=2)
    assert program.verify(*batch).ok
    assert model.turns is None
    engine = program.local_engine()
    for rows in (3, 2, 3):
        model(batch[0][:, :rows])
        torch.testing.assert_close(engine.step(batch), model(*batch).detach(), rtol=1e-12, atol=0.0)
    model.tables[3] = 2 * model.tables[3]
    with pytest.raises(RunError, match=r"tables\[3\] is another Tensor, .* computes something else"):
        engine.step(batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_of_small_numbers_are_told_apart(dtype: torch.dtype) -> None:
    model, batch = Tables().to(dtype), (torch.randn(4, 3, 4, dtype=dtype),)
    model.shift.fill_(1e-3)
    model.turns = 1e-3 * torch.ones(4, dtype=dtype)
    engine = fxpipe.compile(model, 2, example_inputs=batch, schedule="1f1b", microbatches=2).local_engine()
    model.turns = 2 * model.turns
    with pytest.raises(RunError, match=r"turns .* computes something else"):
        engine.step(batch)


@pytest.mark.parametrize("first", [True, False])
def test_buffers_of_kept_tables_keep_their_values(first: bool) -> None:
    """Programs read the table that was there, and forward the buffer; or the other way round."""
    model, batch = Tables().double(), (torch.randn(4, 3, 4, dtype=torch.float64),)
    if first:
        model(*batch)
    engine = fxpipe.compile(model, 2, example_inputs=batch, schedule="1f1b", microbatches=2).local_engine()
    if first:
        model.turns = None
    else:
        model(*batch)
    engine.step(batch)
    model.shift[0] = 1.0
    with pytest.raises(RunError, match=r"shift .*, or keeps what it makes of it"):
        engine.step(batch)


def test_a_buffer_that_forward_reads_as_a_number_keeps_its_value(batch: tuple[Tensor]) -> None:
    class Scaled(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(self.shift.sum() + 1)

    model = Scaled().double()
    engine = engine_of(model)
    torch.testing.assert_close(engine.step(batch), model(*batch).detach())
    model.load_state_dict(model.state_dict())
    engine.step(batch)
    model.shift[0] = 1.0
    with pytest.raises(RunError, match=r"forward reads shift as a number, .* which was tensor.* compile again"):
        engine.step(batch)


def test_so_does_any_other_tensor(batch: tuple[Tensor]) -> None:
    class Scaled(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scales[1].item() * float(self.scales[0].numpy()[0])

    model = Scaled().double()
    model.scales = [torch.ones(1), torch.tensor(2.0)]
    engine = engine_of(model)
    engine.step(batch)
    for place, scale in enumerate(model.scales):
        scale.numpy()[...] += 1
        with pytest.raises(RunError, match=rf"forward reads scales\[{place}\] as a number"):
            engine.step(batch)
        scale -= 1


def test_a_buffer_that_is_read_for_batches_of_one_shape_alone_keeps_its_value(batch: tuple[Tensor]) -> None:
    class Scaled(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(0, -2)) * (float(self.shift.sum() + 1) if x.shape[1] > 1 else 1)

    model = Scaled().double()
    other = (torch.randn(4, 3, 4, dtype=torch.float64),)
    first = (torch.randn(4, 1, 4, dtype=torch.float64),)
    engine = fxpipe.compile(model, 2, example_inputs=[first, other], schedule="1f1b", cache=False).local_engine()
    engine.step(other)
    model.shift[0] = 1.0
    with pytest.raises(RunError, match="forward reads shift as a number"):
        engine.step(other)


@pytest.mark.filterwarnings("ignore:.*deprecated in favor of")
def test_weights_that_every_forward_computes_are_no_change(
    batch: tuple[Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = Layers()
        nn.utils.weight_norm(model.first)  # type: ignore[no-untyped-call]
    finally:
        torch.set_default_dtype(torch.float32)
    engine = engine_of(model)
    for _ in range(3):
        engine.step(batch)
        with torch.no_grad():
            model(*batch)
    assert not caplog.records


class ReadBefore(nn.Module):
    """Reads of a weight what the call before has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.utils.weight_norm(nn.Linear(4, 4))  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        size = self.last.weight.detach().norm()
        return (self.last(torch.tanh(self.first(x))) * size).square().mean()


@pytest.mark.filterwarnings("ignore:.*deprecated in favor of")
def test_a_weight_that_is_read_before_its_hook_computes_it_is_state(batch: tuple[Tensor]) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = ReadBefore()
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        model(*batch)
    with pytest.raises(CaptureError, match="weight"):
        engine_of(model)


def test_a_model_that_is_compiled_again_goes_on_with_its_optimizer(batch: tuple[Tensor]) -> None:
    def trained(compiled: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Layers().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for frozen in (False, True):
            model.first.requires_grad_(not frozen)
            model.weight = 0.5 if frozen else 1.0
            engine = engine_of(model) if compiled else None
            for _ in range(2):
                if engine is None:
                    model(*batch).backward()
                else:
                    engine.step(batch)
                optimizer.step()
                optimizer.zero_grad()
        return model.state_dict()

    expected = trained(False)
    for name, value in trained(True).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-14)


class Dropped(nn.Module):
    """Adds a layer's result unless it is dropped at random, as some adapters do in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return (h + self.last(h) if not self.training or torch.rand(1) > 0.1 else h).square().mean()


def test_what_decides_by_chance_in_training_alone_is_told_to_be_put_into_eval(batch: tuple[Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"or call .eval\(\) on the module if it decides in training alone"):
        engine_of(Dropped().double())
    model = Dropped().double().eval()
    torch.testing.assert_close(engine_of(model).step(batch), model(*batch).detach())


def test_what_a_module_in_a_list_holds_is_read_as_it_is_now() -> None:
    """As an average does that sets .data, of a teacher that is to be no part of the model."""

    class Taught(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
            self.teacher = [nn.Linear(3, 3).double().requires_grad_(False)]

        def forward(self, x: Tensor) -> Tensor:
            return (self.last(self.first(x).tanh()) - self.teacher[0](x)).square().mean()  # type: ignore[no-any-return]

    model, x = Taught().double(), torch.randn(4, 3, dtype=torch.float64)
    engine = fxpipe.compile(model, 2, example_inputs=(x,), schedule="1f1b").local_engine()
    engine.step((x,))
    for weight in model.teacher[0].parameters():
        weight.data = 0.5 * weight.data
    assert engine.step((x,)).item() == pytest.approx(model(x).item(), rel=1e-12)
    engine.close()


class Normed(nn.Module):
    """A convolution, whose result lies as its weight does, and a norm, whose gradient's kernel asks how it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x)))).square().mean()


def test_weights_lie_in_memory_as_they_were_compiled() -> None:
    x, says = torch.randn(4, 2, 7, 6).double(), "weight of the model lies otherwise in memory than when it was compiled"
    model = Normed()
    program = fxpipe.compile(model, 2, example_inputs=(x,), schedule="1f1b", microbatches=2, cache=False)
    engine = program.local_engine()
    engine.step((x,))
    model.to(memory_format=torch.channels_last)
    for call in (lambda: engine.step((x,)), program.local_engine, lambda: program.verify(x)):
        with pytest.raises(RunError, match=says):
            call()
    model.to(memory_format=torch.contiguous_format)
    engine.step((x,))
    before = Normed().to(memory_format=torch.channels_last)
    assert fxpipe.compile(before, 2, example_inputs=(x,), schedule="1f1b", microbatches=2, cache=False).verify(x).ok
