"""What the request bodies of all APIs have in common."""
