"""Write docs/configuration.md from the settings records in src/hacrl/config/.

python scripts/write_configuration_reference.py
"""

from __future__ import annotations

from pathlib import Path

from hacrl.config.reference import configuration_page

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"

if __name__ == "__main__":
    PAGE.write_text(configuration_page(), encoding="utf-8")
