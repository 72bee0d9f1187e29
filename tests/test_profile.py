"""Profiles: interpolation, keys, files; and what the cost table says of a model counted by hand."""

import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn

import fxpipe
from cost_models.devices import device
from cost_models.profile_files import load, save
from cost_models.profiled import Entry, Key, Profile, Speeds, interpolated, key_of
from cost_models.timing import expected
from fxpipe.analysis import CostedStep, costed
from fxpipe.costs.model import node_seconds
from fxpipe.errors import CompileError
from fxpipe.profiling import ROUNDS, Profiler, gathered
from fxpipe.show.cost_report import cost_data, formula, rows
from tests.distributed import run_processes
from tests.peer_cases import PEER_CASES
from tests.test_cli import TOY, invoke
from tests.toy_model import ToyStep
from tests.unet import TinyUNet

BASE = device()
CPU = torch.device("cpu")


def measure(
    step: CostedStep,
    batch_sizes: list[int],
    device: torch.device,
    progress: Callable[[str], None] = lambda name: None,
    share: tuple[int, int] = (0, 1),
    rounds: int = ROUNDS,
) -> Profile:
    profiler = Profiler(step, batch_sizes, device, share)
    for _ in range(rounds):
        profiler.round(progress)
    return profiler.profile()


@pytest.fixture(scope="module")
def step() -> CostedStep:
    return costed(TinyUNet("requires_grad"), None, 4, BASE, 8)


@pytest.fixture(scope="module")
def measured(step: CostedStep) -> Profile:
    return measure(step, [2, 1], CPU)


@pytest.mark.parametrize(
    ("num_samples", "seconds"), [(2, 10.0), (3, 12.0), (4, 14.0), (6, 20.0), (8, 26.0), (16, 50.0), (1, 8.0)]
)
def test_interpolation_is_piecewise_linear(num_samples: int, seconds: float) -> None:
    assert interpolated((2, 4, 8), (10.0, 14.0, 26.0), num_samples) == seconds


def test_interpolation_from_one_point_and_below_zero() -> None:
    assert interpolated((4,), (8.0,), 6) == 12
    assert interpolated((4, 8), (1.0, 9.0), 1) == 0
    assert interpolated((1, 4), (3.0, 2.0), 8) == 2


def test_expected_times_leave_out_the_extremes() -> None:
    assert expected([3.0]) == 3.0
    assert expected([2.0, 1.0, 6.0]) == 3.0
    assert expected([*range(1, 10), 1000.0]) == sum(range(2, 10)) / 8


def test_every_part_is_timed_at_every_size(step: CostedStep, measured: Profile) -> None:
    names = [*step.frozen.nodes[0], *(block.nodes for block in step.graph.blocks)]
    assert [entry.nodes for entry in measured.entries] == names
    assert all(entry.samples == (1, 2) and min(entry.forward_seconds) > 0 for entry in measured.entries)
    layers, blocks = measured.entries[: -len(step.graph.blocks)], measured.entries[-len(step.graph.blocks) :]
    assert all(layer.backward_seconds == (0, 0) and layer.input_seconds == () for layer in layers)
    assert all(min(entry.backward_seconds) > 0 for entry in blocks)
    for part in ("input_seconds", "weight_seconds"):
        assert {bool(getattr(entry, part)) and min(getattr(entry, part)) > 0 for entry in blocks[1:]} == {True, False}
    assert blocks[0].input_seconds == ()  # nothing wants gradients of what comes into the first
    told: list[str] = []
    profiler = Profiler(step, [1], CPU)
    profiler.round(told.append)
    assert told == [entry.name for entry in measured.entries]
    assert len(told) == profiler.num_timings


def test_what_is_done_between_stages_is_measured(measured: Profile, tmp_path: Path) -> None:
    assert measured.speeds is not None
    assert measured.moving_seconds(200, 100) == 300 / measured.speeds.moving
    assert measured.speeds.drawing == ()  # nothing is drawn in this step
    save(measured, tmp_path / "profile.json")
    assert load(tmp_path / "profile.json", BASE).speeds == measured.speeds


class Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) - torch.randn_like(x)).square().mean()


def test_draws_take_their_time() -> None:
    program = fxpipe.compile(Drawn(), 1, example_inputs=(torch.randn(8, 4),), microbatches=2, schedule="gpipe")
    (found,) = (draw.target for draw in program.step.draws.values())
    speeds = Speeds(moving=1e30, drawing=((found, 100.0),))
    slow = Profile(BASE, key_of(program.costed.costs, CPU), (), speeds)
    added = program.simulate(cost_model=slow).makespan_seconds - program.simulate(cost_model=BASE).makespan_seconds
    assert added == pytest.approx(8 * 4 * 4 / 100.0, rel=1e-3)  # once, for the whole batch
    assert slow.drawing_seconds("another", 100) == BASE.drawing_seconds(found, 100) == 0.0


def test_draws_are_timed_by_operation(tmp_path: Path) -> None:
    step = costed(Drawn(), (torch.randn(8, 4),), 8, BASE, 2)
    found = measure(step, [8], CPU)
    assert found.speeds is not None
    assert [target for target, _ in found.speeds.drawing] == ["aten.randn_like.default"]
    assert found.drawing_seconds("aten.randn_like.default", 100) > 0
    save(found, tmp_path / "profile.json")
    assert load(tmp_path / "profile.json", BASE).speeds == found.speeds


def test_shares_of_a_profile_make_the_whole(step: CostedStep, measured: Profile) -> None:
    told: list[str] = []
    shares = [measure(step, [1, 2], CPU, told.append, (rank, 3), rounds=2) for rank in range(3)]
    assert sorted(told) == sorted(4 * [entry.name for entry in measured.entries])
    whole = gathered(shares)
    assert [(e.name, e.nodes, e.samples) for e in whole.entries] == [
        (e.name, e.nodes, e.samples) for e in measured.entries
    ]
    assert whole.key == measured.key
    elsewhere = dataclasses.replace(shares[1], key=dataclasses.replace(measured.key, device="another"))
    with pytest.raises(CompileError, match="the profile is of another device, another"):
        gathered([shares[0], elsewhere])


def profile_rank(path: str) -> list[str]:
    """One of several processes that profile together, and again; what it printed."""
    printed = []
    for _ in range(2):
        code, out, error = invoke("profile", f"{TOY}:toy", "--out", path, "--batch-sizes", "1,2")
        assert code == 0, error
        printed.append(out)
    return printed


def test_ranks_profile_together_and_rank_0_writes(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    (made, held), nothing = run_processes(2, profile_rank, str(path))
    assert "16 parts at 1, 2 samples" in made
    assert "by 2 ranks" in made
    assert "holds already" in held
    assert nothing == ["", ""]
    profile = load(path, BASE)
    found = costed(ToyStep(), None, 2, BASE, 24)
    parts = [*(nodes for of in found.frozen.nodes for nodes in of), *(block.nodes for block in found.graph.blocks)]
    assert [entry.nodes for entry in profile.entries] == parts


def test_nodes_share_what_their_block_was_measured(step: CostedStep) -> None:
    entry = Entry("all", tuple(step.costs), (1, 3), (1.0, 3.0), (2.0, 8.0))
    seconds = node_seconds(Profile(BASE, key_of(step.costs, CPU), (entry,)), step.costs, 2)
    assert seconds.forward.sum() == pytest.approx(2)
    assert seconds.backward.sum() == pytest.approx(5)


def test_gradients_of_activations_take_what_was_measured(step: CostedStep) -> None:
    """Of a part that was cut in two; of another what the base says."""
    base = node_seconds(BASE, step.costs, 2)
    cut = Entry("all", tuple(step.costs), (1, 3), (1.0, 3.0), (2.0, 8.0), (1.5, 2.5), (1.0, 7.0))
    quick = dataclasses.replace(cut, weight_seconds=(0.1, 0.1))  # by chance: parts take no less than the whole
    whole = dataclasses.replace(cut, input_seconds=(), weight_seconds=())
    in_base = 5 * base.backward_input.sum() / base.backward.sum()
    for entry, *wanted in ((cut, 2.0, 4.0), (quick, 2.0, 3.0), (whole, in_base, 5 - in_base)):
        seconds = node_seconds(Profile(BASE, key_of(step.costs, CPU), (entry,)), step.costs, 2)
        assert [seconds.backward_input.sum(), seconds.backward_weight.sum()] == pytest.approx(wanted)
        assert seconds.backward.sum() == pytest.approx(5)


def test_a_profile_is_a_file_that_compile_reads(measured: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save(measured, path)
    assert load(path, BASE) == measured
    program = fxpipe.compile(TinyUNet("requires_grad"), 2, batch_size=4, cost_model=str(path))
    assert sum(program.block_seconds) > 0
    with pytest.raises(CompileError, match="the profile is of another graph, "):
        fxpipe.compile(ToyStep(), 2, batch_size=4, cost_model=str(path))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("torch", "1.0", "of another torch version, 1.0; here it is 2"),
        ("fingerprint", "5f", "of another graph, 5f; here it is "),
    ],
)
def test_other_keys_are_refused(step: CostedStep, measured: Profile, field: str, value: str, says: str) -> None:
    other = dataclasses.replace(measured, key=dataclasses.replace(measured.key, **{field: value}))
    with pytest.raises(CompileError, match=says):
        other.seconds(step.costs, 1)


@pytest.mark.parametrize("text", ["", "{}", "[]", json.dumps({"key": {"a": 1}, "entries": []})])
def test_wrong_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(CompileError, match=r"p.json is no profile"):
        load(tmp_path / "p.json", BASE)
    with pytest.raises(CompileError, match=r"no profile .*q.json; fxpipe profile MODEL --out .* makes it"):
        load(tmp_path / "q.json", BASE)


GOOD = {
    "key": {"fingerprint": "5f", "device": "abacus", "torch": "2"},
    "memory_bytes": None,
    "entries": [
        {
            "name": "a",
            "nodes": ["x"],
            "samples": [1, 4],
            "forward_seconds": [0.1, 1],
            "backward_seconds": [0, 0],
            "input_seconds": [],
            "weight_seconds": [],
        }
    ],
    "speeds": {"moving": 1e9, "drawing": [["randn", 2.0]]},
}


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("key", "device"), 7, "the key's values are texts"),
        (("memory_bytes",), "80 GB", "memory_bytes is positive, or null; got '80 GB'"),
        (("entries", 0, "samples"), [4, 1], "samples are positive integers, ascending; got 'a'"),
        (("entries", 0, "samples"), [0, 1], "samples are positive integers, ascending; got 'a'"),
        (("entries", 0, "samples"), [], "samples are positive integers, ascending; got 'a'"),
        (("entries", 0, "samples"), [1.0, 2.0], "samples are positive integers, ascending; got 'a'"),
        (("entries", 0, "forward_seconds"), [0.1], "seconds: one per size"),
        (("entries", 0, "forward_seconds"), [0.1, -1], "seconds: one per size"),
        (("entries", 0, "backward_seconds"), [0.1, "1"], "seconds: one per size"),
        (("entries", 0, "weight_seconds"), [0.1], "seconds: one per size"),
        (("entries", 0, "nodes"), [["x"]], "names are texts; got 'a'"),
        (("entries", 0, "nodes"), 7, "TypeError"),
        (("entries",), 7, "TypeError"),
        (("entries",), [*GOOD["entries"], *GOOD["entries"]], "an operation is in one entry; got ['x']"),
        (("entries", 0, "nodes"), ["x", "x"], "an operation is in one entry; got ['x']"),
        (("speeds", "moving"), 0, "speeds are positive"),
        (("speeds", "drawing"), [["randn", None]], "speeds are positive"),
        (("speeds", "moving"), float("inf"), "Infinity is no number of seconds"),
        (("entries", 0, "forward_seconds"), [0.1, float("nan")], "NaN is no number of seconds"),
    ],
)
def test_wrong_values_in_files_are_refused(place: tuple[str | int, ...], value: Any, says: str, tmp_path: Path) -> None:
    path, data = tmp_path / "p.json", json.loads(json.dumps(GOOD))
    path.write_text(json.dumps(data))
    assert load(path, BASE).entries[0].samples == (1, 4)
    part = data
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    path.write_text(json.dumps(data))
    with pytest.raises(CompileError, match="is no profile") as caught:
        load(path, BASE)
    assert says in str(caught.value)


def test_files_are_read_as_json_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    for content in (pickle.dumps(GOOD), b"\xff\xfe", 100_000 * b"[", b'{"a": 1'):
        path.write_bytes(content)
        with pytest.raises(CompileError, match="is no profile"):
            load(path, BASE)


def test_entries_of_operations_that_are_not_there_are_refused(step: CostedStep) -> None:
    entry = Entry("a", ("nowhere",), (1,), (1.0,), (1.0,))
    with pytest.raises(CompileError, match="the profile times 'nowhere', which the graph does not have"):
        node_seconds(Profile(BASE, key_of(step.costs, CPU), (entry,)), step.costs, 1)


def test_a_profile_holds_for_a_step_that_is_rewritten_for_micro_batches() -> None:
    model = PEER_CASES["tied_parameters"]()  # cross_entropy: a sum, divided by the number of targets
    made = measure(costed(model, model.example_inputs(4), 4, BASE, 4), [2], CPU)
    program = fxpipe.compile(model, 2, batch_size=4, microbatches=2, cost_model=made)
    assert sum(program.block_seconds) > 0


class Across(nn.Module):
    """Samples mixed by what is trained: it runs in one micro-batch, or is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return (y.mT @ y).square().mean()


def test_what_cannot_be_cut_is_costed_all_the_same() -> None:
    with pytest.raises(CompileError, match="micro-batches would give another result"):
        fxpipe.compile(Across(), 2, example_inputs=(torch.randn(4, 6),), microbatches=2)
    found = costed(Across(), (torch.randn(4, 6),), 4, BASE, 4)
    made = measure(found, [4], CPU)
    assert sum(found.blocks.at(4).forward_seconds) > 0
    assert sum(sum(entry.backward_seconds) for entry in made.entries) > 0


def test_there_is_no_profile_before_the_first_round(step: CostedStep) -> None:
    with pytest.raises(CompileError, match=r"nothing has been timed yet; call round\(\)"):
        Profiler(step, [1], CPU).profile()


def test_sizes_must_be_positive(step: CostedStep) -> None:
    with pytest.raises(CompileError, match=r"must be positive, got \[0, 2\]"):
        measure(step, [0, 2], CPU)


def test_the_command_reuses_a_profile_and_refuses_another_models(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    code, first, _ = invoke("profile", f"{TOY}:toy", "--out", str(path), "--batch-sizes", "1,2")
    assert (code, "16 parts at 1, 2 samples" in first) == (0, True)
    written = path.read_text()
    assert "holds already" in invoke("profile", f"{TOY}:toy", "--out", str(path), "--batch-sizes", "2")[1]
    key = Key(**json.loads(written)["key"])
    path.write_text(written.replace(key.device, "another processor"))
    code, _, error = invoke("profile", f"{TOY}:toy", "--out", str(path), "--batch-sizes", "2")
    assert (code, error.count("\n")) == (2, 1)
    assert "the profile is of another device, another processor" in error
    code, _, error = invoke("profile", f"{TOY}:toy", "--out", str(path), "--batch-sizes", "two")
    assert (code, "'two' is not a list of numbers" in error) == (2, True)


def test_the_cost_table_shows_formulas_and_totals() -> None:
    code, out, _ = invoke("cost", f"{TOY}:toy", "--batch-size", "1000", "--device-model", "V100-32GB")
    assert code == 0
    (total,) = (line for line in out.splitlines() if line.strip().startswith("total"))
    # Eight layers of 6x6 with biases; the first one's input needs no gradient. 24 bytes each are kept of what seven
    # products, six silus and the loss read.
    assert total.split()[:6] == ["total", "336", f"{14 * 24}*b", "576*b", "504*b", "576*b"]
    assert "0.000 GMACs forward, 0.001 GMACs backward" in out
    assert max(map(len, out.splitlines())) <= 120


def test_the_cost_table_as_data(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    assert invoke("cost", f"{TOY}:toy", "--batch-size", "4", "--json", str(path))[0] == 0
    data = json.loads(path.read_text())
    total = data["total"]
    assert (total["forward_flops"], total["backward_input_flops"]) == ("576*b", "504*b")
    assert (total["num_weights"], total["weight_bytes"], data["uncosted_ops"]) == (336, 4 * 336, [])
    assert {part["kind"] for part in data["parts"]} == {"block"}
    for name in ("forward_flops", "bytes_read", "saved_bytes"):
        per_part = sum(sympy.sympify(part[name]) for part in data["parts"])
        assert sympy.expand(per_part - sympy.sympify(total[name])) == 0
    of_nodes = sum(sympy.sympify(node.get("forward_flops", "0")) for node in data["nodes"])
    assert str(of_nodes) == "576*b"
    assert total["forward_seconds"] == pytest.approx(sum(part["forward_seconds"] for part in data["parts"]))


def test_rows_tell_frozen_from_trained(step: CostedStep) -> None:
    frozen, *blocks, total = rows(step, 4)
    assert (frozen.kind, frozen.saved_bytes, frozen.input_gradient_seconds) == ("component", 0, 0.0)
    assert len(blocks) == len(step.graph.blocks)
    assert total.num_weights == sum(row.num_weights for row in (frozen, *blocks))
    assert len(cost_data(step, 4)["parts"]) == len(step.parts)


def test_plans_are_made_for_the_cluster_and_device_of_the_command_line() -> None:
    toy = ("compile", f"{TOY}:toy", "--world-size", "2")
    code, _, error = invoke(*toy, "--cluster", "1xA100")
    assert (code, "world_size=2, but the cluster 1xA100-80GB has 1 devices" in error) == (2, True)
    code, _, error = invoke(*toy, "--device-model", "B300")
    assert (code, "unknown device 'B300'" in error) == (2, True)
    assert invoke(*toy, "--cluster", "2x1xV100", "--device-model", "CPU")[0] == 0


def test_formulas() -> None:
    s = sympy.Symbol("s", integer=True, positive=True)
    assert formula(sympy.Integer(1234)) == "1.23 K"
    assert formula(sympy.Integer(999_700)) == "1 M"
    assert formula(12_600_000_000 * s + 3_000_000) == "12.6 G*b + 3 M"
    assert formula(5 * s * (s + 1)) == "5*b^2 + 5*b"
    assert formula(sympy.floor(s / 2)) == "floor(b/2)"
