"""Imported by tests that compute in bfloat16 on a CPU.

Some virtual machines report a processor's tile instructions (AMX) but do not let them run: oneDNN's
bfloat16 products then end the process. It reads this setting when it is first used, after all imports.
"""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
