"""Reads prompts: from a request's body to the tokens for routing, also in a process beside the router.

    prompts     bodies to tokens: pure, with bounded memory
    asking      what an instance is asked for the model's tokens of a prompt
    halves      the two requests that one becomes where prefill and decode are apart
    worker      the process that reads long bodies
    process     its handle in the router

Separate from `kvpool.control.router`, so that the process imports no HTTP. Needs the extra `kvpool[router]`.
"""
