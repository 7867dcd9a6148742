"""`python -m vla_rlaif` is `vla-rlaif`."""

from vla_rlaif.cli import main

main()
