"""Sampling: a denoiser's rows over several ranks.

RowPlan + bounds of units  ->  patch graphs  ->  one program per rank

patches       which units a patch has, how many entries of every value       times    when a value is known
patch_graph   one graph per patch: local sizes, exchanges as nodes           exchanges   these nodes
fresh         exchanges as messages of this step, waited for                 forms    all forms of displaced sampling
displaced     exchanges as messages of the step before                       buckets  which of them travel together
advance       what was read is moved on by its own last change
"""
