"""Every use of a private or unstable name of torch, in one place. Checked on torch 2.11, 2.12 and 2.13.

nodes       operations of ATen, nodes of graphs, tensors without memory
tracing     the trace that is going on: what it knows, what it does not see
regions     no_grad, autocast, checkpoints: in a trace, marks on nodes
functions   transforms of functions, a user's own autograd functions
sizes       symbolic sizes: what a trace decides by them, and how they are made again
process     switches, hooks and modes of the process
training    scalers, clipping, gradient hooks, torch's compiler
"""

from fxpipe.capture.private import sizes as sizes
from fxpipe.capture.private.functions import *  # noqa: F403
from fxpipe.capture.private.nodes import *  # noqa: F403
from fxpipe.capture.private.process import *  # noqa: F403
from fxpipe.capture.private.regions import *  # noqa: F403
from fxpipe.capture.private.tracing import *  # noqa: F403
from fxpipe.capture.private.training import *  # noqa: F403
