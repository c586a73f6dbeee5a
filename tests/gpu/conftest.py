"""Tests of what only an NVIDIA GPU can show. Without one, nothing here is collected."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "unit" / "memory"))  # the suite that every allocator passes


def pytest_ignore_collect(collection_path):
    return True if not torch.cuda.is_available() else None


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
