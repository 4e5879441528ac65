"""The texts of `cllm bench drafts`."""
