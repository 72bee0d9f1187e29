"""Sampling: a denoiser's rows over several ranks, and its operations over several stages.

RowPlan + bounds of units           ->  patch graphs  ->  one program per rank
RowPlan + seconds of operations     ->  a line of stages  ->  cells (stage x turn)  ->  one program per rank

patches       which units a patch has, how many entries of every value       times    when a value is known
patch_graph   one graph per patch, or piece of one: local sizes, exchanges as nodes (exchanges; patch_writer)
fresh         exchanges as messages of this step, waited for                 forms    all forms of displaced sampling
displaced     exchanges as messages of the step before                       buckets  which of them travel together
advance       what was read is moved on by its own last change               groups   samples on groups of ranks
stages        what depends on the patch, cut for columns of ranks            cells    in which order columns work
staged        stages on ranks, samples one after the other, exact (staged_rank)
once          what conditions alone decide, out of every form                text     whose text in one sequence is
piped         stages on ranks, patches one after the other (piped_rank)      latest, shared   what patches know
work          what a patch computes and tells, for estimates                 alike    patches that differ in size alone
warm          first steps in another layout                                  watching ranks that are shown the result
"""
