"""PD-disaggregated caching: prefill and decode in processes of their own, in the four designs of MemServe §5.1.

To read it, start with `designs.py`. `python -m examples.pd_disaggregated --help` runs it.
"""
