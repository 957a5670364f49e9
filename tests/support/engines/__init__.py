"""The drop-in engine in a test's process: requests, caches of few pages, ranks, faked GPUs."""
