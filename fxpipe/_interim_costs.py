from types import SimpleNamespace
from fxpipe.costs import node_seconds
class BlockCosts:
    def __init__(self, cap, graph, costs, model):
        self.cap, self.graph, self.costs, self.model = cap, graph, costs, model
        b = len(graph.blocks); self._c = {}
        self.parameter_bytes = self.trained_bytes = (1000,)*b
        self.trained_elements = (250,)*b
        self.component_bytes = (0,)*len(graph.components)
        self.saved_bytes = self.saved_bytes_recomputed = self.temporary_bytes = lambda n: (1000*n,)*b
    def at(self, n):
        if n not in self._c:
            s = node_seconds(self.model, self.cap.graph, self.costs, n)
            sm = lambda gs, d: tuple(sum(d[x] for x in g.nodes) for g in gs)
            self._c[n] = SimpleNamespace(forward_seconds=sm(self.graph.blocks, s.forward), backward_seconds=sm(self.graph.blocks, s.backward), component_seconds=sm(self.graph.components, s.forward))
        return self._c[n]
block_costs = BlockCosts
