"""From a checked request to its answers, whatever the API."""
