"""The tiers below a KV cache: host memory beside a GPU, and disk."""
