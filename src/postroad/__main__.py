"""`python -m postroad` is the command line."""

from postroad.surfaces.cli import main

if __name__ == "__main__":
    main()
