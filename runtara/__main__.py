"""``python -m runtara`` is the command ``runtara``."""

from runtara.cli import main

if __name__ == "__main__":
    main(prog_name="runtara")
