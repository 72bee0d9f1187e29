"""Sample programs: of every rank straight-line FX graphs that predict, its patch of the rows in hand.

once: what depends on the conditions of the call alone (keys of the text)   --->   known, in every step

step 0         step 1        step 2            step 3            step 4 of 5
fresh   --->   fresh  --->   displaced  --->   displaced  --->   last
        carries: what others sent, to be read a step later by a displaced form, by the last one too
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from fxpipe.plan.rank_program import bound, nest

FORMS = ("fresh", "displaced", "last", "again", "warm")
"""fresh: all exchanges are of this step. displaced: others' values are of the step before. last: as displaced, without
sending what a later step would read. again: as fresh, after a step of which displaced forms read something too. warm:
all exchanges are of this step, in another layout, which carries nothing."""

KNOWN = "known_in_call"
"""The argument of every form, after the inputs, that has what is computed once in a call."""


@dataclass(frozen=True)
class PatchParts:
    """How a prediction comes in patches: `sizes` entries each along dimension `along`; `like` is all of it, on the meta
    device. Where they do not follow each other there, `joined` says how it is made of them (`row_ops.join_patches`)."""

    along: int
    sizes: tuple[int, ...]
    like: torch.Tensor
    joined: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class StepForm:
    """One way to do a step.

    `graph` takes (transport, the whole inputs) and returns the whole prediction. Where a step before has `carried`
    something, it takes that too, as a last argument: a dict of these names that it empties. Where it `carries`
    something to the next step, it returns (prediction, a dict of these names). With `parts` the prediction is a list:
    of every patch its pieces along the batch, tensors or receives on their way.
    """

    graph: fx.Graph
    carried: tuple[str, ...] = ()
    carries: tuple[str, ...] = ()
    parts: PatchParts | None = None


@dataclass(frozen=True)
class SampleProgram:
    """What one rank runs for every call of a denoiser: one of `forms`, by the names of FORMS.

    Their graphs take the inputs in `inputs`, read state by its original name, and `state` maps those names to shape and
    type. The only form of exact sampling is "fresh".

    `once` takes some of the inputs and returns a tuple, which then every form takes after its inputs. It sends nothing.
    """

    rank: int
    forms: Mapping[str, StepForm]
    inputs: tuple[str, ...]
    state: Mapping[str, torch.Tensor]
    once: fx.Graph | None = None

    @property
    def conditions(self) -> tuple[str, ...]:
        """The inputs that `once` takes; a copy of them tells later whether they have changed."""
        return () if self.once is None else tuple(node.name for node in self.once.find_nodes(op="placeholder"))

    @property
    def graph(self) -> fx.Graph:
        """The fresh form's."""
        return self.forms["fresh"].graph

    def bind(self, state: Mapping[str, torch.Tensor], form: str = "fresh") -> fx.GraphModule:
        """The runnable module of a form, or of `once`, which shares `state`."""
        graph = self.once if form == "once" and self.once is not None else self.forms[form].graph
        return bound(nest(state), graph, f"rank_{self.rank}_{form}")
