"""`python -m spiritlevel`, the same as `spiritlevel`."""

from spiritlevel.cli import main

if __name__ == "__main__":
    main()
