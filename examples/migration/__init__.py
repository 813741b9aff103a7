"""Requests with long-tailed lengths on a few small instances, moved while they decode: see README.md.

Imports are absolute from the folder examples, which __main__.py puts on the path.
"""
