"""What parts of a step cost, read off the captured graph: seconds, weights, and every byte that is held.

    linear, silu, linear    ->    block 0: 1.2 ms + 0.3 ms b, 4 MiB of weights, saves 16 KiB b for its backward

block_costs      of every block                          frozen_layers    frozen components in layers (layer)
call_trace       kernels of one operation                unit_trace       of a unit, by the storages they touch
call_bytes       what a call holds while it runs         stage_bytes      of the calls of any run of blocks
saved            what autograd keeps                     gradient_flow    where gradients go (work: of a schedule)
operations       a capture's, each traced once           local            those that belong to nobody
"""
