"""A Python interpreter as a tool, which runs code in a sandbox."""

from __future__ import annotations

from hacrl.environments.bundled.answers import OneAnswer
from hacrl.environments.bundled.sandbox import SandboxLimits, run_code


class PythonInterpreter(OneAnswer):
    """Tools ``run_python`` and ``submit``; reward 1 if the submitted answer equals the row's answer."""

    def __init__(
        self,
        cpu_seconds: int = 2,
        wall_seconds: float = 10.0,
        memory_mb: int = 512,
        output_characters: int = 2000,
    ) -> None:
        super().__init__()
        self._limits = SandboxLimits(cpu_seconds, wall_seconds, memory_mb, output_characters)

    def run_python(self, code: str) -> str:
        """Run Python code in a fresh interpreter and return what it prints.

        Variables are not kept between calls. The standard library's modules for mathematics, text and
        collections can be imported. There are no files, no processes and no network.

        Args:
            code: The program. The value of a last expression is printed, too.

        Returns:
            The printed text, and the error message if the code raised an error.
        """
        return run_code(str(code), self._limits).as_text()
