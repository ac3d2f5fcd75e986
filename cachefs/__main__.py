"""`python -m cachefs`: the same as the `cachefs` command."""

from cachefs.cli.main import main

if __name__ == "__main__":
    main()
