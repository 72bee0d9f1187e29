"""Displaced sampling: exact where nothing moves, and the same bits from threads, processes and one patch at a time."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from fxpipe.errors import CompileError, RunError
from fxpipe.models.backbones import prediction_of
from fxpipe.plan.sample_plan import Norms
from fxpipe.plan.transport import Transport
from fxpipe.plan.unroll import require_sequence
from fxpipe.run.sampling import BoundProgram, LocalRun, SampleRun
from fxpipe.run.transport import run_ranks
from passes.sampling import buckets
from tests.denoisers import Case, small
from tests.distributed import run_processes
from tests.lockstep import Lockstep
from tests.row_programs import RowPrograms, row_programs

UNET = "UNet2DConditionModel/timestep"  # of one level
KEYS = {
    UNET: 1e-10,
    "UNet2DConditionModel": 1e-10,
    "DiTTransformer2DModel": 1e-10,
    "SD3Transformer2DModel": 1e-10,
    "FluxTransformer2DModel": 1e-10,
    "SanaTransformer2DModel": 1e-5,  # rounds to float32 inside
}
FORMS = ("fresh", "fresh", "displaced", "displaced", "displaced", "last")


@cache
def denoiser(key: str) -> Case:
    return small(key)


@cache
def compiled(key: str) -> RowPrograms:
    given = denoiser(key)
    return row_programs(given.model, given.example, 2, mode="displaced")


def cut(key: str, num_patches: int, norms: Norms = "corrected", advance: bool = True) -> RowPrograms:
    """Uneven patches, the first the smallest."""
    programs = compiled(key)
    count = programs.rows.units.count
    bounds = (0, count // 2 - 1, count) if num_patches == 2 else (0, 1, count // 2, count)
    return programs.cut(bounds, norms=norms, advance=advance)


def moving(key: str, num_steps: int = len(FORMS), start: int = 0) -> list[dict[str, Tensor]]:
    """A call's inputs, the sample a little different in every step."""
    example = denoiser(key).example
    name = "hidden_states" if "hidden_states" in example else "sample"
    noise = torch.Generator().manual_seed(7 + start)
    change = torch.randn(example[name].shape, generator=noise, dtype=example[name].dtype)
    return [{**example, name: example[name] + (start + 0.05 * step) * change} for step in range(num_steps)]


def one_device(key: str, inputs: Mapping[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return prediction_of(denoiser(key).model(**inputs))


def error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max() / wanted.abs().max())


def sampled(
    run: LocalRun, bound: Sequence[BoundProgram], programs: RowPrograms, steps: Sequence[Mapping[str, Tensor]],
    forms: Sequence[str] = FORMS,
) -> list[Tensor]:  # fmt: skip
    """Rank 0's predictions, which are everyone's."""
    predictions = []
    for inputs, form in zip(steps, forms, strict=True):
        found = run.predict(bound, programs.bind(**inputs), form)
        assert all(torch.equal(other, found[0]) for other in found[1:])
        predictions.append(found[0])
    return predictions


def equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("key", "norms"), [*((key, "corrected") for key in KEYS), (UNET, "merged"), (UNET, "sync")])
def test_where_nothing_moves_displaced_steps_are_exact(key: str, norms: Norms) -> None:
    programs = cut(key, 3, norms)
    run, inputs = LocalRun(3), moving(key, 1)[0]
    wanted = one_device(key, inputs)
    for found in sampled(run, programs.bound(), programs, [inputs] * 4, ("fresh", "displaced", "displaced", "last")):
        assert error(found, wanted) <= KEYS[key]


@pytest.mark.parametrize(
    ("key", "norms", "num_patches", "advance"),
    [
        *((key, "corrected", 3, True) for key in KEYS),
        *((UNET, norms, 2, False) for norms in get_args(Norms)),
        ("DiTTransformer2DModel", "corrected", 2, False),
    ],
)
def test_threads_read_what_one_patch_at_a_time_reads(key: str, norms: Norms, num_patches: int, advance: bool) -> None:
    programs, steps = cut(key, num_patches, norms, advance), moving(key)
    run, bound, reference = LocalRun(num_patches), programs.bound(), Lockstep(programs)
    found = sampled(run, bound, programs, steps)
    wanted = [reference.step(programs.bind(**s), form != "fresh")[0] for s, form in zip(steps, FORMS, strict=True)]
    assert equal(found, wanted)
    exact = [one_device(key, inputs) for inputs in steps]
    assert max(error(f, e) for f, e in zip(found[:2], exact, strict=False)) <= KEYS[key]
    most = 1 if norms == "separate" else 0.2
    assert all(KEYS[key] < error(f, e) < most for f, e in zip(found[2:], exact[2:], strict=True))


@pytest.mark.parametrize("key", ["DiTTransformer2DModel", "FluxTransformer2DModel"])
def test_what_moves_evenly_is_moved_on(key: str) -> None:
    """Half as far from one device at least; the first displaced step after one fresh step knows of no change."""
    steps, errors = moving(key, 5), list[list[float]]()
    for advance in (False, True):
        programs = cut(key, 2, advance=advance)
        found = sampled(LocalRun(2), programs.bound(), programs, steps, ("fresh", *FORMS[2:]))
        errors.append([error(one, one_device(key, inputs)) for one, inputs in zip(found, steps, strict=True)])
    assert errors[0][1] == errors[1][1]
    assert all(advanced < plain / 2 for plain, advanced in zip(*(of[2:] for of in errors), strict=True))


def test_a_second_call_is_the_first() -> None:
    """Whatever came before it, whether that ended with `last` or not."""
    programs, steps = cut(UNET, 2), moving(UNET)
    run, bound = LocalRun(2), programs.bound()
    first = sampled(run, bound, programs, steps)
    assert equal(sampled(run, bound, programs, steps), first)
    sampled(run, bound, programs, moving(UNET, 3, start=1), FORMS[:3])
    run.reset()
    assert equal(sampled(run, bound, programs, steps, ("displaced", *FORMS[1:])), first)


def test_an_exception_leaves_nothing_behind() -> None:
    programs, steps = cut(UNET, 2), moving(UNET)
    run, bound = LocalRun(2), programs.bound()
    first = sampled(run, bound, programs, steps)
    sampled(run, bound, programs, steps[:3], FORMS[:3])
    broken = programs.bind(**steps[3])
    broken["sample"] = broken["sample"][:, :3]
    with pytest.raises(RunError, match="failed in predict"):
        run.predict(bound, broken, "displaced")
    assert equal(sampled(run, bound, programs, steps, ("displaced", *FORMS[1:])), first)


def test_an_input_that_is_missing_leaves_the_state() -> None:
    programs, steps = cut(UNET, 2), moving(UNET)

    def rank_main(transport: Transport) -> list[Tensor]:
        run, mine, found = SampleRun(transport), programs.bound()[transport.rank], list[Tensor]()
        for inputs, form in zip(steps, FORMS, strict=True):
            with pytest.raises(KeyError):
                run.predict(mine, {}, form)
            found.append(run.predict(mine, programs.bind(**inputs), form))
        return found

    assert equal(run_ranks(2, rank_main)[0], sampled(LocalRun(2), programs.bound(), programs, steps))


def test_another_size_begins_with_a_fresh_step() -> None:
    """And the first size again: what it had carried is of another step."""
    programs, steps = cut(UNET, 2), moving(UNET)
    more = {name: torch.cat([value, value]) for name, value in denoiser(UNET).example.items()}
    other = row_programs(denoiser(UNET).model, more, programs.bounds, mode="displaced")
    run, bound, others = LocalRun(2), programs.bound(), other.bound()
    sampled(run, bound, programs, steps[:3], FORMS[:3])
    found = run.predict(others, other.bind(**more), "displaced")[0]
    assert error(found, one_device(UNET, more)) <= KEYS[UNET]
    again = run.predict(bound, programs.bind(**steps[3]), "displaced")[0]
    assert error(again, one_device(UNET, steps[3])) <= KEYS[UNET]
    run.reset()


def test_streams_keep_to_themselves() -> None:
    programs, steps, others = cut(UNET, 2), moving(UNET), moving(UNET, start=1)
    run, bound, found = LocalRun(2), programs.bound(), dict[str, list[Tensor]](cond=[], uncond=[])
    for one, other, form in zip(steps, others, FORMS, strict=True):
        for stream, inputs in (("cond", one), ("uncond", other)):
            found[stream].append(run.predict(bound, programs.bind(**inputs), form, stream)[0])
    assert equal(found["cond"], sampled(run, bound, programs, steps))
    assert equal(found["uncond"], sampled(run, bound, programs, others))


def rank_main(key: str, num_patches: str) -> list[Tensor]:
    """One rank's predictions over two calls, the first left before its end."""
    from fxpipe.run.transport.distributed import DistributedTransport

    programs, steps, transport = cut(key, int(num_patches)), moving(key), DistributedTransport()
    transport.open_channels(programs.channels, [])
    run, mine, found = SampleRun(transport), programs.bound()[transport.rank], list[Tensor]()
    for inputs, form in zip(moving(key, 4, start=1), FORMS, strict=False):
        run.predict(mine, programs.bind(**inputs), form)
    run.reset()
    before = sum(transport.sent_bytes().values())
    for inputs, form in zip(steps, FORMS, strict=True):
        found.append(run.predict(mine, programs.bind(**inputs), form))
    sent = [message for form in FORMS for message in programs.messages_of[form] if message.src == transport.rank]
    assert sum(transport.sent_bytes().values()) - before == sum(message.num_bytes for message in sent)
    transport.close()
    return found


def test_processes_read_what_threads_read() -> None:
    programs = cut(UNET, 3)
    wanted = sampled(LocalRun(3), programs.bound(), programs, moving(UNET))
    for found in run_processes(3, rank_main, UNET, "3"):
        assert equal(found, wanted)


def test_buckets_are_few_and_how_many_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    programs, steps = cut(UNET, 3), moving(UNET)
    fresh, displaced = (
        [m for m in programs.messages_of[form] if m.channel == (0, 1)] for form in ("fresh", "displaced")
    )
    assert [message.kind for message in displaced] == ["prediction", "bucket", "bucket"]  # it waits for neither
    assert {m.edge for b in displaced for m in b.members or (b,)} == {m.edge for m in fresh}
    assert {message.crosses for message in displaced[1:]} == {1}
    assert [m.kind for m in programs.messages_of["last"]] == ["prediction"] * 6
    kinds = programs.traffic("displaced").kinds
    assert kinds == programs.traffic("fresh").kinds
    wanted = sampled(LocalRun(3), programs.bound(), programs, steps)
    monkeypatch.setattr(buckets, "LEAST_BYTES", 64)
    many = programs.cut(programs.bounds)
    assert len(many.messages_of["displaced"]) > 4 * len(programs.messages_of["displaced"])
    kinds = [m.kind for m in many.messages_of["displaced"] if m.channel == (0, 1)]
    assert kinds.index("prediction") == len(kinds) - 3  # full ones leave before
    assert equal(sampled(LocalRun(3), many.bound(), many, steps), wanted)


def test_sequences_are_checked() -> None:
    programs = cut(UNET, 2)
    require_sequence(programs.programs, programs.messages_of, ("fresh", "fresh", "displaced", "last", "fresh", "last"))
    with pytest.raises(CompileError, match="never waits for a message"):
        require_sequence(programs.programs, programs.messages_of, ("fresh", "displaced", "fresh"))
    with pytest.raises(CompileError, match=r"step 2, displaced: rank 0 takes .* has not carried"):
        require_sequence(programs.programs, programs.messages_of, ("fresh", "last", "displaced"))
    swapped = {**programs.messages_of, "displaced": programs.messages_of["displaced"][::-1]}
    with pytest.raises(CompileError, match="planned edges"):
        require_sequence(programs.programs, swapped)


class Small(nn.Module):
    """One of each: a convolution with a halo, a norm, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(self.conv(x)).flatten(2).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(tokens, tokens, tokens.exp())


def test_forms_are_straight_lines(golden: Callable[[str, str], None]) -> None:
    programs = row_programs(
        Small(), {"x": torch.zeros(1, 2, 8, 3)}, [0, 3, 8], sample={"x": 2}, mode="displaced", advance=False
    )
    texts = []
    for form, one in programs.programs[0].forms.items():
        lines = one.graph.python_code("self").src.splitlines()
        code = "\n".join(line.split("  #")[0].split(";  ")[0].rstrip() for line in lines if line.strip())
        texts.append(f"--- {form}\n{code}\n\n{programs.traffic(form)}\n")
    golden("passes/displaced.txt", "\n".join(texts))


class Flipped(nn.Module):
    """Its prediction is put together by an operation without a rule, so that every patch makes the whole of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).flip(2)  # type: ignore[no-any-return]


def test_what_every_patch_predicts_whole_is_of_this_step() -> None:
    torch.manual_seed(0)
    model, x = Flipped().double().eval(), torch.randn(1, 3, 12, 5, dtype=torch.float64)
    programs = row_programs(model, {"x": x}, 3, sample={"x": 2}, mode="displaced", advance=False)
    run, bound = LocalRun(3), programs.bound()
    predictions = sampled(run, bound, programs, [{"x": x + 0.1 * step} for step in range(len(FORMS))])
    assert error(predictions[3], model(x + 0.3).detach()) > 1e-4
    assert [message.kind for message in programs.messages_of["last"]] == ["gather"] * 6


@pytest.mark.parametrize("advance", [False, True])
def test_halos_that_reach_over_a_patch_are_in_their_order(advance: bool) -> None:
    """The rows of patches that are further away arrive first: their bucket has fewer members, and leaves earlier."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, padding=4, dilation=4), nn.Upsample(scale_factor=2),
        nn.Conv2d(4, 3, 3, padding=1),
    ).double()  # fmt: skip
    x = torch.randn(1, 3, 12, 5, dtype=torch.float64)
    programs = row_programs(model, {"input": x}, 6, sample={"input": 2}, mode="displaced", advance=advance)
    run, forms = LocalRun(6), ("fresh", "displaced", "displaced", "last")
    for found in sampled(run, programs.bound(), programs, [{"input": x}] * 4, forms):
        assert error(found, model(x).detach()) <= 1e-10


def test_one_patch_is_one_device() -> None:
    programs, steps = compiled(UNET).cut(1), moving(UNET)
    for inputs, found in zip(steps, sampled(LocalRun(1), programs.bound(), programs, steps), strict=True):
        assert error(found, one_device(UNET, inputs)) <= KEYS[UNET]


def test_what_a_form_does_not_take_is_let_go_of_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a second exact step, which reads little of what the first one carries."""
    programs, run, own = cut(UNET, 2), BoundProgram.run, list[bool]()

    def seen(self: BoundProgram, form: str, *arguments: object) -> object:
        carried = next((one for one in arguments if isinstance(one, dict)), {})
        own.append({*carried} == {*self.program.forms[form].carried})
        return run(self, form, *arguments)

    monkeypatch.setattr(BoundProgram, "run", seen)
    sampled(LocalRun(2), programs.bound(), programs, moving(UNET))
    assert len(own) == 2 * len(FORMS)
    assert all(own)
