"""HTTP in and out, whatever the API: connections, server-sent events, JSON in slices."""
