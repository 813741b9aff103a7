"""Shared storage behind pools: directories and object stores that keep blocks by their content.

from kvpool.storage import DirectoryStore, Storage

store = DirectoryStore("/mnt/kv", size_max=500 << 30)
storage = Storage(pool, store, model="llama-3.1-8b")
storage.load(tokens, budget_s=0.2).wait()
"""

from kvpool.storage.admission import Admission, Always, OnSecondUse
from kvpool.storage.directory import DirectoryStore
from kvpool.storage.handles import StorageHandle
from kvpool.storage.keys import ContentKeys
from kvpool.storage.loading import Loaded
from kvpool.storage.saving import Saved
from kvpool.storage.stats import StorageStats
from kvpool.storage.storage import Storage
from kvpool.storage.store import Content, Store, StoreStats, Trimmed

__all__ = [
    "Admission",
    "Always",
    "Content",
    "ContentKeys",
    "DirectoryStore",
    "Loaded",
    "OnSecondUse",
    "Saved",
    "Storage",
    "StorageHandle",
    "StorageStats",
    "Store",
    "StoreStats",
    "Trimmed",
]
