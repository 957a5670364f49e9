"""The ground floor: what crosses between the other packages, and what they all need for it.

Manifests, the endpoint file, templates and script arguments cross; errors, ranges, digests, files that are written
whole, progress and what a log says of a failure are needed on both sides.

Everything here is standard library only, so it runs on the login node and inside any container.
"""
