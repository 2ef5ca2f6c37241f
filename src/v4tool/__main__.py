"""Entry point of `python -m v4tool`: the same command line as the script `v4tool`."""

from v4tool.cli import main

main()
