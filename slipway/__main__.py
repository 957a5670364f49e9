"""``python -m slipway`` is the console command ``slipway``."""

from slipway.cli import main

if __name__ == "__main__":
    main()
