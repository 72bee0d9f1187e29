"""Actions: what a rank does at a time, and the work that the actions of all ranks have to contain.

2F0           stage 2's forward of micro-batch 0     0T3           component 0 on micro-batch 3
2B0, 2I0 2W0  its backward, whole or in two parts    0T[0:4]x0:9   layers 0 to 3 of component 0 on samples 0 to 8 of the
2R5, 2R5:1    the sum of its gradients, on rank 5: the first,      next batch
              the second, of those that have come since
"""

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, replace
from functools import cached_property

KINDS = {
    "F": "forward",
    "B": "full backward",
    "I": "input gradient",
    "W": "weight gradient",
    "T": "frozen work, whose first number is the component",
    "R": "gradient reduction over the stage's replicas, whose last number is the rank (:1 for a second one, and so on)",
}
VOCABULARY = (
    f"legal actions are <stage><letter><micro-batch> with {', '.join(f'{k} = {v}' for k, v in KINDS.items())}, and "
    "<component>T[<first layer>:<last layer + 1>]x<first sample>:<last sample + 1> for frozen work of the next batch"
)

Span = tuple[int, ...]
"""From the first number to before the second; empty where there is none."""


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """One unit of work of one micro-batch, or a piece of the next batch's frozen work.

    `stage` is the frozen component's index where `kind` is "T"; `microbatch` is the rank where it is "R", of which
    `turn` counts those of a stage on a rank. A piece has `layers` and `samples` in place of a micro-batch.
    """

    stage: int
    kind: str
    microbatch: int = -1
    layers: Span = ()
    samples: Span = ()
    turn: int = 0

    @property
    def is_piece(self) -> bool:
        """Whether it is frozen work of the next batch."""
        return bool(self.samples)

    @property
    def num_samples(self) -> int:
        """Samples of a piece."""
        return self.samples[1] - self.samples[0]

    def __str__(self) -> str:
        if self.is_piece:
            return f"{self.stage}T[{self.layers[0]}:{self.layers[1]}]x{self.samples[0]}:{self.samples[1]}"
        return f"{self.stage}{self.kind}{self.microbatch}" + (f":{self.turn}" if self.turn else "")


def piece(component: int, layers: Span, samples: Span) -> Action:
    """Layers `layers` of a frozen component on samples `samples` of the next batch."""
    return Action(component, "T", -1, layers, samples)


@dataclass(frozen=True)
class Work:
    """What a schedule must contain: the same for every micro-batch.

    Terms: an edge (a, b) of `edges` is a forward value from stage a to stage b; (b, a) of `grad_edges` a gradient
    from stage b to stage a; (c, s) of `frozen_edges` a value of component c used by stage s; `component_edges` join
    components. `num_components` is zero where frozen work is not done for micro-batches; where that of the next batch
    is done, `ahead_layers` has the layers of every component, and `ahead_samples` the samples.
    """

    num_stages: int
    num_microbatches: int
    num_components: int = 0
    empty: frozenset[int] = frozenset()  # stages without nodes, which have no actions
    backward: frozenset[int] = frozenset()  # stages with any gradient work
    input_grad: frozenset[int] = frozenset()  # stages that send a gradient to another stage
    weight_grad: frozenset[int] = frozenset()  # stages that own trainable parameters
    edges: frozenset[tuple[int, int]] = frozenset()
    grad_edges: frozenset[tuple[int, int]] = frozenset()
    frozen_edges: frozenset[tuple[int, int]] = frozenset()
    component_edges: frozenset[tuple[int, int]] = frozenset()
    ahead_layers: tuple[int, ...] = ()
    ahead_samples: int = 0

    @property
    def stages(self) -> list[int]:
        """The stages that have work, in order."""
        return [stage for stage in range(self.num_stages) if stage not in self.empty]

    def needs(self, action: Action, present: Set[Action]) -> Iterator[Action]:
        """The actions that must end before `action`, no piece; `present` tells which stages' backwards are split."""
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if kind == "W":
            yield Action(stage, "I", microbatch)
        if kind in "BI":
            yield Action(stage, "F", microbatch)
        for producer in self._producers.get((kind.replace("I", "B"), stage), ()):
            split = Action(producer, "I", microbatch)
            yield split if kind in "BI" and split in present else Action(producer, kind.replace("I", "B"), microbatch)
        if kind == "F":
            for component in self._producers.get(("frozen", stage), ()):
                yield Action(component, "T", microbatch)

    def without_frozen(self) -> "Work":
        """The training alone: what frozen work makes is there before it starts."""
        return replace(self, num_components=0, frozen_edges=frozenset(), component_edges=frozenset())

    def needs_among(self, present: Set[Action]) -> Callable[[Action], Iterable[Action]]:
        """What must end before each of the actions of a schedule, pieces included."""
        before = self.pieces_before(present)
        return lambda action: before[action] if action.is_piece else self.needs(action, present)

    def pieces_before(self, present: Set[Action]) -> dict[Action, set[Action]]:
        """For every piece those whose results it takes up, of the same samples: earlier layers, other components."""
        of_sample: dict[tuple[int, int], list[Action]] = {}
        pieces = [action for action in present if action.is_piece]
        for piece in pieces:
            for sample in range(*piece.samples):
                of_sample.setdefault((piece.stage, sample), []).append(piece)
        found: dict[Action, set[Action]] = {}
        for piece in pieces:
            read = () if piece.layers[0] else self._producers.get(("T", piece.stage), ())
            for sample in range(*piece.samples):
                earlier = (p for p in of_sample[piece.stage, sample] if p.layers[1] <= piece.layers[0])
                others = (p for source in read for p in of_sample.get((source, sample), ()))
                found.setdefault(piece, set()).update(earlier, others)
        return found

    @cached_property
    def _producers(self) -> dict[tuple[str, int], list[int]]:
        found: dict[tuple[str, int], list[int]] = {}
        kinds = {"F": self.edges, "B": self.grad_edges, "frozen": self.frozen_edges, "T": self.component_edges}
        for kind, edges in kinds.items():
            for source, target in sorted(edges):
                found.setdefault((kind, target), []).append(source)
        return found
