"""Captures on disk: the same program comes back, and nothing else does."""

import copy
import enum
import json
import logging
import math
import os
import random
import sys
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.analysis import example_of
from fxpipe.capture import Capture, cache, files, private
from fxpipe.capture.cache import cache_folder, cached_capture
from fxpipe.capture.code_names import Unknowable
from fxpipe.capture.expressions import Unwritable
from fxpipe.capture.model_call import ModelCall
from fxpipe.capture.model_digest import step_digest
from fxpipe.capture.stored import from_data, to_data
from tests.models import ZOO
from tests.steps import Step, batch
from tests.unet import TinyUNet

SCALE = 2.0
OPTIONS = {"width": 2}


class Knobs:
    """What a forward may read that is no module."""

    def __init__(self) -> None:
        self.power = 2


class Model(Step):
    """A step whose forward depends on all kinds of things."""

    def __init__(self) -> None:
        super().__init__(lambda self, x, y: self.changed(x))
        self.factor, self.knobs, self.names = 1.5, Knobs(), ["a", "b"]
        self.activation: Callable[[Tensor], Tensor] = F.gelu
        self.part = partial(torch.mul, other=2.0)
        self.indices = torch.tensor([3, 2, 1, 0])

    def changed(self, x: Tensor) -> Tensor:
        x = self.part(self.activation(x)) * self.factor * SCALE * OPTIONS["width"]
        return self.drop(x[:, self.indices] ** self.knobs.power * helper(x)) + self.table


def helper(x: Tensor) -> Tensor:
    return x.sigmoid()


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no file had been changed since this process began: an editor may be at work."""
    monkeypatch.setattr(files, "_STARTED", sys.maxsize)


def digest(model: nn.Module, inputs: Any = None) -> str:
    example = example_of(model, batch() if inputs is None else inputs)
    return step_digest(example.step, example.inputs, [tensor.device for tensor in example.tensors])


def compiled(model: nn.Module, inputs: Any, folder: Path, **options: Any) -> fxpipe.Program:
    return fxpipe.compile(model, 2, example_inputs=inputs, cache=folder, budget=0, **options)


def dumped(program: fxpipe.Program, folder: Path) -> dict[str, str]:
    program.dump(folder)
    return {path.name: path.read_text() for path in folder.iterdir() if path.suffix in (".py", ".txt", ".json")}


@pytest.fixture
def no_trace(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, nothing may be captured any more."""
    return lambda: monkeypatch.setattr(cache, "capture", lambda *args: pytest.fail("captured again"))


def made(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    if name == "unet":
        return TinyUNet("no_grad").double(), TinyUNet("no_grad").double().example_inputs(6)
    if name in ZOO:
        model = ZOO[name]().double()
        return model, model.example_inputs(6)  # type: ignore[operator]
    return Model(), batch()


@pytest.mark.parametrize("name", ["unet", "sd", "model"])
def test_a_cached_capture_gives_the_same_program(name: str, tmp_path: Path, no_trace: Callable[[], None]) -> None:
    first = compiled(*made(name), tmp_path / "cache")
    no_trace()
    model, inputs = made(name)
    second = compiled(model, inputs, tmp_path / "cache")
    assert str(second.capture.graph) == str(first.capture.graph)
    assert dumped(second, tmp_path / "second") == dumped(first, tmp_path / "first")
    args, kwargs = (inputs, {}) if isinstance(inputs, tuple) else ((), inputs)
    ours, before = second.verify(*args, **kwargs), first.verify(*args, **kwargs)
    assert ours.ok, ours
    assert str(ours) == str(before)  # the same draws, to the last bit


@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_data_say_all_of_a_capture(name: str) -> None:
    torch.manual_seed(0)
    model = ZOO[name]()
    example = example_of(model, None, 6)
    found = cache.capture(ModelCall(example.step, example.inputs, example.tensors))
    data = json.loads(json.dumps(to_data(found, example.step)))
    back = from_data(data, example.inputs, example.step)
    assert to_data(back, example.step) == data
    assert str(back.graph) == str(found.graph)
    values = [tensor for node in back.graph.nodes for tensor in private.tensors_in(node.meta.get("val"))]
    assert len({*map(id, values)}) == len(values)
    for node, other in zip(found.graph.nodes, back.graph.nodes, strict=True):
        assert node.target == other.target
        assert node.meta.keys() == other.meta.keys()
    for draw, drawn in zip(found.draws.values(), back.draws.values(), strict=True):
        assert torch.equal(*(one.sample(5, 1, 2, torch.device("cpu")) for one in (draw, drawn)))
    assert (back.batch, back.inputs, back.trainable) == (found.batch, found.inputs, found.trainable)


def test_constants_of_the_model_stay_the_models_own(tmp_path: Path) -> None:
    model = Model()
    example = example_of(model, batch())
    for _ in range(2):
        found = cached_capture(ModelCall(example.step, example.inputs, example.tensors), tmp_path)
        assert any(constant is model.table for constant in found.constants.values())
    assert len(list(tmp_path.iterdir())) == 1


def test_a_constant_of_one_entry_may_have_any_stride(tmp_path: Path) -> None:
    model = Model()
    model.table = torch.full((), 2.0).expand(1)
    example = example_of(model, batch())
    cached_capture(ModelCall(example.step, example.inputs, example.tensors), tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


CHANGES: dict[str, Callable[[Model], Any]] = {
    "a number": lambda model: setattr(model, "factor", 1.25),
    "the kind of a number": lambda model: setattr(model, "factor", 1),
    "an attribute's attribute": lambda model: setattr(model.knobs, "power", 3),
    "a list": lambda model: model.names.append("c"),
    "a function": lambda model: setattr(model, "activation", F.relu),
    "a function of one's own": lambda model: setattr(model, "activation", lambda x: x * 2),
    "a closure": lambda model: setattr(model, "activation", shifted(4)),
    "arguments bound": lambda model: setattr(model, "part", partial(torch.mul, other=3.0)),
    "a tensor's values": lambda model: model.table.mul_(2),
    "an index": lambda model: setattr(model, "indices", model.indices.flip(0)),
    "training": lambda model: model.drop.eval(),
    "a dropout": lambda model: setattr(model.drop, "p", 0.1),
    "what trains": lambda model: model.a.weight.requires_grad_(False),
    "a type": lambda model: model.b.float(),
    "a layout": lambda model: setattr(model.a, "weight", nn.Parameter(model.a.weight.data.t().contiguous().t())),
    "tied weights": lambda model: setattr(model.b, "weight", model.a.weight),
    "a module": lambda model: setattr(model, "norm", nn.LayerNorm(4)),
    "a hook": lambda model: model.a.register_forward_hook(lambda module, args, output: output * 2),
    "a method": lambda model: setattr(model, "changed", types.MethodType(lambda self, x: x, model)),
    "a buffer": lambda model: model.register_buffer("more", torch.ones(2)),
}


def shifted(by: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x + by


@pytest.mark.parametrize("name", CHANGES)
def test_another_model_has_another_digest(name: str) -> None:
    model, same = Model(), Model()
    before = digest(model)
    assert digest(same) == before
    CHANGES[name](model)
    assert digest(model) != before


def test_copies_leave_the_digest_as_it_is() -> None:
    class Fresh(Knobs):
        pass

    model = Model()
    model.knobs = Fresh()
    before = digest(model)
    copy.deepcopy(model)  # which notes the names of its slots on every class
    assert "__slotnames__" in vars(Fresh)
    assert digest(model) == before


class Names(enum.StrEnum):
    ONE = "one"


def test_plain_kinds_have_subclasses() -> None:
    digests = []
    for value in (Names.ONE, "one", type("Text", (str,), {})("one"), type("Number", (int,), {})(1), 1, {1, 2}, [1, 2]):
        model = Model()
        model.names = value  # type: ignore[assignment]
        digests.append(digest(model))
    assert len(set(digests)) == len(digests)


def test_closures_count_by_what_they_close_over() -> None:
    digests = set()
    for by in (1, 2, 1):
        model = Model()
        model.activation = shifted(by)
        digests.add(digest(model))
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (sys.modules[__name__], "SCALE", 3.0),
        (sys.modules[__name__], "OPTIONS", {"width": 3}),
        (sys.modules[__name__], "helper", lambda x: x.tanh()),
        (Model, "changed", lambda self, x: x),
        (nn.Linear, "forward", lambda self, x: F.linear(x, self.weight)),
        (F, "mse_loss", lambda x, y: (x - y).abs().mean()),
        (torch, "is_inference_mode_enabled", lambda: True),
    ],
)  # fmt: skip
def test_what_forward_names_counts(where: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(Model())
    monkeypatch.setattr(where, name, value)
    assert digest(Model()) != before


def test_weights_do_not_count_by_value() -> None:
    model = Model()
    before = digest(model)
    with torch.no_grad():
        model.a.weight.normal_()
    assert digest(model) == before


def test_calls_count() -> None:
    x, y = batch()
    same = digest(Model(), (x, y))
    by_name = digest(Model(), {"x": x, "y": y})  # what is around forward may see it
    assert digest(Model(), {"y": y, "x": x + 1}) == by_name  # without values
    assert len({same, by_name, digest(Model(), (x[:4], y[:4])), digest(Model(), (x.float(), y))}) == 4


def test_switches_of_torch_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(Model())
    torch.use_deterministic_algorithms(True)
    try:
        assert digest(Model()) != before
    finally:
        torch.use_deterministic_algorithms(False)
    assert digest(Model()) == before


def clock(x: Tensor) -> Tensor:
    return x * time.time()


def environment(x: Tensor) -> Tensor:
    return x * float(os.environ.get("FACTOR", "1"))


def file(x: Tensor) -> Tensor:
    with open("factor.txt") as opened:
        return x * float(opened.read())


def imports(x: Tensor) -> Tensor:
    import time as watch

    return x * watch.time()


def any_attribute(x: Tensor) -> Tensor:
    import tests.unet as module

    return x * getattr(module, "name".upper(), 1)


@pytest.mark.parametrize("outside", [clock, environment, file, imports, any_attribute, random.Random(0).random])
def test_what_has_no_digest_is_not_cached(outside: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    model.activation = outside
    with pytest.raises(Unknowable):
        digest(model)
    model = Model()
    model.unused = outside  # type: ignore[assignment]
    example = example_of(model, batch())
    with caplog.at_level(logging.INFO, "fxpipe"):
        cached_capture(ModelCall(example.step, example.inputs, example.tensors), tmp_path)
    assert "capture is not cached: " in caplog.text
    assert not list(tmp_path.iterdir())


def test_modes_are_not_cached() -> None:
    model = Model()
    with torch.device("cpu"), pytest.raises(Unknowable, match="a mode of torch functions"):
        digest(model)


def test_operations_of_others_are_not_cached() -> None:
    @torch.library.custom_op("fxpipe_cache::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, grad: grad * 2)
    model = Step(lambda self, x, y: twice(x))
    example = example_of(model, batch())
    found = cache.capture(ModelCall(example.step, example.inputs, example.tensors))
    with pytest.raises(Unwritable, match=r"fxpipe_cache.twice.default is not one of ATen's"):
        to_data(found, example.step)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    """A model and its entry."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_STARTED", sys.maxsize)
        model = Model()
        recaptured(model, folder)
    (entry,) = folder.iterdir()
    return model, entry


def recaptured(model: nn.Module, folder: Path) -> Capture:
    example = example_of(model, batch())
    return cached_capture(ModelCall(example.step, example.inputs, example.tensors), folder)


@pytest.mark.parametrize("seed", range(6))
def test_corrupt_entries_are_written_anew(seed: int, written: tuple[Model, Path]) -> None:
    model, entry = written
    content, fresh = entry.read_bytes(), random.Random(seed)
    damaged = bytearray(content)
    for _ in range(fresh.choice([1, 5])):
        damaged[fresh.randrange(len(damaged))] ^= 1 << fresh.randrange(8)
    damaged = damaged[: fresh.randrange(len(damaged))] if seed % 3 == 0 else damaged
    entry.write_bytes(damaged)
    found = recaptured(model, entry.parent)
    assert entry.read_bytes() == content
    assert str(found.graph) == str(recaptured(model, entry.parent).graph)


@pytest.mark.parametrize("seed", range(12))
def test_entries_that_say_something_else_run_nothing(seed: int, written: tuple[Model, Path]) -> None:
    """Changed data with a right digest: either a capture or none, and no other exception."""
    model, entry = written
    fresh = random.Random(seed)
    data = json.loads(entry.read_bytes().partition(b"\n")[2])["capture"]
    places: list[tuple[Any, Any]] = []

    def collect(one: Any) -> None:
        for key in one if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ():
            places.append((one, key))
            collect(one[key])

    collect(data)
    holder, key = fresh.choice(places)
    holder[key] = fresh.choice([None, -1, math.pi, "os.system", [], {}, {"node": "x"}, {"torch": "load"}, True])
    example = example_of(model, batch())
    text = json.dumps({"files": files.loaded_files(), "capture": data}).encode()
    other = entry.with_name("other.json")
    other.write_bytes(cache.hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
    found = cache._read(other, lambda data: from_data(data, example.inputs, example.step))
    other.unlink()
    assert found is None or isinstance(found, Capture)


def test_changed_files_make_an_entry_stale(written: tuple[Model, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, entry = written
    example = example_of(model, batch())
    assert cache._read(entry, lambda data: from_data(data, example.inputs, example.step)) is not None
    here, state = str(Path(__file__)), files._state
    monkeypatch.setattr(files, "_state", lambda file: "changed" if file == here else state(file))
    assert cache._read(entry, lambda data: from_data(data, example.inputs, example.step)) is None


def test_files_changed_since_the_process_began_are_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = files._state
    monkeypatch.setattr(files, "_state", lambda file: [1, sys.maxsize + 1] if file == __file__ else state(file))
    recaptured(Model(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_processes_share_a_folder(tmp_path: Path) -> None:
    content = os.urandom(1 << 16)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: cache._replace(tmp_path / f"{number % 2}.json", content), range(64)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "1.json"]
    assert all(path.read_bytes() == content for path in tmp_path.iterdir())


def test_what_was_not_used_for_longest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_BYTES", 250)
    for age, name in enumerate(("new", "old", "older")):
        path = tmp_path / f"{name}.json"
        path.write_bytes(b"x" * 100)
        os.utime(path, (1e9 - age, 1e9 - age))
    cache._make_room(tmp_path)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["new", "old"]


def leaving(s: Step, h: Tensor, y: Tensor) -> Tensor:
    s.last = h.detach()
    return h


def test_what_was_warned_of_is_when_an_entry_is_read(tmp_path: Path, no_trace: Callable[[], None]) -> None:
    for _ in range(2):
        example = example_of(Step(leaving), batch(4))
        with pytest.warns(UserWarning, match="sets its attribute 'last', new, to a tensor, which engines and samplers"):
            cached_capture(ModelCall(example.step, example.inputs, example.tensors), tmp_path)
        no_trace()


def test_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder(False) is None
    assert cache_folder(tmp_path) == tmp_path
    monkeypatch.setenv("FXPIPE_CACHE", "off")
    assert cache_folder(True) is None
    assert cache_folder(str(tmp_path)) == tmp_path
    monkeypatch.setenv("FXPIPE_CACHE", str(tmp_path / "named"))
    assert cache_folder(True) == tmp_path / "named"
    monkeypatch.delenv("FXPIPE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(True) == tmp_path / "fxpipe" / "captures"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder(True) == Path.home() / ".cache" / "fxpipe" / "captures"


def test_folders_that_cannot_be_written_are_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert str(recaptured(Model(), tmp_path / "file" / "cache").graph)


def test_other_processes_find_the_same_digest() -> None:
    """Sets and hashes have another order in every process."""
    import subprocess

    code = "from tests.test_capture_cache import *; print(digest(Model()), digest(*made('sd')))"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    there = subprocess.check_output([sys.executable, "-W", "ignore", "-c", code], env=environment, text=True)
    assert there.split() == [digest(Model()), digest(*made("sd"))]
