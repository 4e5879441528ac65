"""The backend over torch: the paged engine on a GPU, and anywhere else torch runs."""
