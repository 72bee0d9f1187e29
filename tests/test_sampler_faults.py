"""Samplers over processes: what differs on one rank, or ends it, ends all, by name; nothing waits for ever."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CompileError, RunError
from fxpipe.run.launched_rank import LaunchedRank
from fxpipe.run.transport import InProcessTransport, RankThreads, distributed
from fxpipe.run.transport.mailboxes import Mailboxes
from tests.distributed import run_processes, start_processes

STEPS = 4


class Rows(nn.Module):
    """Rows of no library, a time and a text."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.norm, self.text = nn.GroupNorm(2, 4), nn.Linear(3, 4)

    def forward(self, sample: Tensor, time: Tensor, text: Tensor) -> Tensor:
        hidden = self.norm(self.first(sample)) + self.text(text)[:, :, None, None]
        return self.last(hidden.sin() * time.reshape(-1, 1, 1, 1).cos())


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Loop:
    """A sampling loop as a user writes it; every argument may be another one on rank 1."""

    def __init__(self, mode: str) -> None:
        torch.manual_seed(0)
        self.model, self.odd = Rows().double(), int(os.environ["RANK"] == "1")
        example = {"sample": noise(2, 2, 12, 5), "time": torch.ones(1).double(), "text": noise(2, 3)}
        how: dict[str, Any] = {"patches": 2, "mode": mode, "warmup": 1, "sample": {"sample": 2}}
        self.sampler = fxpipe.compile_sampler(self.model, 2, example=example, **how)

    def __call__(
        self, steps: int = STEPS, height: int = 12, seed: int = 0, text: int = 1, eta: float = 0.0, still: int = 0,
        between: Callable[[int, Tensor], Tensor] = lambda step, sample: sample,
    ) -> Tensor:  # fmt: skip
        draw, sample = torch.Generator().manual_seed(seed), noise(2, 2, height, 5, seed=seed if eta == 0.0 else 0)
        with self.sampler.call():
            for step in range(steps):
                time = torch.tensor([1.0 - (step - step * still) / 10], dtype=torch.float64)
                sample = sample - 0.1 * self.sampler.predict(sample=sample, time=time, text=noise(2, 3, seed=text))
                sample = sample + eta * torch.randn(sample.shape, generator=draw, dtype=torch.float64)
                sample = between(step, sample)
        return sample

    @contextmanager
    def again(self) -> Iterator[None]:
        """With ranks that are new, and weights that are as before."""
        before = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        self.sampler.denoiser.ranks = ranks = LaunchedRank(distributed.DistributedTransport())
        object.__setattr__(self.sampler, "ranks", ranks)
        try:
            yield
        finally:
            ranks.close()
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(before[name])


def raising(step: int, sample: Tensor) -> Tensor:
    if step == 2:
        raise ValueError("no such latents")
    return sample


def other_weights(loop: Loop, counted: bool = True) -> None:
    if loop.odd:
        bias: Any = loop.model.last.bias
        with torch.no_grad():
            (bias if counted else bias.data).mul_(1.1)


def within(fault: Callable[[Loop], None], loop: Loop) -> Tensor:
    """In a call, before its second prediction."""

    def between(step: int, sample: Tensor) -> Tensor:
        if step == 0:
            fault(loop)
        return sample

    return loop(between=between)


def replaced_weights(loop: Loop) -> None:
    if loop.odd:
        loop.model.last.bias = nn.Parameter(2 * loop.model.last.bias.detach())  # type: ignore[union-attr]


ALIKE = r"ranks \[1\] have another {}(?: \(.*\))? than rank 0(?: \(.*\))?; give every rank the same"
FAULTS: dict[str, tuple[Callable[[Loop], Any], str]] = {
    "text": (lambda loop: loop(text=1 + loop.odd), ALIKE.format("text")),
    "height": (lambda loop: loop(height=12 + 2 * loop.odd), ALIKE.format("shape of sample")),
    "seed": (lambda loop: loop(seed=loop.odd), ALIKE.format("sample")),
    "noise": (lambda loop: loop(seed=loop.odd, eta=1e-9), ALIKE.format("input 2 of a call") + " generators"),
    "more steps": (
        lambda loop: loop(STEPS + loop.odd),
        r"ranks \[1\] have another prediction 5 of a call than rank 0 \(ranks \[0\] make no .*; .* as many steps",
    ),
    "steps that end none": (lambda loop: loop(still=loop.odd), ALIKE.format("prediction 2 of a call")),
    "a callback": (
        lambda loop: loop(between=lambda step, x: x * (1 + loop.odd * (step == 2) * 1e-9)),
        ALIKE.format("input 4 of a call"),
    ),
    "a second call": (lambda loop: [loop(text=1 + n * loop.odd) for n in range(2)], ALIKE.format("text")),
    "weights": (lambda loop: (other_weights(loop), loop()), "last.bias differs between ranks 0 and 1; seed"),
    "changed weights": (
        lambda loop: (loop(), other_weights(loop), loop()), "last.bias differs between ranks 0 and 1; seed",
    ),
    "weights changed uncounted": (
        lambda loop: (loop(), other_weights(loop, counted=False), loop()), "last.bias differs between ranks 0 and 1;",
    ),
    "replaced weights": (
        lambda loop: (loop(), replaced_weights(loop), loop()), "last.bias differs between ranks 0 and 1; seed",
    ),
    "weights within a call": (partial(within, other_weights), ALIKE.format("prediction 2 of a call")),
    "replaced weights within a call": (partial(within, replaced_weights), ALIKE.format("prediction 2 of a call")),
    "an exception": (
        lambda loop: loop(between=raising if loop.odd else lambda step, x: x),
        "rank 1 failed in the loop around predictions: ValueError: no such latents|^no such latents",
    ),
}  # fmt: skip


def quick() -> None:
    """A rank of which nothing is heard for 2 seconds is lost."""
    own: Any = distributed.DistributedTransport
    distributed.DistributedTransport = partial(own, heartbeat_seconds=0.1, lost_after_seconds=2.0)  # type: ignore[misc]


def faults() -> dict[str, str]:
    """What one rank says to every fault, each of ranks that are new; then rank 1 is stopped, and wakes up too late."""
    quick()
    loop, said = Loop("displaced"), dict[str, str]()
    loop.sampler.close()
    with pytest.raises(RunError, match="has left the others by close"):
        loop()
    for name, (fault, _) in FAULTS.items():
        with loop.again():
            try:
                fault(loop)
            except (RunError, ValueError) as error:
                said[name] = str(error)
    with loop.again():
        assert torch.equal(loop(), loop())
        for between, step in ((raising, 2), (lambda at, x: raising(at + 1, x), 1)):  # of all: only the call ends
            with pytest.raises(ValueError, match="no such latents"):
                loop(between=between)
            assert torch.equal(loop(), loop()), step
        try:
            loop(between=partial(stopped, signal.SIGSTOP) if loop.odd else lambda step, sample: sample)
        except RunError as error:
            said["stopped"] = str(error)
    return said


def released() -> dict[str, Any]:
    """What a rank of two stages says once it has let go of the other's weights."""
    loop, said = Loop("exact"), dict[str, Any]()
    given = {"sample": noise(2, 2, 12, 5), "time": torch.ones(1).double(), "text": noise(2, 3)}
    wanted = loop.model(**given)
    staged = fxpipe.compile_sampler(loop.model, 2, stages=2, example=given, sample={"sample": 2})
    found = staged.predict(**given)
    said["exact"] = bool((found - wanted).abs().max() < 1e-12)
    said["bytes"] = staged.release()
    said["left"] = sum(p.nbytes for p in loop.model.parameters() if p.untyped_storage().nbytes() == p.nbytes)
    said["again"] = torch.equal(staged.predict(**given), found) and not staged.release()
    for name, refused in {
        "run": lambda: loop.model(**given), "saved": loop.model.state_dict, "by rows": lambda: loop(),
        "calibrated": lambda: staged.calibrate(lambda predict: predict(**given)),
    }.items():  # fmt: skip
        with pytest.raises(RunError) as caught:
            refused()
        said[name] = str(caught.value)
    return said


def test_ranks_that_cannot_compile_are_in_the_loop_again() -> None:
    transport: Any = InProcessTransport(Mailboxes(1, 1.0), 0)
    ranks = LaunchedRank(transport)
    with pytest.raises(CompileError, match="no"), ranks.compiling({}):
        raise CompileError("no")
    assert transport._action == "the loop around predictions"


def test_patches_of_one_rank_that_exchange_something_else_have_no_programs_on_any() -> None:
    """Of the same model, as each has compared before: the next plan is tried."""

    def agreed(transport: Any) -> Any:
        return LaunchedRank(transport).agreed(SimpleNamespace(digest=str(transport.rank % 2)))

    for found in RankThreads(3).run(agreed):
        assert isinstance(found, CompileError)
        assert "patches of ranks [1] exchange something else than rank 0's" in str(found)


def test_a_rank_holds_the_weights_of_its_stage_alone() -> None:
    whole = sum(parameter.nbytes for parameter in Rows().double().parameters())
    said = run_processes(2, released)
    assert sum(one["left"] for one in said) == whole
    for one in said:
        assert one["exact"]
        assert one["again"]
        assert one["bytes"] == whole - one["left"] > 0
        assert "were released on this rank, which samples without them; load the model again" in one["run"]
        assert one["saved"] == one["calibrated"] == one["run"]
        assert re.search("reads . weights .* that rank . has released; make every kind of call", one["by rows"])


def stopped(how: signal.Signals, step: int, sample: Tensor) -> Tensor:
    if step == 2:
        time.sleep(0.5)  # for a heartbeat that tells the action
        subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), how)
    return sample


def test_what_one_rank_has_of_its_own_ends_all() -> None:
    lost = "rank 1 was lost, last seen in the loop around predictions: no sign of life for 2 s|rank 0 was lost"
    expected = {name: text for name, (_, text) in FAULTS.items()} | {"stopped": lost}
    for said in run_processes(2, faults, timeout_seconds=100):
        assert said.keys() == expected.keys()
        for name, text in expected.items():
            assert re.search(text, said[name]), (name, said[name])


def ending(how: str) -> None:
    quick()
    loop = Loop("exact")
    loop()
    if loop.odd and how == "leaves":
        return
    loop(between=partial(stopped, signal.SIGKILL) if loop.odd else lambda step, sample: sample)


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        ("killed", -signal.SIGKILL, "rank 1 was lost, last seen in the loop around predictions: no sign of life"),
        ("leaves", 0, "needs rank 1, which has left"),
    ],
)
def test_a_rank_that_ends_ends_all(how: str, code: int, says: str) -> None:
    one, other = start_processes(2, ending, how, timeout_seconds=60)
    assert (one.returncode, other.returncode) == (1, code), one.output
    assert says in one.output
