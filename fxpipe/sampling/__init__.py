"""A denoiser becomes programs, for every kind of call when it first comes.

trace      a call of the module in eval, without gradients   -> Traced
lowering   groups of samples, stages, patches of the rows    -> SampleStep: a program per rank, its messages
"""
