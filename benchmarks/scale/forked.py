"""Processes that have torch and elastane imported when they start, so that many start quickly.

Knows nothing of what they do.
"""

from __future__ import annotations

import multiprocessing

__all__ = ["CONTEXT"]

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch.distributed", "elastane.elastic.transfer"])
