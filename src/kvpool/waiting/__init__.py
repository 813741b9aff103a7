"""Which threads may wait for which (threads.py), and how a coroutine waits for a thread of C++ (coroutines.py)."""
