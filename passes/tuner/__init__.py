"""The tuner: which way to use the ranks, of all that the user leaves open.

candidates      what there is to choose from, each with a lower bound
predictions     what one would take: an estimate, a simulation, whether it fits into memory (within_memory)
tune            best first, until no bound beats what was found
finals          those in front are rehearsed, with a searched order
"""
