"""`python -m bascule`, for launchers that start modules."""

from bascule.cli import main

main()
