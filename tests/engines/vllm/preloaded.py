"""What every engine of vLLM imports, for most of the time of its start. The engines of tests are forked with it."""

from __future__ import annotations

import vllm.entrypoints.llm
import vllm.model_executor.models.llama
import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401
