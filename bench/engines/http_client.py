"""httpx, or its successor where that runs: the router's extra installs one of them."""

import sys

if sys.version_info >= (3, 11):
    import httpx2 as httpx
else:  # httpx2, which goes on with it, does not run there
    import httpx

__all__ = ["httpx"]
