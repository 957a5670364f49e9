"""What crosses between the layers: errors, script arguments, manifests, the endpoint file, progress.

Everything here is standard library only, so it runs on the login node and inside any container.
"""
