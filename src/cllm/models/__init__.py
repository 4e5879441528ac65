"""Model files: finding, fetching and reading them."""
