"""PD-disaggregated caching: prefill and decode in separate processes, in the four designs of MemServe §5.1.

To read it, start with `designs.py`. `python -m examples.pd_disaggregated --help` runs it.
"""
