"""`python -m v4tool`, for an interpreter without the installed script."""

from v4tool.cli import main

main()
