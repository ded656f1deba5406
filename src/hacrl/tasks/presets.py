"""Well-known data sets, as options of the ``boxed`` task. Any of them can be set otherwise, one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Column names are those `boxed` looks for by itself, so that a local copy with plain answers works too.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    # problem, level, type, solution (with \boxed{}); 7,500 and 5,000 rows. Two training solutions have an
    # empty box. The test set is the whole of MATH's test split; MATH-500 is 500 of it.
    "math": {
        "train": {"path": "DigitalLearningGmbH/MATH-lighteval", "split": "train"},
        "test": {"path": "DigitalLearningGmbH/MATH-lighteval", "split": "test"},
        "skip_missing_answers": True,
    },
    # question, answer (a solution that ends in #### 18); 7,473 and 1,319 rows
    "gsm8k": {
        "train": {"path": "openai/gsm8k", "name": "main", "split": "train"},
        "test": {"path": "openai/gsm8k", "name": "main", "split": "test"},
    },
}
