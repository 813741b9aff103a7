"""Hugging Face transformers on kvpool: prompts that a pool has cached are not computed again.

```
from kvpool.engines.transformers import PromptStore

store = PromptStore.of(model, dram_gib=4)
out = store.generate(input_ids, max_new_tokens=64)     # as model.generate(...)
```

See docs/how-to/transformers.md. Needs torch and transformers, which kvpool does not install.
"""

import transformers

from kvpool.engines.versions import check_version

TESTED = "5.19"
"""Releases 5.19.x of transformers; the Makefile names the same."""

check_version("transformers", transformers.__version__, TESTED)

from kvpool.engines.transformers.cache import KvpoolCache  # noqa: E402
from kvpool.engines.transformers.store import PromptStore, StoreCounts  # noqa: E402

__all__ = ["TESTED", "KvpoolCache", "PromptStore", "StoreCounts"]
