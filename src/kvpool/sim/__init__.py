"""Clusters on a virtual clock: workloads, and the policies that run live, at the scale of thousands of GPUs.

Everything is seeded: the same arguments give the same results, byte for byte.

    clock       virtual time, and what happens when
    workload    requests with their arrivals and lengths: Poisson or from a trace
    routing_*   sessions, and instances with real indexes behind the global scheduler (MemServe's Fig 15)
    lending_*   engines that borrow each other's memory and attention, beside other designs (Infinite-LLM's study)
    multiplexing_*  models that share meshes of GPUs, beside other ways to serve them (MuxServe's study)
    packing     KV caches that grow on GPUs under a scheduler, epoch by epoch (MELL's study)

The simulator of whole clusters, behind `kvpool sim`; each stands on those above it:

    loop, sketch, links     events, quantiles without lists, transfers that wait for each other
    requests                prompts as ids of blocks
    traces, generators      where they come from: files, read row by row, and seeded workloads without end
    hardware, times         cost models from data sheets, and what a step of decoding takes
    cache, instance         an engine: blocks in two tiers over the real index; its queue and its batch
    measures, cluster       the global scheduler in front of instances, and what is counted
    setup, sizing, packed   the user's questions: one run, the fewest GPUs for a promise, MELL and its baselines
"""
