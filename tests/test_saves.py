"""Runs that are saved and taken up again: to the same bits in one layout, exactly in others, whatever ended them."""

import copy
import errno
import json
import os
import resource
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import fxpipe
from fxpipe.plan.transport import Transport
from fxpipe.run.engine import Engine
from fxpipe.run.kinds import BatchKind
from fxpipe.run.optimizer_steps import ELSEWHERE
from fxpipe.run.ownership import as_is
from fxpipe.run.saves import engine_saves, folders, parts
from fxpipe.run.saves.values import decode, encode
from fxpipe.run.transport import run_ranks
from tests.distributed import start_processes, start_torchrun
from tests.own_models import SEED, Adapted, batch, copying
from tests.saved_runs import ROWS, SavedRun, local, on_one_device

LINE, WAVE, REPLICAS = {"schedule": "1f1b"}, {"schedule": "wave"}, {"schedule": "1f1b", "data_parallel": 2}
WEIGHTS = {"schedule": "interleaved", "data_parallel": 3, "stages": 3, "microbatches": 3, "shard": "weights"}
STEPS = 4


def on_ranks(world_size: int, layout: dict[str, Any], body: Callable[[SavedRun], Any]) -> list[Any]:
    """`body` on every rank of a layout, each with a model of its own."""
    models = [Adapted() for _ in range(world_size)]
    given = {"example_inputs": batch(0, ROWS), "microbatches": 2, **layout}
    programs = [fxpipe.compile(model, world_size, **given) for model in models]

    def of_rank(transport: Transport) -> Any:
        program, model = programs[transport.rank], models[transport.rank]
        return body(SavedRun(model, Engine(BatchKind(program.step, program.state), model, copying(transport), SEED)))

    return run_ranks(world_size, of_rank)


def uninterrupted(run: SavedRun, directory: Path) -> Any:
    """Losses and weights of a run that was saved in its middle, and how its random numbers went on then."""
    losses = run.train(0, STEPS // 2)
    assert run.save(directory) == directory.resolve() / "step-4"
    losses += run.train(STEPS // 2, STEPS)
    return losses, run.weights()


def taken_up(run: SavedRun, load: Callable[[SavedRun], Any]) -> Any:
    loaded = load(run)
    assert (loaded.step_index, loaded.extra) == (4, {"number": 3})
    return run.train(2, STEPS), run.weights()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint of two ranks after two steps, and what they have found after four."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    first, _ = on_ranks(2, LINE, lambda run: uninterrupted(run, directory))
    return directory, first


def test_the_same_layout_goes_on_to_the_same_bits(saved: tuple[Path, Any]) -> None:
    directory, (losses, weights) = saved
    first, _ = on_ranks(2, LINE, lambda run: taken_up(run, lambda run: run.load(directory)))
    torch.testing.assert_close(first, (losses[4:], weights), rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    "take_up",
    [
        lambda directory: on_ranks(4, REPLICAS, lambda run: taken_up(run, lambda run: run.load(directory)))[0],
        lambda directory: on_ranks(3, WEIGHTS, lambda run: taken_up(run, lambda run: run.load(directory)))[0],
        lambda directory: on_ranks(2, WAVE, lambda run: taken_up(run, lambda run: run.load(directory)))[0],
        lambda directory: taken_up(local(WAVE), lambda run: run.load(directory)),
        lambda directory: taken_up(on_one_device(), lambda run: run.load_plain(directory)),
    ],
    ids=["replicas", "shared weights", "wave", "one process", "one device"],
)
def test_another_layout_goes_on_exactly(saved: tuple[Path, Any], take_up: Callable[[Path], Any]) -> None:
    directory, (losses, weights) = saved
    torch.testing.assert_close(take_up(directory), (losses[4:], weights), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_shares_of_replicas_go_on_in_any_layout(shard: str, saved: tuple[Path, Any], tmp_path: Path) -> None:
    _, (losses, weights) = saved
    shares = {"schedule": "gpipe", "data_parallel": 2, "shard": shard}
    first, _ = on_ranks(2, shares, lambda run: uninterrupted(run, tmp_path))
    torch.testing.assert_close(first, (losses, weights), rtol=1e-10, atol=1e-12)
    for layout in (shares | {"shard": "none"}, WAVE):
        found, _ = on_ranks(2, layout, lambda run: taken_up(run, lambda run: run.load(tmp_path)))
        torch.testing.assert_close(found, (losses[4:], weights), rtol=1e-10, atol=1e-12)


def test_every_tensor_is_written_once(saved: tuple[Path, Any]) -> None:
    files = [parts.SavedPart(path) for path in sorted((saved[0] / "step-4").glob("*.safetensors"))]
    keys = Counter(key for file in files for key in file.sums)
    assert len(files) == 2
    assert [key for key, count in keys.items() if count > 1] == [
        "random.cpu",
        "extra.average.n_averaged",
        "extra.average.module.scale",
    ]
    assert {f"model.{name}" for name in Adapted().state_dict()} < keys.keys()


def test_of_gradients_that_no_optimizer_has_used_a_save_tells(tmp_path: Path) -> None:
    run = local(LINE)
    run.engine.step(batch(0, ROWS))
    with pytest.warns(UserWarning, match=r"that no optimizer has used are not saved.*save after optimizer\.step"):
        run.engine.save(tmp_path)
    run.optimizer.step()
    run.engine.save(tmp_path)
    run.engine.load(tmp_path)
    assert all(parameter.grad is None for parameter in run.model.parameters())
    run.engine.save(tmp_path)


def test_states_of_an_optimizer_keep_their_types(tmp_path: Path) -> None:
    """`mu_product` is in float32 beside weights in float64."""
    run, again = local(LINE), local(WAVE)
    of, other = (torch.optim.NAdam(one.model.parameters()) for one in (run, again))
    run.engine.step(batch(0, ROWS))
    of.step()
    run.engine.save(tmp_path, of)
    again.engine.load(tmp_path, other)
    torch.testing.assert_close(other.state_dict()["state"], of.state_dict()["state"], rtol=0.0, atol=0.0)


def test_nested_states_of_an_optimizer_keep_their_types(tmp_path: Path) -> None:
    run = local(LINE)
    of, other = (torch.optim.Adagrad(run.model.parameters()) for _ in range(2))
    like = [torch.full((2,), 0.1, dtype=torch.float64)]
    for parameter in run.model.parameters():
        of.state[parameter] |= {"GG": like, "both": {"means": (like[0], 3)}}
    run.engine.save(tmp_path, of)
    run.engine.load(tmp_path, other)
    torch.testing.assert_close(other.state_dict()["state"], of.state_dict()["state"], rtol=0.0, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.bfloat16, torch.bool, torch.int64])
def test_a_part_holds_tensors_of_any_type(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(1).to(dtype),
        "views": torch.arange(12).reshape(3, 4).to(dtype).T,
        "none": torch.empty(0, 2).to(dtype),
    }
    path = tmp_path / parts.part_name(0, 1)
    parts.write_part(path, tensors, {})
    for name, tensor in tensors.items():
        torch.testing.assert_close(parts.SavedPart(path).tensor(name), tensor, rtol=0.0, atol=0.0)


def test_weights_that_are_frozen_can_be_left_out(tmp_path: Path) -> None:
    model = Adapted("adapters")
    program = fxpipe.compile(model, 2, example_inputs=batch(0, ROWS), microbatches=2, **LINE)
    engine = program.local_engine(seed=SEED)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.1)
    for _ in engine.train([batch(0, ROWS), batch(1, ROWS)], optimizer):
        engine.save(tmp_path, optimizer, trainable_only=True, asynchronous=True, keep=1)
    engine.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]
    assert not any(key.startswith("model.layers") for key in parts.SavedPart(*tmp_path.glob("*/*.safetensors")).sums)
    other = Adapted("adapters")
    fxpipe.load_checkpoint(tmp_path, other)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0.0, atol=0.0)
    other.layers[3].weight.data += 1
    with pytest.raises(fxpipe.RunError, match=r"step-2 was not loaded.*layers.3.weight is frozen.*same base model"):
        fxpipe.load_checkpoint(tmp_path, other)


def test_frozen_weights_that_were_written_are_not_left_out(tmp_path: Path) -> None:
    """As those of a target network, which is an average of what is trained."""
    model = Adapted("adapters")
    program = fxpipe.compile(model, 2, example_inputs=batch(0, ROWS), microbatches=2, **LINE)
    engine = program.local_engine(seed=SEED)
    with torch.no_grad():
        model.layers[1].weight[2, 3] += 1
        model.layers[2].bias.data *= 2
    engine.save(tmp_path, trainable_only=True)
    keys = parts.SavedPart(*tmp_path.glob("*/*.safetensors")).sums.keys()
    assert {key for key in keys if key.startswith("model.layers")} == {"model.layers.1.weight", "model.layers.2.bias"}
    other = Adapted("adapters")
    fxpipe.load_checkpoint(tmp_path, other)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0.0, atol=0.0)


def test_values_come_back_as_they_were() -> None:
    value = {
        1: (None, True, [1, 2.5, "text"]), ("a", 2): Counter({3: 2}), "nan": float("inf"), "empty": {},
        "numbers": np.arange(3, dtype=np.uint32), "number": np.int64(7),
    }  # fmt: skip
    tensors: dict[str, torch.Tensor] = {}

    def keep(key: str, name: str, tensor: torch.Tensor) -> str:
        tensors[key] = tensor
        return key

    back = decode(json.loads(json.dumps(encode(value, "extra", keep))), tensors.__getitem__)
    np.testing.assert_array_equal(back.pop("numbers"), value.pop("numbers"))  # type: ignore[call-overload]
    assert back == value
    assert isinstance(back["a", 2], Counter)
    with pytest.raises(fxpipe.RunError, match=r"extra.best.0 is a Adapted, which is not saved: give numbers"):
        encode({"best": [Adapted()]}, "extra", keep)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def overwrite(path: Path, place: int) -> None:
    """One other byte."""
    found = bytearray(path.read_bytes())
    found[place] ^= 1
    path.write_bytes(found)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (Path.unlink, "rank-1-of-2.safetensors missing"),
        (truncate, "rank-1-of-2.safetensors cannot be read"),
        (lambda path: overwrite(path, -1), r"rank-1-of-2.safetensors: .* is not what was written"),
        (lambda path: overwrite(path, path.read_bytes().index(b'\\"seed\\"') + 3), "its values are not those"),
        (lambda path: shutil.copy(path.parents[1] / "step-4" / path.name, path), "not written together"),
    ],
)
def test_what_is_damaged_is_named_and_the_one_before_loaded(
    saved: tuple[Path, Any], tmp_path: Path, damage: Callable[[Path], Any], says: str
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(saved[0] / "step-4", directory / "step-4")
    shutil.copytree(saved[0] / "step-4", directory / "step-10")
    (directory / "step-12.partial-01234567").mkdir()
    path = directory / "step-10" / "rank-1-of-2.safetensors"
    if "together" in says:
        body = parts.SavedPart(path).body | {"save": "another"}
        body.pop("sums")
        parts.write_part(path.with_name("rank-0-of-2.safetensors"), {}, body)
    damage(path)
    with pytest.warns(UserWarning, match=f"loading step-4, since step-10 is not whole: .*{says}"):
        assert fxpipe.load_checkpoint(directory, Adapted()).folder.name == "step-4"
    with pytest.raises(fxpipe.RunError, match=f"step-10 is not whole: .*{says}.*copy it again"):
        fxpipe.load_checkpoint(directory / "step-10", Adapted())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda run: run.model.float(), r"scale is \[6\] torch.float32, and was saved as \[6\] torch.float64"),
        (lambda run: run.model.add_module("more", nn.Linear(2, 2)), r"2 tensors .more.bias, .* not in the checkpoint"),
        (lambda run: run.optimizer.param_groups.reverse(), r"layers.0.bias is in the optimizer's group 0, .* group 1"),
        (
            lambda run: setattr(run, "optimizer", SGD(run.model.parameters())),
            "optimizer is a SGD, and an? AdamW was saved",
        ),
        (
            lambda run: setattr(run, "scheduler", StepLR(run.optimizer, 2)),
            "scheduler is a StepLR, and a MultiStepLR was",
        ),
        (lambda run: run.optimizer.param_groups.pop(), "optimizer has 1 groups, and was saved with 2"),
        (
            lambda run: run.optimizer.param_groups[0]["params"].pop(0),
            r"layers.0.weight has a state .* not in the optimizer",
        ),
        (lambda run: run.momentum.add_param_group({"params": []}), "optimizer has 2 groups, and was saved with 1"),
        (lambda run: setattr(run, "average", 0.5), r"extra.average was saved, or is given, as a plain value"),
    ],
)
def test_another_run_is_refused(saved: tuple[Path, Any], change: Callable[[SavedRun], Any], says: str) -> None:
    run = on_one_device()
    change(run)
    with pytest.raises(fxpipe.RunError, match=f"step-4 was not loaded: .*{says}"):
        run.load_plain(saved[0])
    assert not run.optimizer.state
    torch.testing.assert_close(run.model.layers[0].weight, Adapted().layers[0].weight.to(run.model.scale.dtype))


def test_several_optimizers_are_told_to_be_saved_by_name(tmp_path: Path) -> None:
    run = local(LINE)
    with pytest.raises(fxpipe.RunError, match=r"optimizer is a list; give one of torch.optim, and further .* extra"):
        run.engine.save(tmp_path, [run.optimizer, run.momentum])


def test_what_one_rank_has_of_an_optimizer_is_told_and_not_taken_for_anothers() -> None:
    def body(run: SavedRun) -> None:
        kinds = torch.optim.AdamW, torch.optim.Adagrad  # this one has states before its first step
        before = [kind(run.model.parameters()) for kind in kinds]
        run.engine.step(batch(0, ROWS))
        for optimizer in before:
            optimizer.step()
        states = None
        if run.engine.rank == 0:
            with pytest.warns(UserWarning, match=r"on rank 0 is without the states of \d+ parameters") as told:
                states = [copy.deepcopy(optimizer.state_dict()) for optimizer in before]
            assert {warning.filename for warning in told} == {__file__}
        anew = [kind(run.model.parameters()) for kind in kinds]
        for optimizer, state in zip(anew, run.engine._everyones(states)[0], strict=True):
            optimizer.load_state_dict(state)
        if run.engine.rank == 0:
            for optimizer in anew:
                optimizer.step()
        run.engine._everyones(None)  # one rank at a time catches warnings
        if run.engine.rank == 1:
            with pytest.raises(fxpipe.RunError, match=r"without those of \d+ parameters that are trained here"):
                anew[0].step()
            with pytest.warns(UserWarning, match="theirs are out of date"):
                anew[1].step()
        run.engine._everyones(None)

    on_ranks(2, LINE, body)


def test_states_of_all_ranks_put_together_by_hand_are_taken(tmp_path: Path) -> None:
    """Of one group there are none. What a rank was given is not saved, and told from the load on."""

    def in_groups(run: SavedRun) -> SGD:
        named = [*run.model.named_parameters()]
        plain, moving = ([p for name, p in named if name.endswith("bias") is which] for which in (True, False))
        return SGD([{"params": plain, "momentum": 0.0}, {"params": moving, "momentum": 0.9}], 0.01)

    def body(run: SavedRun) -> None:
        optimizer, anew = in_groups(run), in_groups(run)
        run.engine.step(batch(0, ROWS))
        optimizer.step()
        with as_is():
            own = copy.deepcopy(optimizer.state_dict())
        own["param_groups"][1][ELSEWHERE] = []
        optimizer.load_state_dict(own)
        run.engine.save(tmp_path, optimizer)
        run.engine.load(tmp_path, anew)
        assert not any(ELSEWHERE in group for group in anew.param_groups)
        state = None
        if run.engine.rank == 0:
            with pytest.warns(UserWarning, match="on rank 0 is without the states of"):
                state = copy.deepcopy(anew.state_dict())
            assert [ELSEWHERE in group for group in state["param_groups"]] == [False, True]
        groups = run.engine._everyones(state)[0]["param_groups"]
        states = run.engine._everyones(own["state"])
        anew.load_state_dict({"state": {n: held for one in states for n, held in one.items()}, "param_groups": groups})
        run.engine.step(batch(1, ROWS))
        if run.engine.rank == 0:
            anew.step()
        run.engine._everyones(None)  # one rank at a time catches warnings
        if run.engine.rank == 1:
            with pytest.warns(UserWarning, match="theirs are out of date"):
                anew.step()
        run.engine._everyones(None)

    on_ranks(2, LINE, body)


def test_what_is_first_used_later_does_not_begin_anew_untold() -> None:
    first, later = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.Adam([first, later])
    first.grad = torch.ones(2)
    optimizer.step()
    optimizer.param_groups[0][ELSEWHERE] = [1]
    optimizer.step()
    later.grad = torch.ones(2)
    with pytest.raises(fxpipe.RunError, match="without those of 1 parameters that are trained here"):
        optimizer.step()


def test_what_ranks_had_apart_is_loaded_into_their_layout_alone(tmp_path: Path) -> None:
    def body(run: SavedRun) -> None:
        like = {name: torch.full_like(p, run.engine.rank) for name, p in run.model.down.state_dict().items()}
        extra = {"where": run.engine.rank, "by name": like, "in order": [*like.values()], "more": [3, *like.values()]}
        run.engine.save(tmp_path, extra=extra)
        torch.testing.assert_close(run.engine.load(tmp_path).extra, extra, rtol=0.0, atol=0.0)

    on_ranks(2, LINE, body)
    with pytest.raises(
        fxpipe.RunError, match=r"extra.where was not the same in rank-0-of-2.* does not go by the names"
    ):
        fxpipe.load_checkpoint(tmp_path, Adapted())


def test_a_part_is_written_when_another_rank_completes_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as the last part has its name, whoever looks gives the folder its own."""
    partial, rename = folders.begin(tmp_path, 3), Path.rename

    def renamed(path: Path, name: Path) -> Path:
        moved = rename(path, name)
        if moved.suffix == ".safetensors":
            folders.complete(partial, 1, keep=1)
        return moved

    monkeypatch.setattr(Path, "rename", renamed)
    parts.write_part(partial / parts.part_name(0, 1), {"a": torch.ones(2)}, {})
    assert [path.name for path in folders.checkpoints(tmp_path)] == ["step-3"]
    folders.complete(partial, 1, keep=1)  # by the rank itself, which has nothing left to do


def test_a_full_disk_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *given: Any) -> None:
        if path.name.startswith("rank-1"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        parts.write_part(path, *given)

    def body(run: SavedRun) -> Any:
        run.train(0, 1)
        run.save(tmp_path)
        run.train(1, 2)
        if run.engine.rank == 0:
            monkeypatch.setattr(engine_saves, "write_part", full)
        run.save(tmp_path, asynchronous=True)
        losses = run.train(2, 3)
        with pytest.raises(fxpipe.RunError, match=r"step-4 was not written.*make room.*: rank 1: .*No space left"):
            run.save(tmp_path)
        if run.engine.rank == 0:
            assert [path.name for path in tmp_path.iterdir()] == ["step-2"]
            monkeypatch.undo()
        run.engine.sync_model()
        run.save(tmp_path)
        return losses + run.train(3, 4), run.weights()

    first, _ = on_ranks(2, LINE, body)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-6"]
    one = on_one_device()
    torch.testing.assert_close(first, (one.train(0, STEPS)[4:], one.weights()), rtol=1e-10, atol=1e-12)


def test_a_file_that_cannot_grow_is_told_of_at_close(tmp_path: Path) -> None:
    run, limits = local(LINE), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(fxpipe.RunError, match=r"step-0 was not written.*File too large"):
            run.save(tmp_path)
        run.save(tmp_path, asynchronous=True)
        with pytest.raises(fxpipe.RunError, match=r"step-0 was not written.*File too large"):
            run.engine.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(fxpipe.RunError, match="no complete checkpoint"):
        run.load_plain(tmp_path)


def test_a_run_taken_up_before_its_end_leaves_no_later_checkpoint_in_its_way(tmp_path: Path) -> None:
    run = local(LINE)
    for step in (1, 3, 2, 2):
        run.engine.step_index = step
        folder = run.engine.save(tmp_path, extra={"engine of other sizes": run.engine}, keep=2)
    other = local(WAVE).engine
    assert run.engine.load(tmp_path, extra={"engine of other sizes": other}).folder == folder == tmp_path / "step-2"
    assert (other.seed, other.step_index) == (SEED, 2)
    folder.rename(replaced := tmp_path / "step-2.replaced")  # as a run leaves it that ends before the new one is named
    assert run.engine.load(tmp_path).folder == replaced
    assert sorted(path.name.split("-aside")[0][:6] for path in tmp_path.iterdir()) == ["step-1", "step-2", "step-3"]


def test_a_loader_that_was_read_ahead_is_not_saved(tmp_path: Path) -> None:
    run, loader = local(LINE), [batch(0, ROWS), batch(1, ROWS)]
    losses = run.engine.train(loader, run.optimizer)
    next(losses)
    with pytest.raises(fxpipe.RunError, match=r"extra\['loader'\] was read a batch ahead .* call engine.step"):
        run.engine.save(tmp_path, extra={"loader": loader})
    next(losses)
    run.engine.save(tmp_path, extra={"loader": loader})


def killed(directory: str) -> str:
    """Two processes save and load; save what is to be written a step later; one is killed in the save after that."""
    model, whole, trained = Adapted(), parts.save_file, threading.Event()

    def save_file(tensors: Any, path: Path, metadata: Any) -> None:
        if "step-6" in str(path) and os.environ["RANK"] == "1":
            path.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        assert threading.current_thread() is threading.main_thread() or trained.wait(60)
        whole(tensors, path, metadata)

    parts.save_file = save_file
    program = fxpipe.compile(model, 2, example_inputs=batch(0, ROWS), microbatches=2, **LINE)
    run = SavedRun(model, program.engine(seed=SEED, timeout=timedelta(minutes=1)))
    run.train(0, 2)
    run.save(Path(directory))
    run.train(2, 3)
    run.load(Path(directory))
    run.save(Path(directory), asynchronous=True)
    run.train(2, 3)
    trained.set()
    try:
        run.save(Path(directory))
    except fxpipe.RunError as error:
        return str(error)
    return ""


def test_a_rank_that_is_killed_while_it_saves_leaves_what_was_there(tmp_path: Path) -> None:
    first, second = start_processes(2, killed, str(tmp_path))
    assert (second.returncode, first.returncode) == (-signal.SIGKILL, 0), first.output
    assert "rank 1" in first.result
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]
    (tmp_path / "step-6.partial-01234567").mkdir()  # as it stays where all are killed
    run, one = local(WAVE), on_one_device()
    run.load(tmp_path)
    expected = one.train(0, STEPS)[4:], one.weights()
    found = run.train(2, STEPS), run.weights()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    run.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-8"]


def killed_once(directory: str) -> list[Any] | None:
    """Rank 1 is killed after its third step, which nobody has saved."""
    model = Adapted()
    program = fxpipe.compile(model, 2, example_inputs=batch(0, ROWS), microbatches=2, **LINE)
    run, losses = SavedRun(model, program.engine(seed=SEED)), list[float]()
    if fxpipe.checkpoints(directory):
        run.load(Path(directory))
    for step in range(run.engine.step_index // 2, STEPS):
        losses += run.train(step, step + 1)
        if step == 1:
            run.save(Path(directory))
        if step == 2 and run.engine.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    weights = run.weights()
    run.engine.close()
    return [losses, weights]


def test_under_torchrun_a_run_goes_on_from_its_last_checkpoint(saved: tuple[Path, Any], tmp_path: Path) -> None:
    _, (losses, weights) = saved
    ended, results = start_torchrun(2, killed_once, str(tmp_path), restarts=1)
    assert ended.returncode == 0, ended.output
    assert "exitcode: -9" in ended.output
    torch.testing.assert_close(results[0], [losses[4:], weights], rtol=0.0, atol=0.0)
    assert results[1][0] == losses[4:]
