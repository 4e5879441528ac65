"""Which replica gets a request: an index of what each one has cached, and policies that choose."""
