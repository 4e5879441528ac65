"""The paged KV cache: block tables over one arena, prefixes shared through a radix tree."""
