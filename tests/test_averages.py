"""Averages of weights that several ranks train: right where a parameter is trained, refused elsewhere until brought."""

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


def test_averages_where_all_train_all_are_everyones() -> None:
    def body(model: nn.Module, engines: Any) -> list[list[Tensor]]:
        return trained(model, engines[0]()).values()

    first, second = on_threads(2, [COPIES], body)
    torch.testing.assert_close(first, second, rtol=0.0, atol=0.0)


class Distilled(nn.Module):
    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.teacher, self.student = Adapted().requires_grad_(trained), Adapted("adapters")


@pytest.mark.parametrize("average", [AveragedModel, lambda module: EMAModel(module.parameters())])
def test_averages_of_a_module_go_by_its_parameters(average: Any) -> None:
    model = Distilled(trained=False)
    found = WeightNames(model).by_parameter(average(model.student))
    assert list(found) == [f"student.{name}" for name, _ in model.student.named_parameters()]
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


def test_what_averages_nothing_of_the_model_is_refused() -> None:
    program = fxpipe.compile(Adapted(), 2, example_inputs=batch(0, ROWS[0]), schedule="1f1b", microbatches=2)
    with pytest.raises(fxpipe.RunError, match="list has no tensor for each parameter of the model, or of one of its"):
        program.local_engine().sync_model([torch.zeros(3)])
