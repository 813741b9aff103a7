"""Which threads may wait for which (threads.py), and how coroutines wait for C++ threads (coroutines.py)."""
