"""Decisions that make many pools one system. Pure: data in, plans out; no sockets, threads, clocks or files.

The same objects run in a live cluster and in the simulator (`kvpool.sim`). Each folder is one decision:

    from kvpool.policy import cost, lending, mell, multiplexing, routing
"""
