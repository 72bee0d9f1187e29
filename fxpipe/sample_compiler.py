"""The sampling compiler, top to bottom: a denoiser becomes one program per rank, each with a part of every step.

denoiser    which module predicts, and a call of it             -> names, args, kwargs
ranks       threads of this process, or this one of a launch    -> Ranks
programs    traced, analysed, lowered: for the example now, for other calls when they come
            (fxpipe/sampling: trace, case, planning, lowering)  -> SamplePlan, SampleStep per kind of call
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxpipe.analysis import Observe, priced, priced_name, shared_cost_model
from fxpipe.capture.cache import cache_folder
from fxpipe.capture.inputs import describe
from fxpipe.capture.private import uncompiled
from fxpipe.capture.weights import device_of
from fxpipe.cluster import Cluster
from fxpipe.collector import held_collector
from fxpipe.costs.model import CostModel
from fxpipe.errors import CompileError
from fxpipe.models.backbones import example_inputs, image_rows, named_rows, row_inputs
from fxpipe.models.pipelines import denoiser_names, is_pipeline, recorded_call
from fxpipe.options import (
    check_backend,
    check_counts,
    check_flags,
    check_patches,
    given_bytes,
    given_cluster,
    given_sample_plan,
)
from fxpipe.plan.sample_plan import EXACT, How, Norms, SamplePlan
from fxpipe.run.launch import join
from fxpipe.run.launched_rank import LaunchedRank
from fxpipe.run.ranks import LocalRanks, Ranks
from fxpipe.sampler import Sampler
from fxpipe.sampling.attention import Attention
from fxpipe.sampling.candidates import Objective, Setting
from fxpipe.sampling.lowering import Mode, SampleLowering
from fxpipe.sampling.planning import SampleRequest, request_of, require_fresh
from fxpipe.sampling.spread import Spread
from fxpipe.sampling.trace import RowsOf, SizesChoice, Tracing, repeated
from passes.sampling.text import Text

_log = logging.getLogger(__name__)

_STEPS = 50
"""Of a call whose steps are not known."""
_CHOICES = {
    "mode": Mode, "norms": Norms, "text": Text, "attention": Attention, "sizes": SizesChoice, "objective": Objective,
}  # fmt: skip


def compile_sampler(
    model: Any,
    world_size: int,
    *,
    example: Mapping[str, Any] | None = None,
    cfg: int | None = None,
    stages: int | None = None,
    fold: bool | None = None,
    patches: int | Sequence[int] | None = None,
    mode: Mode = "exact",
    warmup: int = 4,
    norms: Norms = "corrected",
    advance: bool = True,
    text: Text = "first",
    attention: Attention = "auto",
    sample: Mapping[str, int] | None = None,
    vae: bool = True,
    sizes: SizesChoice = "auto",
    cache: bool | str | Path = True,
    cluster: Cluster | str | None = None,
    cost_model: CostModel | str | None = None,
    steps: int | None = None,
    objective: Objective = "latency",
    memory_limit: int | str | None = None,
    plan: SamplePlan | str | Path | None = None,
    backend: str = "eager",
    observe: Observe = lambda name, artefact: None,
) -> Sampler:
    """Compile a pipeline, a denoiser, or any module whose inputs have rows, for sampling on `world_size` ranks.

    The rows of the image are cut into patches, a rank each; samples of a call (the halves of classifier-free guidance)
    go to groups of ranks. In exact mode every exchange is of the step itself: any layout gives one device's result.
    Ranks run on the denoiser's own device, its modules as in eval, whatever their mode.

    Under torchrun with as many processes rank 0 makes plans for all, and each lowers its own rank only.

    What is left open of `cfg`, `stages`, `fold` and `patches` is chosen: the layout whose call is predicted to be the
    fastest on `cluster`, of those that fit into memory. The plan says what it expects, and what came second.

    Args:
        model: a diffusers pipeline, or a module that predicts.
        example: a call: of the pipeline, (it ends where it calls its denoiser), or keyword arguments of the module.
            Left out, a diffusers backbone's is made from its config.
        cfg: groups of samples.
        patches: of the rows in every group, or in every stage of it; in displaced stages they follow each other, on
            every rank of a stage as many. Instead of a count their bounds in units, from 0 to the number of units, for
            calls with so many: units are what the denoiser's strides leave of the rows, and the plan says how many
            there are.
        stages: columns of ranks in every group, each with a part of the denoiser and its weights alone; samples follow
            each other through them, in displaced mode patches (Wang et al., "PipeFusion", 2024). Ranks of one column
            share each of these patches' turns, and swap what they read of each other within it.
        fold: whether every column has two parts, from both ends, so that skip connections stay on their rank; as fewer
            bytes are sent where left out.
        mode: "exact"; or "displaced", which is approximate: after `warmup` exact steps of a call a patch reads of the
            others what they had one step before, so that nobody waits (Li et al., "DistriFusion", CVPR 2024); of those
            that went through a stage before it, what they have now. Where neither stages nor patches are given it is a
            leave: a layout that is exact is taken where it is about as fast, or where steps are few.
        norms: the others' moments of displaced group norms: "corrected" as one's own have moved (the paper's),
            "merged" as they were, "sync" of this step, "separate" none.
        advance: whether the others' displaced values are moved on by their own last change, at twice the memory; not
            with stages.
        text: in models that have text and image in one sequence, whose the text is, of patches without stages: "first",
            the first patch's, which then has fewer rows; "all", every patch's, which all compute it.
        attention: how patches of an exact step attend to each other's rows: "gather" brings all keys and values to
            every patch, "ulysses" gives every patch some heads of all rows (Jacobs et al., 2023), "ring" passes keys
            and values around (Liu et al., 2023); "auto" takes what is predicted to be the fastest, layer by layer. One
            that cannot be so gathers, and a note of the plan says why.
        sample: for modules that are no diffusers backbones, {input: its row dimension}, from the end where that is
            negative; left out, the first input that
            is an image [B, C, H, W] or a video [B, C, F, H, W].
        sizes: when sizes of images, and lengths of texts, are traced as free ones, in a longer trace that serves all at
            which forward is the same: "auto", at the second; "any", at the first. Others have traces of their own, and
            a note says why there is none for all.
        cache: where captures are kept for other processes, as for `compile`: a folder, True for the user's cache folder
            (or that of FXPIPE_CACHE), False for none.
        vae: whether the decoder of the pipeline's VAE is spread, too; one that cannot be runs whole on every rank.
        cluster: devices and links that predictions are for; one node of A100-80GB where left out. Where its devices
            have different speeds ("4xA100*1,1,1,0.5"), patches have as many rows, and stages as many blocks, as these
            take equally long for; the last ones are left out, and only shown the prediction, where the others are
            faster without them.
        cost_model: seconds of compute; the cluster's device where left out.
        steps: of a call, for which layouts are compared: the example's `num_inference_steps`, or 50, where left out.
        objective: what is chosen for: "latency", of one call like the example; or "throughput", of many: the samples of
            several such calls are joined in one, as many as take the fewest seconds for each, and the sampler is
            compiled for that call (`sampler.requests` says for how many). Ranks run one call at a time: replicas are
            groups of samples that hold whole requests, and tell each other the prediction alone.
        memory_limit: bytes that a rank may hold, as 40 * 2**30 or "40GiB"; the device's where left out.
        plan: one that was made before, a `SamplePlan` or the file it was saved in: for calls like the example, or the
            call that joins as many of these as the plan says, nothing is decided; calls of other sizes are planned in
            its mode, with as many stages. What is asked for beside it must be what it says, mode, warmup, norms and
            advance are the plan's.
        backend: how what is computed between messages runs: "eager", operation by operation; by "inductor", compiled
            in the second step of a kind; or, on GPUs, as "cudagraphs", recorded in the third and then replayed, which
            takes the host next to no time (ranks that are threads of one process run eagerly). Recorded graphs hold
            memory of their own. Plans and predictions are of eager ones.

    Raises:
        CaptureError: the denoiser cannot be captured as one graph.
        CompileError: it can, but not be cut so; names the module and what to change.
        RunError: started by torchrun, and the other ranks cannot be found.
    """
    known = given_sample_plan(plan, world_size, cfg=cfg, stages=stages, fold=fold, patches=patches)
    check_counts(world_size=world_size, cfg=cfg, stages=stages, warmup=warmup, steps=steps)
    check_flags(fold=fold, advance=advance, vae=vae)
    limit = given_bytes(memory_limit)
    check_patches(patches)
    _check_choices(mode=mode, norms=norms, text=text, attention=attention, sizes=sizes, objective=objective)
    captures = cache_folder(cache)
    if mode == "displaced" and norms == "sync" and stages not in (None, 1):
        raise CompileError("norms='sync' waits for patches that come later; use 'corrected' or 'merged' with stages")
    for argument, given in {"sample": sample, "example": example}.items():
        if given is not None and not isinstance(given, Mapping):
            raise CompileError(f"{argument} is a {type(given).__name__}; give a dict by the names of arguments")
    if not callable(observe):
        raise CompileError(f"observe={observe!r}; give a function of (step's name, its result)")
    if sample is not None and not all(type(dim) is int for dim in sample.values()):
        raise CompileError(f"sample={dict(sample)}: dimensions are integers, {{'sample': 2}}")

    # denoiser: which module predicts, and what it is called with
    rows_of = row_inputs if sample is None else lambda module, call: named_rows(sample, call)
    names, rank = denoiser_names(model) if is_pipeline(model) else [], join(world_size)
    name, module, args, kwargs = _denoiser_call(model, names, example, rows_of, tells=not rank)

    # ranks: threads of this process, or processes that torchrun has started
    where = device_of(module)
    check_backend(backend, where)
    ranks = LocalRanks(backend) if rank is None else _launched(where, backend)

    # programs: for the example, and for other calls when they come
    network = given_cluster(known.cluster if known and cluster is None else cluster, world_size)
    price = priced(cost_model, known.cost_model if known else "", network)
    by = shared_cost_model(price, world_size)
    how = How(mode, warmup, norms, advance is not False and stages in (None, 1)) if mode == "displaced" else EXACT
    cut = tuple(patches) if isinstance(patches, Sequence) else patches
    asked = request_of(known) if known else SampleRequest(world_size, cfg, stages, fold, cut, how, text, attention)
    asked = replace(asked, speeds=network.speeds[: asked.world_size])
    texts = str(network), priced_name(price, by)
    told = dict(example or {}).get("num_inference_steps") if name is not None else None
    setting = Setting(network, steps or (told if type(told) is int else _STEPS), limit, objective)
    tracing = Tracing(rows_of, sizes, captures, observe, tells=not ranks.rank)
    lowering = SampleLowering(asked, tracing, where, by, observe, *texts, known, setting)
    denoiser = Spread(module, lowering, ranks)
    if known is not None and known.expects is not None and known.expects.requests > 1:
        args, kwargs = _joined(denoiser, known, known.expects.requests, args, kwargs)
    elif objective == "throughput" and known is None:
        args, kwargs = _requests(denoiser, lowering, args, kwargs)
    require_fresh(known, denoiser.step(args, kwargs).plan)
    others = {other: Spread(uncompiled(getattr(model, other)), lowering, ranks) for other in names if other != name}
    decoder = _decoder_of(model) if vae is not False and name is not None else None
    image = SampleRequest(world_size, None, None, None, None, EXACT, speeds=network.speeds[:world_size])
    of_image = replace(lowering, request=image, tracing=replace(tracing, rows_of=image_rows), plan=None, setting=None)
    spread = None if decoder is None else Spread(decoder, of_image, ranks, or_whole=True)
    return Sampler(model, name, denoiser, others, spread, (args, kwargs), ranks, network)


@held_collector()
def _requests(
    denoiser: Spread, lowering: SampleLowering, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call that joins as many like this one as is best for each."""
    traced, num_samples = denoiser.traced(args, kwargs)

    def requests() -> int:
        denoiser.lowering = looking = lowering.looking(traced, num_samples)
        assert looking.looked_at is not None
        return looking.looked_at.best.requests

    with denoiser.ranks.compiling(lowering.compared(lowering.case(traced, num_samples))):
        count = denoiser.ranks.of_rank_zero(requests)
    return repeated(denoiser.module, args, kwargs, count)


def _joined(
    denoiser: Spread, known: SamplePlan, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call that a plan was made for which joins so many: of this one, or this one itself."""
    _, num_samples = denoiser.traced(args, kwargs)
    is_one = num_samples * count == known.num_samples
    return repeated(denoiser.module, args, kwargs, count) if is_one else (args, kwargs)


def _check_choices(**given: str) -> None:
    """Refuse a choice that is none."""
    for name, value in given.items():
        known = get_args(_CHOICES[name])
        if value not in known:
            raise CompileError(f"{name}={value!r} is not known; use one of {', '.join(known)}")


def _denoiser_call(
    model: Any, names: list[str], example: Mapping[str, Any] | None, rows_of: RowsOf, tells: bool
) -> tuple[str | None, nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The module that predicts first, its name where it is a pipeline's, and its call; `names` loses those before it
    that have no rows, as priors of embeddings, which one process `tells`."""
    if names:
        if example is None:
            raise CompileError("example is missing: keyword arguments of one call of the pipeline, {'prompt': ...}")
        name, args, kwargs = recorded_call(model, names, example)
        module = uncompiled(getattr(model, name))
        inputs, tensors = describe(module, args, kwargs, None)
        try:
            rows_of(module, dict(zip(inputs.tensor_names, tensors, strict=True)))
        except CompileError as error:
            if len(names) == 1:
                raise
            if tells:
                _log.warning("%s runs whole on every rank: %s", name, error)
            names.remove(name)
            return _denoiser_call(model, names, example, rows_of, tells)
        return name, module, args, kwargs
    if not isinstance(model, nn.Module):
        raise CompileError(f"{type(model).__name__} is neither a pipeline nor a module")
    if example is None:
        if not hasattr(model, "config"):
            raise CompileError(
                f"example is missing, and {type(model).__name__} has no config to make one from: give keyword "
                "arguments of one call, {'sample': ...}"
            )
        made = example_inputs(model, 2)
        return None, model, (), {key: value for key, value in made.items() if key != "target"}
    if not any(isinstance(value, torch.Tensor) for value in pytree.tree_leaves(dict(example))):
        raise CompileError(f"example={dict(example)} has no tensor; give keyword arguments of {type(model).__name__}")
    return None, model, (), dict(example)


def _launched(device: torch.device, backend: str) -> Ranks:
    from fxpipe.run.transport.distributed import DistributedTransport

    return LaunchedRank(DistributedTransport(device), backend)


def _decoder_of(pipe: Any) -> nn.Module | None:
    """The decoder of a VAE whose latents are an image's or a video's."""
    found = getattr(getattr(pipe, "vae", None), "decoder", None)
    return found if isinstance(found, nn.Module) else None
