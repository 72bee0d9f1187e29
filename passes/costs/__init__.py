"""What parts of a step cost, read off the captured graph: seconds, weights, and every byte that is held.

    linear, silu, linear    ->    block 0: 1.2 ms + 0.3 ms b, 4 MiB of weights, saves 16 KiB b for its backward

block_costs      of every block                          frozen_layers    frozen components in layers (layer)
call_costs       of the graphs that programs call        call_bytes       what a call holds while it runs
stage_bytes      of the calls of any run of blocks       unit_trace       its kernels by the storages they touch
saved, kept      what autograd keeps, of a stage and of one operation (call_trace)
"""
