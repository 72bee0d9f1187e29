"""Who races: fxpipe, and torch's own ways to train on several ranks, each with its best settings."""
