"""`python -m foredraft` is the command `foredraft`."""

from foredraft.cli.app import main

main()
