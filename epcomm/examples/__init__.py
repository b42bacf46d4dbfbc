"""Runnable examples: ``python -m epcomm.examples.digits``."""
