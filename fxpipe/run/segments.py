"""A sampling form whose operations between messages are graphs of their own, for back ends that compile or record.

x -> a -> b -> send(b) -> wait(up) -> c   =>   segment_0(x) -> send(copy of b) -> wait(up) -> segment_1(a, up)

What leaves segments for the next step is copied, as what is sent: recorded ones write in their old memory again. Inputs
whose patches are on their way are waited for where a segment reads them: compiled code looks past such a tensor.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from operator import getitem

import torch
from torch import fx, nn

from fxpipe.plan import displaced_ops, ops, row_ops
from fxpipe.plan.rank_program import RankProgram
from fxpipe.plan.sample_program import SampleProgram
from fxpipe.run.compiled import with_stages
from fxpipe.run.patched import settled

_APART = {
    ops.begin, ops.send, ops.recv, ops.wait, ops.take, displaced_ops.own_rows, displaced_ops.put, displaced_ops.done,
}  # fmt: skip
_OF_INPUTS = {getitem, row_ops.cut_rows, ops.slice_batch}
_CLONE = torch.ops.aten.clone.default


def runnable_form(program: SampleProgram, form: str, state: Mapping[str, torch.Tensor], backend: str) -> nn.Module:
    """A form's runnable module by a back end, one of `fxpipe.options.BACKENDS` that is not eager."""
    graph, segments = segmented(program.forms[form].graph)
    found = with_stages(RankProgram(program.rank, graph, segments, program.inputs, (), program.state), state, backend)
    if backend == "cudagraphs":
        found.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
    return found


def segmented(graph: fx.Graph) -> tuple[fx.Graph, dict[str, fx.Graph]]:
    """The graph with runs of computing nodes as calls of modules, and these modules' graphs by name."""
    of_inputs = {
        node
        for node in graph.nodes
        if node.target in _OF_INPUTS and all(source.op == "placeholder" for source in node.all_input_nodes)
    }
    place, runs = dict[fx.Node, int](), defaultdict[int, list[fx.Node]](list)
    ends, number = dict[fx.Node, int](), 0
    for node in graph.nodes:
        if node.target is getitem and node.args[0] in place:
            place[node] = place[node.args[0]]
        elif node.target in _APART or node.op == "output":
            if node.target is not ops.take:  # which is of the step before, and waits for nothing of this one
                ends[node], number = number, number + 1
            continue
        elif node.op == "call_function" and node not in of_inputs:
            place[node] = number
        else:
            continue
        runs[place[node]].append(node)

    new, env, segments = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, fx.Graph]()

    def copied(node: fx.Node) -> fx.Node:
        return new.call_function(_CLONE, (env[node],)) if node in place else env[node]

    @cache
    def read(node: fx.Node) -> fx.Node:
        may_come = node.op == "placeholder" or node in of_inputs
        return new.call_function(settled, (env[node],)) if may_come else env[node]

    for node in graph.nodes:
        if node in ends and (run := runs.get(ends[node])):
            name = f"segment_{len(segments)}"
            segments[name], given, made = _segment(run, place)
            call = new.call_module(name, tuple(map(read, given)))
            env.update({value: new.call_function(getitem, (call, index)) for index, value in enumerate(made)})
        if node.op == "output":
            new.output(fx.map_arg(node.args[0], copied))
        elif node not in place and (node.op != "get_attr" or any(user not in place for user in node.users)):
            env[node] = new.node_copy(node, copied if node.target is displaced_ops.done else env.__getitem__)
    return new, segments


def _segment(run: list[fx.Node], place: Mapping[fx.Node, int]) -> tuple[fx.Graph, list[fx.Node], list[fx.Node]]:
    """A graph of these nodes, which returns a tuple; what it takes, and what others read of it."""
    own, number = set(run), place[run[0]]
    given = list(dict.fromkeys(s for node in run for s in node.all_input_nodes if s not in own and s.op != "get_attr"))
    made = [node for node in run if any(place.get(user) != number for user in node.users)]
    graph = fx.Graph()
    env = {node: graph.placeholder(node.name) for node in given}
    for node in run:
        for weight in node.all_input_nodes:
            if weight.op == "get_attr" and weight not in env:
                env[weight] = graph.node_copy(weight)
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in made))
    return graph, given, made
