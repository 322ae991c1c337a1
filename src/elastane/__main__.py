"""Makes `python -m elastane` the command line."""

from elastane.cli import main

if __name__ == "__main__":
    main()
