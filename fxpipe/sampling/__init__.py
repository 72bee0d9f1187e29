"""A denoiser becomes programs, for every kind of call when it first comes.

spread     a module whose calls run on all ranks                 asks for what follows
trace      a call of the module in eval, without gradients       -> Traced
case       what planning and lowering ask of so many samples: rows, runs, blocks, seconds
choosing   layouts a user leaves open, by what they would take   -> Ranked       (estimate; links)
planning   groups of samples, stages, patches, the order         -> SamplePlan
lowering   rank 0's plan, and own ranks' programs by it          -> SampleStep
programs   patch graphs, messages, forms                         -> a program per rank that is wanted
"""
