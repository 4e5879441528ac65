"""`python -m cllm` is `cllm`."""

from cllm.cli import main

if __name__ == "__main__":
    main()
