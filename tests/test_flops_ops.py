"""FLOPs and bytes operator by operator, against torch's counter and by hand."""

import operator
from collections.abc import Callable, Iterable

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from cost_models.flops import node_costs
from fxpipe.costs import NodeCost, total_cost, uncosted_ops
from tests.node_numbers import counts_of

KINDS = {"PARAMETER": "parameter", "BUFFER": "buffer", "CONSTANT_TENSOR": "constant", "USER_INPUT": "input"}


def graph_cost(nodes: Iterable[fx.Node]) -> NodeCost:
    return total_cost(node_costs(nodes).values())


class Apply(nn.Module):
    def __init__(self, function: Callable[..., Tensor], *weights: Tensor) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(weight) for weight in weights])

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs, *self.weights)


def traced(model: nn.Module, *inputs: Tensor) -> fx.Graph:
    """The model's graph with a symbolic batch and the marks costs are taken from; inputs want gradients."""
    model = Apply(model)
    shapes = ({0: torch.export.Dim.AUTO},) * len(inputs)
    exported = torch.export.export(model, inputs, dynamic_shapes=(shapes,), strict=False)
    kinds = {spec.arg.name: KINDS[spec.kind.name] for spec in exported.graph_signature.input_specs}
    parameters = dict(model.named_parameters())
    frozen = {
        s.arg.name
        for s in exported.graph_signature.input_specs
        if s.target in parameters and not parameters[s.target].requires_grad
    }
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            node.meta["kind"] = kinds[node.name]
            wanted = isinstance(value, Tensor) and value.is_floating_point()
            node.meta["requires_grad"] = (
                wanted and node.name not in frozen and node.meta["kind"] in ("parameter", "input")
            )
        else:
            node.meta["requires_grad"] = any(source.meta["requires_grad"] for source in node.all_input_nodes)
    return exported.graph


def counted(model: nn.Module, *inputs: Tensor) -> tuple[int, int, int]:
    """FLOPs of forward, input gradients and weight gradients, as torch counts them."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
    with FlopCounterMode(display=False) as forward:
        output = model(*leaves)
    parts = []
    for sources in ([x for x in leaves if x.requires_grad], parameters):
        with FlopCounterMode(display=False) as backward:
            if sources:
                torch.autograd.grad(output, sources, torch.ones_like(output), retain_graph=True, allow_unused=True)
        parts.append(backward.get_total_flops())
    return forward.get_total_flops(), parts[0], parts[1]


def flops(cost: NodeCost, num_samples: int) -> tuple[int, int, int]:
    counts = counts_of(cost, num_samples)
    return counts.forward_flops, counts.backward_input_flops, counts.backward_weight_flops


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, 3)).transpose(1, 2)


PRODUCTS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(6, 4), (5, 6)),
    "linear of a vector": (nn.Linear(6, 4), (6,)),
    "matmul with a matrix": (Apply(torch.matmul, torch.randn(6, 4)), (5, 6)),
    "matmul broadcast": (Apply(lambda x, w: x[:, None] @ w, torch.randn(3, 6, 4)), (5, 6)),
    "activations": (Apply(lambda x: heads(x) @ heads(x).mT), (5, 6)),
    "transposed weight": (Apply(lambda x, w: torch.matmul(x, w.t().to(x.dtype)), torch.randn(4, 6)), (5, 6)),
    "bmm": (Apply(lambda x: torch.bmm(x, x.transpose(1, 2) * 2)), (5, 6)),
    "baddbmm": (Apply(lambda x: torch.baddbmm(x[:, :, :1], x, x.transpose(1, 2) * 2)), (5, 6)),
    "addmm": (Apply(lambda x, b, w: torch.addmm(b, x, w), torch.randn(4), torch.randn(6, 4)), (6,)),
    "einsum": (Apply(lambda x, w: torch.einsum("bij,hjk->bhik", x, w), torch.randn(3, 6, 4)), (5, 6)),
    "einsum of activations": (Apply(lambda x: torch.einsum("bij,bkj->bik", x, x * 2)), (5, 6)),
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2), (4, 9)),
    "conv2d same": (nn.Conv2d(4, 6, 3, padding="same"), (4, 5, 7)),
    "conv3d": (nn.Conv3d(2, 3, (1, 2, 3)), (2, 4, 5, 6)),
    "conv_transpose1d": (nn.ConvTranspose1d(4, 6, 3, stride=2), (4, 5)),
    "conv_transpose2d": (nn.ConvTranspose2d(4, 6, 3, stride=2), (4, 5, 7)),
    "group_norm": (nn.GroupNorm(2, 4), (4, 5)),
    "layer_norm and gelu": (nn.Sequential(nn.LayerNorm(6), nn.GELU()), (5, 6)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_agrees_with_torch_at_every_batch_size(name: str) -> None:
    model, shape = PRODUCTS[name]
    cost = graph_cost(traced(model, torch.randn(5, *shape)).nodes)
    for num_samples in (2, 7):
        assert flops(cost, num_samples) == counted(model, torch.randn(num_samples, *shape))


def only(graph: fx.Graph, target: Callable[..., object]) -> fx.Node:
    (node,) = graph.find_nodes(op="call_function", target=target)
    return node


def test_a_grouped_convolution_costs_its_groups_share() -> None:
    graph = traced(nn.Conv2d(4, 6, 3, groups=2, bias=False), torch.randn(5, 4, 8, 8))
    assert flops(graph_cost(graph.nodes), 1) == (2 * 6 * 36 * 2 * 9,) * 3


def test_attention_backward_is_five_products() -> None:
    x = torch.randn(5, 2, 8, 4)
    graph = traced(Apply(lambda x: F.scaled_dot_product_attention(x, x * 2, x * 3)), x)
    assert flops(graph_cost(graph.nodes), 1) == (2 * 2 * 2 * 8 * 8 * 4, 5 * 2 * 2 * 8 * 8 * 4, 0)


def test_matrix_vector_products_count_though_torch_leaves_them_out() -> None:
    for function in (torch.mv, torch.matmul):
        graph = traced(Apply(function, torch.randn(6)), torch.randn(5, 6))
        assert flops(graph_cost(graph.nodes), 3) == (36, 36, 36)
    graph = traced(Apply(torch.inner, torch.randn(6)), torch.randn(5, 6))  # a composite: measured
    assert flops(graph_cost(graph.nodes), 3)[0] == 36


def test_bilinear_forms_count_though_torch_leaves_them_out() -> None:
    graph = traced(Apply(lambda x, w: F.bilinear(x, x, w), torch.randn(3, 6, 6)), torch.randn(5, 6))
    assert flops(graph_cost(graph.nodes), 1) == (2 * 3 * 6 * 6, 2 * 2 * 3 * 6 * 6, 2 * 3 * 6 * 6)


def test_recurrent_layers_are_counted_step_by_step() -> None:
    def lstm(x: Tensor, *weights: Tensor) -> Tensor:
        state = [x.new_zeros(1, x.shape[0], 3)] * 2
        return torch.lstm(x, state, list(weights), True, 1, 0.0, True, False, True)[0]

    weights = [torch.randn(12, 6), torch.randn(12, 3), torch.randn(12), torch.randn(12)]
    graph = traced(Apply(lstm, *weights), torch.randn(5, 2, 6))
    assert flops(graph_cost(graph.nodes), 2)[0] == 2 * 2 * 2 * 12 * (6 + 3)


def test_products_across_samples_are_quadratic_in_the_batch() -> None:
    for function in (lambda x: x @ x.mT, lambda x: torch.einsum("ik,jk->ij", x, x)):
        cost = graph_cost(traced(Apply(function), torch.randn(5, 6)).nodes)
        assert [flops(cost, n)[0] for n in (1, 4)] == [12, 192]


def test_nothing_is_differentiated_that_needs_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    model[0].requires_grad_(False)
    graph = traced(model, torch.randn(5, 6))
    (x,) = (node for node in graph.nodes if node.op == "placeholder" and node.meta["kind"] == "input")
    x.meta["requires_grad"] = False
    first, second = graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    first.meta["requires_grad"] = False
    assert flops(graph_cost([first]), 1) == (72, 0, 0)
    assert flops(graph_cost([second]), 1) == (48, 0, 48)
    counts = counts_of(graph_cost([first]), 1)
    assert counts.backward_input_bytes == counts.backward_weight_bytes == 0


def test_bytes_of_a_linear() -> None:
    counts = counts_of(graph_cost(traced(nn.Linear(6, 4), torch.randn(5, 6)).nodes), 3)
    x, weight, bias, y = 3 * 6 * 4, 24 * 4, 4 * 4, 3 * 4 * 4
    assert (counts.bytes_read, counts.bytes_written) == (x + weight + bias, y)
    assert counts.backward_input_bytes == y + weight + x  # reads grad y and the weight, writes grad x
    assert counts.backward_weight_bytes == y + x + weight + bias


BYTES: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {  # of [s, 4, 6] float32, at one sample: read, written
    "silu": (F.silu, 96, 96),
    "add itself": (lambda x: x + x, 96, 96),
    "sum": (lambda x: x.sum(-1), 96, 16),
    "softmax": (lambda x: x.softmax(-1), 96, 96),
    "to half": (lambda x: x.to(torch.float16), 96, 48),
    "to the same": (lambda x: x.to(torch.float32), 0, 0),
    "view": (lambda x: x.view(-1, 24), 0, 0),
    "reshape without copy": (lambda x: x.reshape(-1, 24), 0, 0),
    "reshape with copy": (lambda x: x.transpose(1, 2).reshape(-1, 24), 96, 96),
    "contiguous with copy": (lambda x: x.transpose(1, 2).contiguous(), 96, 96),
    "contiguous without copy": (lambda x: x.contiguous(), 0, 0),
    "chunk and slice": (lambda x: x.chunk(2, -1)[1][:, 1:], 0, 0),
    "split": (lambda x: x.split([2, 4], -1)[0], 0, 0),
    "expanded": (lambda x: x[:, :1].expand(-1, 4, -1).exp(), 24, 96),
    "no dropout": (lambda x: F.dropout(x, 0.5, training=False), 0, 0),
    "zeros_like": (lambda x: torch.zeros_like(x), 0, 96),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_the_least_a_kernel_moves(name: str) -> None:
    function, read, written = BYTES[name]
    cost = graph_cost(traced(Apply(function), torch.randn(5, 4, 6)).nodes)
    for num_samples in (1, 3):
        counts = counts_of(cost, num_samples)
        assert (counts.bytes_read, counts.bytes_written) == (read * num_samples, written * num_samples)
    assert counts_of(cost, 1).forward_flops == 0


def test_a_lookup_reads_rows_and_not_the_table() -> None:
    graph = traced(Apply(lambda i, w: F.embedding(i, w), torch.randn(1000, 8)), torch.randint(0, 9, (5, 3)))
    counts = counts_of(graph_cost(graph.nodes), 2)
    assert (counts.bytes_read, counts.bytes_written) == (2 * 3 * 8 + 2 * 3 * 8 * 4, 2 * 3 * 8 * 4)
    assert counts.backward_weight_bytes > 1000 * 8 * 4  # its gradient is dense


def test_parameters_seen_through_casts_and_sums_are_weights() -> None:
    model = Apply(
        lambda x, w, a, b: F.linear(x, w.double() + a.double() @ b.double()),
        *map(torch.randn, ((4, 6), (4, 2), (2, 6))),
    )
    graph = traced(model, torch.randn(5, 6, dtype=torch.float64))
    assert flops(graph_cost([only(graph, torch.ops.aten.linear.default)]), 1) == (48, 48, 48)
    assert flops(graph_cost([only(graph, torch.ops.aten.matmul.default)]), 1) == (96, 0, 192)


def test_costs_are_linear_expressions_of_one_symbol() -> None:
    graph = traced(nn.Linear(6, 4), torch.randn(5, 6))
    (cost,) = (c for c in node_costs(graph.nodes).values() if c.forward_flops != 0)
    (symbol,) = cost.forward_flops.free_symbols
    assert sympy.expand(cost.forward_flops - 48 * symbol) == 0
    assert cost.dtype is torch.float32


@pytest.fixture(scope="module")
def unknown_operator() -> Callable[[Tensor], Tensor]:
    @torch.library.custom_op("fxpipe_tests::secret_matmul", mutates_args=())
    def secret_matmul(x: Tensor) -> Tensor:
        return x @ x.mT

    secret_matmul.register_fake(lambda x: x.new_empty(x.shape[0], x.shape[0]))
    return secret_matmul


def test_an_operator_nobody_counts_costs_its_bytes_and_is_named(unknown_operator: Callable[[Tensor], Tensor]) -> None:
    graph = traced(Apply(lambda x: unknown_operator(x).exp()), torch.randn(5, 6))
    costs = node_costs(graph.nodes)
    assert uncosted_ops(costs.values()) == ("fxpipe_tests.secret_matmul.default",)
    (unknown,) = (cost for cost in costs.values() if cost.uncosted)
    counts = counts_of(unknown, 3)
    assert (counts.forward_flops, counts.bytes_read, counts.bytes_written) == (0, 3 * 6 * 4, 3 * 3 * 4)
    total = graph_cost(graph.nodes)
    assert total.uncosted == unknown.uncosted
    assert counts_of(total, 3).bytes_written == 2 * 3 * 3 * 4


def test_a_registered_formula_makes_an_operator_known(unknown_operator: Callable[[Tensor], Tensor]) -> None:
    graph = traced(Apply(lambda x: unknown_operator(x * 3)), torch.randn(5, 6))
    for node in graph.nodes:
        node.meta["requires_grad"] = False
    assert graph_cost(graph.nodes).uncosted
    register_flop_formula(torch.ops.fxpipe_tests.secret_matmul)(lambda x, *_, **__: 2 * x[0] * x[0] * x[1])
    try:
        cost = graph_cost(graph.nodes)
    finally:
        del flop_registry[torch.ops.fxpipe_tests.secret_matmul]
    assert (flops(cost, 4)[0], cost.uncosted) == (2 * 4 * 4 * 6, frozenset())


def test_a_norm_of_somebodys_own_costs_what_they_say() -> None:
    @torch.library.custom_op("fxpipe_tests::layer_norm", mutates_args=())
    def layer_norm(x: Tensor) -> Tensor:
        return x @ x.t()

    layer_norm.register_fake(lambda x: x.new_empty(x.shape[0], x.shape[0]))
    graph = traced(Apply(lambda x: layer_norm(x * 3)), torch.randn(5, 6))
    register_flop_formula(torch.ops.fxpipe_tests.layer_norm)(lambda x, *_, **__: 2 * x[0] * x[0] * x[1])
    for node in graph.nodes:
        node.meta["requires_grad"] = False
    assert flops(graph_cost(graph.nodes), 4)[0] == 2 * 4 * 4 * 6


@pytest.mark.parametrize(
    "function", [torch.linalg.inv, torch.linalg.cholesky, lambda x: torch.linalg.qr(x).R, torch.linalg.svdvals]
)
def test_matrix_kernels_hidden_in_composites_are_named(function: Callable[[Tensor], Tensor]) -> None:
    cost = graph_cost(traced(Apply(function), torch.randn(5, 6, 6)).nodes)
    (name,) = cost.uncosted
    assert name.startswith("aten.linalg_")
    assert cost.forward_flops == 0
    assert counts_of(cost, 2).bytes_read >= 2 * 6 * 6 * 4


def test_norms_are_not_taken_for_matrix_kernels() -> None:
    assert graph_cost(traced(Apply(torch.linalg.vector_norm), torch.randn(5, 6)).nodes).forward_flops == 0


def test_shape_arithmetic_is_free() -> None:
    graph = traced(Apply(lambda x: x.repeat(x.shape[0] * 2, 1)), torch.randn(5, 6))
    sizes = [n for n in graph.nodes if n.target is operator.mul or n.target is torch.ops.aten.sym_size.int]
    assert sizes
    assert all(graph_cost([node]) == NodeCost() for node in sizes)
    assert counts_of(graph_cost(graph.nodes), 3).bytes_written == (3 * 2 * 3) * 6 * 4
