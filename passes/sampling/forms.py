"""The forms of displaced sampling: which exchanges cross to the next step, and programs of patches with all forms.

fresh       every exchange is of this step; what arrives is also carried on
displaced   exchanges cross in buckets, but the fresh ones: the prediction, synchronised norms
last        as displaced, and nothing is sent that nobody will read
again       where displaced forms advance: as fresh, after another step
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from fxpipe.capture.reach import reached
from fxpipe.errors import CompileError
from fxpipe.plan import row_ops
from fxpipe.plan.rank_program import Message
from fxpipe.plan.sample_plan import How
from fxpipe.plan.sample_program import SampleProgram
from passes.rows import RowPlan
from passes.sampling.advance import AdvancedWriter, AgainWriter, HistoryWriter
from passes.sampling.buckets import ExchangeKey, displaced_messages, key_of
from passes.sampling.displaced import CarryingWriter, Crossing, CrossingWriter, DisplacedWriter
from passes.sampling.exchanges import Exchange
from passes.sampling.messages import exchange_nodes, messages_of
from passes.sampling.patches import Patch


def displaced_programs(
    plan: RowPlan, patches: Sequence[Patch], graphs: Mapping[int, fx.Graph], device: torch.device, how: How
) -> tuple[tuple[SampleProgram, ...], dict[str, tuple[Message, ...]]]:
    """The programs of the patches that have graphs, on the rank of their number, with all forms; each form's messages
    in order of channels.

    Raises:
        CompileError: the prediction has entries of no row, or what is to be fresh is no exchange.
    """
    fresh, any_graph = messages_of(patches, graphs.values()), next(iter(graphs.values()))
    kept = _fresh_exchanges(graphs.values(), fresh, how.norms) | _asked(any_graph, how.fresh)
    asked = [m for m in fresh if m.kind != "moments" or how.norms != "separate" or key_of(m) in kept]
    displaced = displaced_messages(asked, kept)
    last = tuple(message for message in displaced if not message.crosses)
    advanced = _advanced(any_graph, kept) if how.advance else frozenset()
    crossing = Crossing(kept, tuple(message for message in displaced if message.crosses), how.norms, advanced)
    messages = {"fresh": tuple(fresh), "displaced": displaced, "last": last}
    messages |= {"again": messages["fresh"]} if advanced else {}
    programs = []
    for index, graph in graphs.items():
        forms = {}
        for form in messages:
            mine = [m for m in messages[form] if index in m.channel and not m.crosses]
            writer = _writer(form, bool(advanced))(
                plan, patches, patches[index], mine, device, crossing, form != "last"
            )
            forms[form] = writer.write(graph)
        programs.append(SampleProgram(index, forms, writer.inputs, writer.state))
    return tuple(programs), messages


def _writer(form: str, advance: bool) -> type[CrossingWriter]:
    if form == "again":
        return AgainWriter
    if form == "fresh":
        return HistoryWriter if advance else CarryingWriter
    return AdvancedWriter if advance else DisplacedWriter


def _advanced(graph: fx.Graph, fresh: Collection[ExchangeKey]) -> frozenset[ExchangeKey]:
    """Exchanges whose values may be moved on: numbers, but moments, and powers, which must not fall below zero."""
    keys = set[ExchangeKey]()
    for node in exchange_nodes(graph):
        operand, value = node.args[0], node.meta["val"]
        powers = isinstance(operand, fx.Node) and operand.target is row_ops.power
        if node.meta["exchange"].kind != "moments" and not powers and value.dtype.is_floating_point:
            keys.add(node.meta["exchange"].key)
    return frozenset(keys - set(fresh))


def _fresh_exchanges(graphs: Collection[fx.Graph], messages: Sequence[Message], norms: str) -> frozenset[ExchangeKey]:
    """Those that never cross: what every patch predicts of, synchronised norms, and what needs no message at all."""
    fresh = {key for graph in graphs for key in _read_by_all(graph)}
    fresh |= {key_of(message) for message in messages if message.kind == "moments" and norms == "sync"}
    exchanges = {node.meta["exchange"].key for node in exchange_nodes(next(iter(graphs)))}
    fresh |= exchanges - {key_of(message) for message in messages}
    return frozenset(fresh)


def _asked(graph: fx.Graph, names: Collection[str]) -> frozenset[ExchangeKey]:
    keys: list[ExchangeKey] = [node.meta["exchange"].key for node in exchange_nodes(graph)]
    known = {told(key): key for key in keys}
    if unknown := sorted(set(names) - set(known)):
        raise CompileError(
            f"{unknown[0]!r} is to be kept fresh, but patches exchange nothing of that name; known are "
            f"{', '.join([*known][:4])}, ..."
        )
    return frozenset(known[name] for name in names)


def told(key: ExchangeKey) -> str:
    """An exchange as plans name it."""
    value, kind = key
    return f"{kind} {value}"


def _read_by_all(graph: fx.Graph) -> set[ExchangeKey]:
    """The exchanges after which every patch makes the whole prediction: all must read the same there."""
    (output,) = graph.find_nodes(op="output")
    before = reached(output.all_input_nodes, lambda node: [] if "exchange" in node.meta else node.all_input_nodes)
    found: list[Exchange] = [node.meta["exchange"] for node in before if "exchange" in node.meta]
    if any(one.kind != "prediction" and one.state is not None and not one.state.all_rows for one in found):
        raise CompileError(
            "displaced patches would predict entries that belong to no row each in their own way; use mode='exact'"
        )
    return {exchange.key for exchange in found}
