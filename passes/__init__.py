"""Decisions: one pass per file, readable on its own."""
