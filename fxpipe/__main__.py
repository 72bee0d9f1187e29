"""`python -m fxpipe` is the command line."""

from fxpipe.cli import main

main()
