"""Averages of weights that several ranks train: right where a parameter is trained, refused elsewhere until brought."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.training_utils import EMAModel
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxpipe
from fxpipe.run.saves.weight_names import WeightNames
from tests.own_models import Adapted, OneDevice, batch
from tests.test_own_model import COPIES, LINE, ROWS, Layout, on_threads


class Averages:
    """Of torch's, of diffusers', and a script's own."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.of_torch = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.of_diffusers = EMAModel(model.parameters(), decay=0.5)
        self.own = [parameter.detach().clone() for parameter in model.parameters()]

    def update(self) -> None:
        self.of_torch.update_parameters(self.model)
        self.of_diffusers.step(self.model.parameters())
        with torch.no_grad():
            for average, now in zip(self.own, self.model.parameters(), strict=True):
                average.lerp_(now, 0.3)

    def values(self) -> list[list[Tensor]]:
        given = [*self.of_torch.module.parameters()], self.of_diffusers.state_dict()["shadow_params"], self.own
        return [[value.detach().clone() for value in of] for of in given]


def trained(model: nn.Module, engine: Any) -> Averages:
    optimizer, averages = torch.optim.AdamW(model.parameters(), lr=1e-2), Averages(model)
    for number in range(2):
        engine.step(batch(number, ROWS[0]))
        optimizer.step()
        optimizer.zero_grad()
        averages.update()
    return averages


@pytest.mark.parametrize("layout", [LINE, {"schedule": "gpipe", "data_parallel": 2, "shard": "all"}])
def test_averages_of_what_other_ranks_train_are_refused_until_they_are_brought(layout: Layout) -> None:
    def body(model: nn.Module, engines: Any) -> list[list[Tensor]]:
        engine = engines[0]()
        averages = trained(model, engine)
        with pytest.raises(fxpipe.RunError, match=r"parameters of Adapted .* engine.sync_model\(average\)"):
            averages.of_torch(**batch(0, ROWS[0]))
        with pytest.raises(fxpipe.RunError, match=r"averages of 34 .* call engine.sync_model\(average\)"):
            averages.of_diffusers.state_dict()
        if "shard" in layout:
            with pytest.raises(fxpipe.RunError, match=r"held by other ranks.* call engine.sync_model\(average\)"):
                averages.of_diffusers.copy_to(model.parameters())
        engine.sync_model()
        model.state_dict()
        averages.of_diffusers.copy_to(model.parameters())
        with pytest.raises(fxpipe.RunError, match=r"parameters of Adapted .* engine.sync_model\(average\)"):
            model.state_dict()
        engine.sync_model(averages.of_torch, averages.of_diffusers, averages.own)
        averages.of_torch(**batch(0, ROWS[0]))
        return averages.values()

    model = Adapted()
    expected = trained(model, OneDevice(model)).values()
    for found in on_threads(2, [layout], body):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_averages_of_a_scripts_own_are_refused_in_the_model_until_they_are_brought() -> None:
    def put(model: nn.Module, own: list[Tensor]) -> None:
        with torch.no_grad():
            for average, now in zip(own, model.parameters(), strict=True):
                now.copy_(average)

    def body(model: nn.Module, engines: Any) -> list[Tensor]:
        engine = engines[0]()
        put(model, trained(model, engine).own)
        with pytest.raises(fxpipe.RunError, match=r"or were written here alone; before .* call engine.sync_model\(\)"):
            model.state_dict()
        engine.sync_model()
        return [*model.state_dict().values()]

    model = Adapted()
    put(model, trained(model, OneDevice(model)).own)
    for found in on_threads(2, [LINE], body):
        torch.testing.assert_close(found, [*model.state_dict().values()], rtol=1e-10, atol=1e-12)


def test_averages_in_an_order_of_their_own_go_by_what_they_are_made_of(tmp_path: Path) -> None:
    """As of a text encoder's parameters after those of a U-Net before it: the layers' from the last to the first."""

    def body(model: nn.Module, engines: Any) -> list[Tensor]:
        given = [parameter for layer in reversed(model.layers) for parameter in layer.parameters()]  # type: ignore
        average, optimizer = EMAModel(given, decay=0.5), torch.optim.SGD(given, lr=0.1)
        engine = engines[0]()
        for number in range(2):
            engine.step(batch(number, ROWS[0]))
            optimizer.step()
            average.step(given)
        if not isinstance(engine, OneDevice):
            engine.save(tmp_path, extra={"average": average})
            engine.sync_model(average)
        return list(average.shadow_params)

    model = Adapted()
    expected = body(model, [lambda: OneDevice(model)])
    for found in on_threads(2, [LINE], body):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    again = EMAModel([*Adapted().layers.parameters()])
    fxpipe.load_checkpoint(tmp_path, Adapted(), extra={"average": again})
    torch.testing.assert_close(again.shadow_params, expected, rtol=1e-10, atol=1e-12)


def test_copies_of_old_values_are_as_old() -> None:
    def body(model: nn.Module, engines: Any) -> list[Tensor]:
        engine = engines[0]()
        trained(model, engine)
        best = copy.deepcopy(model)
        for use in (best.state_dict, lambda: best(**batch(0, ROWS[0]))):
            with pytest.raises(fxpipe.RunError, match=r"parameters of Adapted .* engine.sync_model\(average\)"):
                use()
        for saved in (model, dict(model.named_parameters())):
            with pytest.raises(fxpipe.RunError, match=r"was trained on another rank.*call engine.sync_model\(\)"):
                torch.save(saved, io.BytesIO())
        engine.sync_model(best)
        best(**batch(0, ROWS[0]))
        torch.save(model, io.BytesIO())
        return [*best.state_dict().values()]

    model = Adapted()
    trained(model, OneDevice(model))
    for found in on_threads(2, [LINE], body):
        torch.testing.assert_close(found, [*model.state_dict().values()], rtol=1e-10, atol=1e-12)


def test_averages_where_all_train_all_are_everyones() -> None:
    def body(model: nn.Module, engines: Any) -> list[list[Tensor]]:
        return trained(model, engines[0]()).values()

    first, second = on_threads(2, [COPIES], body)
    torch.testing.assert_close(first, second, rtol=0.0, atol=0.0)


def test_stored_weights_are_as_old_when_they_are_restored() -> None:
    def body(model: nn.Module, engines: Any) -> None:
        engine = engines[0]()
        average, given = trained(model, engine).of_diffusers, [*model.parameters()]
        average.store(given)
        average.copy_to(given)
        engine.gather_state_dict()
        average.restore(given)
        with pytest.raises(fxpipe.RunError, match=r"call engine.sync_model\(\)"):
            model.state_dict()
        engine.sync_model()
        before = [parameter.detach().clone() for parameter in given]
        average.store(given)
        average.copy_to(given)
        average.restore(given)
        model.state_dict()
        torch.testing.assert_close([parameter.detach() for parameter in given], before, rtol=0.0, atol=0.0)

    on_threads(2, [LINE], body)


class Distilled(nn.Module):
    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.teacher, self.student = Adapted().requires_grad_(trained), Adapted("adapters")


@pytest.mark.parametrize("average", [AveragedModel, lambda module: EMAModel(module.parameters())])
def test_averages_of_a_module_go_by_its_parameters(average: Any) -> None:
    model = Distilled(trained=False)
    found = WeightNames(model).by_parameter(average(model.student))
    assert list(found) == [f"student.{name}" for name, _ in model.student.named_parameters()]
    assert list(WeightNames(model).by_parameter(AveragedModel(torch.compile(model.student)))) == list(
        f"student.{name}" for name, _ in model.student.named_parameters()
    )
    adapters = [p for p in model.student.parameters() if p.requires_grad]
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert list(WeightNames(model).by_parameter([p.detach().clone() for p in adapters])) == names
    alike = Distilled(trained=True)
    alike.student.requires_grad_(True)
    assert not WeightNames(alike).by_parameter(average(alike.student)), "or of the teacher"


def test_a_list_of_what_a_rank_trains_goes_by_no_module() -> None:
    model = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2), nn.Linear(2, 2)])
    own = [*model[1].parameters(), *model[2].parameters()]
    given = [parameter.detach().clone() for parameter in own]
    assert list(WeightNames(model).by_parameter(given)) == [f"0.{name}" for name, _ in model[0].named_parameters()]
    assert not WeightNames(model, own).by_parameter(given)


def test_what_is_like_one_parameter_alone_is_no_average_of_the_model() -> None:
    model = nn.ModuleDict({"norm": nn.RMSNorm(5), "linear": nn.Linear(5, 3)})
    names, average = WeightNames(model), torch.zeros(5)
    assert names.by_parameter({"of the norm": [average]}) == {"norm.weight": [average]}
    for value in ([average], {"weight": average}):
        called = ["0"] if isinstance(value, list) else [*value]
        assert names.of_whole([average], called) == called
    for other in ([3, average], {"0": 3, "1": average}, [average.long()]):
        assert not names.by_parameter(other)


def test_tied_parameters_are_found_by_each_of_their_names() -> None:
    model = nn.ModuleDict({"first": nn.Linear(3, 3), "second": nn.Linear(3, 3)})
    model["second"].weight = model["first"].weight
    whole = nn.ModuleDict({"of": model, "other": nn.Linear(2, 2)})
    average = AveragedModel(model)
    found = WeightNames(whole).by_parameter(average)
    assert {name: len(tensors) for name, tensors in found.items()} == {
        "of.first.weight": 2,
        "of.first.bias": 1,
        "of.second.bias": 1,
    }


class Copied(Averages):
    def state_dict(self) -> dict[str, Any]:
        return {"own": [value.clone() for value in self.own]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own = state["own"]


def test_what_averages_nothing_of_the_model_is_refused() -> None:
    model = Adapted()
    program = fxpipe.compile(model, 2, example_inputs=batch(0, ROWS[0]), schedule="1f1b", microbatches=2)
    with pytest.raises(fxpipe.RunError, match="list has no tensor for each parameter of the model, or of one of its"):
        program.local_engine().sync_model([torch.zeros(3)])
    with pytest.raises(fxpipe.RunError, match="Copied gives copies of its tensors in state_dict"):
        program.local_engine().sync_model(Copied(model))
