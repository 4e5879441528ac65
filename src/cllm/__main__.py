"""What `cllm` and `python -m cllm` start."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # while the rest is imported, Ctrl-C ends the process without a traceback

from cllm.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
