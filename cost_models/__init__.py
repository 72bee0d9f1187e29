"""Numbers: what a block costs in FLOPs, bytes and seconds."""
