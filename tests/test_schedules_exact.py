"""Every schedule on a tiny U-Net gives one device's loss and gradients, whatever the ranks, micro-batches and text."""

from collections.abc import Sequence

import pytest
import torch

import fxpipe
from fxpipe.errors import CompileError
from fxpipe.plan.plan import Plan
from fxpipe.program import Program
from tests.unet import TinyUNet

NAMES = ("gpipe", "1f1b", "interleaved", "wave", "zero-bubble")
RANKS = (1, 2, 3, 4, 8)
BATCHES = {1: 5, 3: 7, 8: 11}  # micro-batches, and a batch they do not divide (but for one)
FREEZE = {"nothing": (), "start": ("encoder", "time", "down_0"), "middle": ("down_1", "mid"), "end": ("up_1", "up_0")}


def unet(frozen: Sequence[str] = ()) -> TinyUNet:
    model = TinyUNet()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    return model


def compiled(model: TinyUNet, world_size: int, num_microbatches: int | None, schedule: str, **options: int) -> Program:
    size = BATCHES[num_microbatches or 3]
    return fxpipe.compile(
        model, world_size, batch_size=size, microbatches=num_microbatches, schedule=schedule, **options
    )  # fmt: skip


def assert_exact(program: Program, model: TinyUNet) -> None:
    """Against plain autograd on the whole batch, at 1e-10; and the transport moves the planned bytes."""
    batch = model.example_inputs(sum(program.plan.microbatch_sizes))
    loss = model(**batch)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    expected = dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))
    engine = program.local_engine()
    found_loss, gradients = engine.run(program.step.tensors((), batch)[0], 0)
    torch.testing.assert_close(found_loss, loss.detach(), rtol=1e-12, atol=0.0)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        error = float((gradient - expected[name]).abs().max() / expected[name].abs().max())
        assert error < 1e-10, name
    assert engine.sent_bytes == program.traffic().channels


# A third of all combinations: every name with every number of ranks, each pair with other micro-batches.
@pytest.mark.parametrize(
    ("name", "world_size", "num_microbatches"),
    [(name, ranks, list(BATCHES)[(i + j) % 3]) for i, name in enumerate(NAMES) for j, ranks in enumerate(RANKS)],
)
def test_every_name_is_exact(name: str, world_size: int, num_microbatches: int) -> None:
    model = unet()
    assert_exact(compiled(model, world_size, num_microbatches, name), model)


@pytest.mark.parametrize(("name", "stages"), [("gpipe", 6), ("1f1b", 4), ("interleaved", 8), ("zero-bubble", 4)])
def test_several_stages_per_rank_are_exact(name: str, stages: int) -> None:
    model = unet()
    program = compiled(model, 2, 3, name, stages=stages)
    assert program.schedule.num_stages == stages
    assert_exact(program, model)


def test_more_stages_than_blocks_leave_stages_empty() -> None:
    model = unet()
    program = compiled(model, 8, 3, "gpipe", stages=72)
    assert () in program.schedule.stage_ranks
    assert_exact(program, model)


TEXTS = {
    "without a header": """
        rank 0: 0F0 0F1 0F2 0B0 0B1 0B2
        rank 1: 1F0 1B0 1F1 1B1 1F2 1B2""",
    "weight gradients last": """
        rank 0: 0F0 0F1 0F2 0B2 0B1 0B0
        rank 1: 1F0 1I0 1F1 1I1 1F2 1I2 1W2 1W0 1W1""",
    "split for some micro-batches only": """
        schedule mine: 3 stages, 3 micro-batches
        rank 0: 0F1 0F0 0F2 0B1 0B0 0B2
        rank 1: 1F0 1F1 1F2 1I1 1B0 1W1 1B2
        rank 2: 2F1 2I1 2F0 2F2 2B0 2B2 2W1""",
    "a rank without work": """
        rank 0: 0F0 0F1 0F2 1F0 1B0 1F1 1B1 1F2 1B2 0B0 0B1 0B2
        rank 1:""",
    "stages back and forth": """
        rank 0: 1F0 1F1 1F2 2F0 2B0 2F1 2B1 2F2 2B2 1I0 1I1 1W1 1W0 1B2
        rank 1: 0F2 0F1 0F0 3F0 3B0 3F1 3I1 3F2 3I2 3W2 3W1 0B0 0B1 0B2""",
    "a wave": """
        rank 0: 0F0 0F1 0F2 3F0 3B0 3F1 3B1 3F2 3B2 0B0 0B1 0B2
        rank 1: 1F0 2F0 1F1 2F1 1F2 2F2 2I0 1I0 1W0 2B1 1B1 2B2 1B2""",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_any_correct_text_is_exact(text: str) -> None:
    model = unet()
    program = compiled(model, text.count("rank"), None, text)
    written = [line.split(":")[1].split() for line in text.splitlines() if "rank" in line]
    assert [list(map(str, actions)) for actions in program.schedule.ranks] == written
    assert_exact(program, model)


def test_the_text_of_a_program_is_a_schedule() -> None:
    """Of its own placement, which only the plan's text has as it was."""
    model = unet()
    program = compiled(model, 2, 3, "wave")
    again = compiled(model, 2, None, program.schedule.text())
    assert again.schedule == program.schedule
    assert_exact(again, model)
    same = fxpipe.compile(model, 2, batch_size=program.plan.batch_size, plan=Plan.parse(str(program.plan)))
    assert same.step.fingerprint == program.step.fingerprint


def test_text_that_waits_for_itself_is_refused() -> None:
    text = """
        rank 0: 0F0 0B0 0F1 0B1
        rank 1: 1F1 1B1 1F0 1B0"""
    with pytest.raises(CompileError, match="<-- HERE"):
        fxpipe.compile(unet(), 2, batch_size=2, schedule=text)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_no_skip_crosses_a_channel_in_a_wave(world_size: int) -> None:
    wave = compiled(unet(), world_size, 8, "wave")
    assert wave.plan.staged.collocated
    assert wave.traffic().kinds["skip"] == 0
    assert compiled(unet(), world_size, 8, "1f1b").traffic().kinds["skip"] > 0


@pytest.mark.parametrize("frozen", list(FREEZE)[1:])
@pytest.mark.parametrize(("name", "world_size"), [("zero-bubble", 4), ("wave", 2), ("1f1b", 8)])
def test_frozen_stages_are_exact(frozen: str, name: str, world_size: int) -> None:
    model = unet(FREEZE[frozen])
    assert_exact(compiled(model, world_size, 3, name), model)


def test_frozen_stage_passes_gradients_without_weight_work() -> None:
    """In the split, a stage without trained weights has I and no W."""
    model = unet(("down_1", "mid", "up_1", "up_0"))
    text = """
        rank 0: 0F0 0F1 0F2 0B0 0B1 0B2
        rank 1: 1F0 1I0 1F1 1B1 1F2 1I2"""
    program = compiled(model, 2, None, text)
    assert not [name for name in program.step.programs[1].gradients if not name.startswith("time")]
    assert_exact(program, model)
    with pytest.raises(CompileError, match="stage 1 owns no trainable parameter; remove the action"):
        compiled(model, 2, None, text + " 1W2")


def test_schedules_hold_as_many_microbatches_as_they_should() -> None:
    """GPipe all of them; 1F1B on rank r of R at most R - r; on both every rank's last forward is in flight."""
    for name, bounds in (("gpipe", (8, 8, 8)), ("1f1b", (3, 2, 1))):
        program = compiled(unet(), 3, 8, name)
        assert tuple(peak(program, rank) for rank in range(3)) == bounds


def peak(program: Program, rank: int) -> int:
    """The most micro-batches whose saved values a rank holds at a time."""
    held = most = 0
    for action in program.schedule.ranks[rank]:
        held += {"F": 1, "B": -1}.get(action.kind, 0)
        most = max(most, held)
    return most
