"""Ranks that watch: they compute nothing, and are shown the prediction, where others are faster without them.

3 patches, 1 rank watches     rank 0: x[0:4]; ...; send prediction to rank 3      rank 3: wait prediction
                              rank 1: x[4:8]; ...
"""

from collections.abc import Collection, Sequence

import torch
from torch import fx

from fxpipe.plan import ops
from fxpipe.plan.rank_program import Message
from fxpipe.plan.sample_program import SampleProgram, StepForm
from passes.sampling.groups import Alone, result_of

_PREDICTION = "prediction"


def watched(alone: Alone, first: int, count: int, like: torch.Tensor, device: torch.device) -> Alone:
    """Programs, of which rank 0's is one, with those of `count` more ranks from `first` on, whom rank 0 shows what it
    predicts, in every form alike; `like` is the prediction, on the meta device."""
    programs, of_forms = alone
    edges = 1 + max((message.edge for of in of_forms.values() for message in of), default=-1)
    shape = tuple(like.shape)
    shown = tuple(
        Message(edges + place, 0, first + place, None, _PREDICTION, -1, _PREDICTION, shape, like.dtype)
        for place in range(count)
    )
    watching = [_watching(message, [*of_forms], like, device) for message in shown]
    messages = {form: (*of, *shown) for form, of in of_forms.items()}
    return [*(_showing(one, shown) if one.rank == 0 else one for one in programs), *watching], messages


def only(alone: Alone, ranks: Collection[int]) -> Alone:
    """The programs of these ranks."""
    programs, messages = alone
    return [program for program in programs if program.rank in ranks], messages


def _showing(program: SampleProgram, shown: Sequence[Message]) -> SampleProgram:
    for form in program.forms.values():
        graph = form.graph
        transport, *_ = graph.find_nodes(op="placeholder")
        (output,) = graph.find_nodes(op="output")
        with graph.inserting_before(output):
            for message in shown:
                message.sent(transport, result_of(graph), f"show_rank_{message.dst}")
        graph.lint()
    return program


def _watching(message: Message, forms: Sequence[str], like: torch.Tensor, device: torch.device) -> SampleProgram:
    graph = fx.Graph()
    transport = graph.placeholder("transport")
    graph.call_function(ops.begin, (transport, "predict"))
    posted = message.received(transport, device, "recv_prediction_from_0")
    prediction = graph.call_function(ops.wait, (posted,))
    prediction.meta["val"] = like
    graph.output(prediction)
    return SampleProgram(message.dst, {name: StepForm(graph) for name in forms}, (), {})
