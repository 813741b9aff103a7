"""Inference engines on kvpool: a folder each, which alone knows the engine.

Nothing here is imported by ``import kvpool``; an engine finds its folder by an entry point, or by the configuration.
"""
