"""``python -m hacrl``."""

from hacrl.cli.main import main

main()
