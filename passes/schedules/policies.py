"""The schedules that have a name, as data: how each places stages on ranks, and how each orders their work.

name            stages per rank    on the ranks        order
1f1b            1                  0 1 2               a forward whenever 1F1B's memory admits it
interleaved     2                  0 1 2 0 1 2         the same, in groups of micro-batches
wave            2                  0 1 2 2 1 0         the same; both ends of a skip are on one rank
bidirectional   2                  0 1 2 2 1 0         the same; two groups of backbones, in opposite directions
zb-h1           1 or 2             0 1 2 or a wave     the same, weight gradients in idle time
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class OrderRule:
    """What a list scheduler does: 1F1B, unless a field says more.

    Args:
        first: the kinds in the order in which they go first; B stands for I, too.
        pace: instead, the operation goes first that is due first, micro-batches being due so many periods apart.
        in_flight: the most micro-batches on a stage, as a multiple of 1F1B's number; None leaves that to memory.
    """

    first: str = "FBW"
    pace: float | None = None
    in_flight: float | None = 1.0
    drain_last: bool = False  # a rank ends its forwards before its first backward; nothing bounds what is in flight
    split: bool = False  # backward as I and W (ZB-H1 of "Zero Bubble Pipeline Parallelism", 2024): W fills idle time
    grouped: bool = False  # world_size micro-batches pass a stage before the rank turns to its next (Megatron-LM, 2021)
    capped: bool = False  # no more in flight on a rank than 1F1B holds at most (Hanayo: Liu et al., SC 2023)
    repeated: bool = False  # one micro-batch's block every period (ZB-V: Qi et al., NeurIPS 2024)


@dataclass(frozen=True)
class Policy:
    """What the name of a schedule means.

    Args:
        stages_per_rank: the numbers that "auto" tries, the first of which is taken where the user leaves it open.
        folds: stages go there and back over the ranks, a multiple of two per rank, so that both ends of a skip can be
            on one rank.
        folds_pairs: so they do where every rank has two stages; otherwise they go one way.
        loops: stages go over the ranks in rounds of one direction: two passes over one backbone share its weights.
        reverses: two groups of backbones go over the ranks in opposite directions, one stage of either per rank.
        uneven: a line may have fewer stages than ranks, so that some stages have more replicas than others.
        automatic: whether "auto" tries it, where it suits the model.
    """

    name: str
    rule: OrderRule = field(default_factory=OrderRule)
    stages_per_rank: tuple[int, ...] = (1,)
    folds: bool = False
    folds_pairs: bool = False
    loops: bool = False
    reverses: bool = False
    uneven: bool = False
    automatic: bool = False

    @property
    def splits(self) -> bool:
        """Whether backwards are cut into input and weight gradient."""
        return self.rule.split

    def is_folded(self, stages: int, places: int) -> bool:
        """Whether so many stages go there and back over the ranks of a pipeline."""
        return self.folds or (self.folds_pairs and stages == 2 * places > 2)


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("gpipe", OrderRule(drain_last=True), uneven=True, automatic=True),
        Policy("1f1b", uneven=True, automatic=True),
        Policy("interleaved", OrderRule(grouped=True), (2,), loops=True, automatic=True),
        Policy("wave", stages_per_rank=(2,), folds=True, automatic=True),
        Policy("hanayo", OrderRule(capped=True), (2,), folds=True),
        Policy("zb-h1", OrderRule(split=True), (1, 2), folds_pairs=True),
        # By the name of its idea.
        Policy("zero-bubble", OrderRule(split=True), (1, 2), folds_pairs=True, automatic=True),
        Policy("zb-v", OrderRule(split=True, repeated=True), (2,), folds=True),
        # DiffusionPipe (Tian et al., MLSys 2024), section 4.2
        Policy("bidirectional", stages_per_rank=(2,), reverses=True, automatic=True),
    )
}
PLAIN = "1f1b"
"""The order of one rank, where all are the same."""
FOLDED = "wave"
"""The order of stages that go there and back."""
LOOPED = "interleaved"
"""The order of a backbone that runs twice, with both passes of a stage on its rank."""
LIST_RULES = (
    OrderRule(pace=0.25, in_flight=1.5),
    OrderRule(pace=0.5, in_flight=None),
    OrderRule(pace=0.25, in_flight=0.75),
    OrderRule(pace=1.0, in_flight=None),
    OrderRule(pace=0.25),
    OrderRule(pace=0.1, in_flight=1.5),
)
"""What a search starts from: the fewest of 72 rules whose best is within 0.1 % of the best of all, on average."""
