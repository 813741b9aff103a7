"""Reading prompts: from a request's body to the tokens that it is routed by, also in a process beside the router.

    prompts     bodies to tokens: pure, and bounded in what it makes of a body
    worker      the process that reads long bodies
    process     its handle in the router

Apart from `kvpool.control.router`, so that the process imports no HTTP. Needs the extra `kvpool[router]`.
"""
