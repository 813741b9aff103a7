"""Inference engines on kvpool: a folder each, which alone knows the engine.

Nothing here is imported by ``import kvpool``; the engine finds its folder by an entry point.
"""
