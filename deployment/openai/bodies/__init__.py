"""What a request's body may hold, and how it is read."""
