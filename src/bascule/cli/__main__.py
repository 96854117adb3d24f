"""`python -m bascule.cli`, for launchers that start modules."""

from bascule.cli import main

main()
