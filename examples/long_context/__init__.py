"""One context of several pools: four processes lend each other blocks, and attention runs where the blocks are.

The programs of this folder are run by `python -m examples.long_context`; begin with `engine.py`.
"""
